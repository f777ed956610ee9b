"""Boundaries of regions: what a region takes and returns, before the graph around is partitioned.

Before::

    y, flat', w', s = region_forward(flat, w)        flat' is flat, w' is a view of w
    grads = region_backward(flat', w', s, grad_y)

After::

    y, s = region_forward(flat, w)
    grads = region_backward(flat, w.t(), s, grad_y)

What a region saves of its inputs is the input itself, so the partition of the graph around it can
gather what ``flat`` and ``w`` are parts of again for the backward.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from graph_passes.graph_utils import is_region, is_view


def tidy_region_boundaries(gm: fx.GraphModule) -> None:
    """Return no inputs, nor views of them, from regions, and tell the values of their calls apart.

    Args:
        gm: the joint graph, its regions partitioned already; changed in place.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if is_region(node):
            calls.setdefault(node.args[0].target, []).append(node)
    views: list[fx.Node] = []
    for name, nodes in calls.items():
        body = gm.get_submodule(name)
        assert isinstance(body, fx.GraphModule)
        views += _lead_inputs_past(body, nodes)
        body.recompile()
        for node in nodes:
            _give_own_values(node)
    for view in views:
        arguments = fx.map_arg(view.args, lambda node: node.meta["val"])
        with view.all_input_nodes[0].meta["val"].fake_mode:
            view.meta["val"] = cast(Any, view.target)(*arguments, **view.kwargs)


def _output_of(body: fx.GraphModule) -> fx.Node:
    (output,) = body.graph.find_nodes(op="output")
    return cast(fx.Node, output)


def _items(call: fx.Node) -> dict[int, list[fx.Node]]:
    """The ``getitem`` nodes of a call by index."""
    items: dict[int, list[fx.Node]] = {}
    for user in call.users:
        if user.target is not operator.getitem:
            raise ValueError(f"region {call.name}: expected getitem as its users, got {user.name}")
        items.setdefault(cast(int, user.args[1]), []).append(user)
    return items


def _lead_inputs_past(body: fx.GraphModule, calls: list[fx.Node]) -> list[fx.Node]:
    """Drop outputs that are inputs or views of one; their users take what the region was called
    with. Returns the views that are taken of it, without values."""
    position = {n: i for i, n in enumerate(body.graph.find_nodes(op="placeholder"))}
    output = _output_of(body)
    outputs = list(output.args[0])  # type: ignore[arg-type]
    views = {i: found for i, n in enumerate(outputs) if (found := _views_of_input(n)) is not None}
    made: list[fx.Node] = []
    if not views:
        return made
    kept = [i for i in range(len(outputs)) if i not in views]
    number = {old: new for new, old in enumerate(kept)}
    output.args = (tuple(outputs[i] for i in kept),)
    for call in calls:
        for index, items in _items(call).items():
            for item in items:
                if index in number:
                    item.args = (call, number[index])
                    continue
                source, *chain = views[index]
                copies = {source: cast(fx.Node, call.args[2 + position[source]])}
                made += _copied(item, chain, copies)
                item.replace_all_uses_with(copies[outputs[index]])
                item.graph.erase_node(item)
        call.meta["val"] = tuple(call.meta["val"][i] for i in kept)
    body.graph.eliminate_dead_code()
    return made


def _views_of_input(node: Any) -> list[fx.Node] | None:
    """The input of a body that a node is or is a view of, and the views up to the node."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node):
        chain.insert(0, node)
        if node.op == "placeholder":
            return chain
        if not is_view(node) or len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0]
    return None


def _copied(
    item: fx.Node, chain: list[fx.Node], copies: dict[fx.Node, fx.Node]
) -> Iterator[fx.Node]:
    """The views of a chain, put in the place of an item of a region's call."""
    for node in chain:
        with item.graph.inserting_before(item):
            copies[node] = item.graph.node_copy(node, lambda n: copies[n])
        copies[node].meta = {"custom": dict(item.meta.get("custom") or {})}
        yield copies[node]


def _give_own_values(call: fx.Node) -> None:
    """Fake tensors of its own for a call: torch gives those of one call to all, as if they shared
    memory."""
    bases: dict[int, torch.Tensor] = {}

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with value.fake_mode:  # type: ignore[attr-defined]
            size, stride = value.shape, value.stride()
            base = bases.get(value.untyped_storage()._cdata)
            if base is not None:
                return base.as_strided(size, stride, value.storage_offset())
            fresh = torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
        bases[value.untyped_storage()._cdata] = fresh
        return fresh

    call.meta["val"] = tuple(map(own, call.meta["val"]))
    for index, items in _items(call).items():
        for item in items:
            item.meta["val"] = call.meta["val"][index]
