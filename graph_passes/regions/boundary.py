"""Boundaries of regions: what a region takes and returns, before the graph around is partitioned.

Before::

    y, flat', x', s = region_forward(flat, x)        flat' is flat, x' is x
    grads = region_backward(flat', x', s, grad_y)

After::

    y, s = region_forward(flat, x)
    grads = region_backward(flat, x, s, grad_y)

What a region saves of its inputs is the input itself, so the partition of the graph around it can
gather ``flat`` again for the backward.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch import fx

from graph_passes.graph_utils import is_region


def tidy_region_boundaries(gm: fx.GraphModule) -> None:
    """Return no inputs from the regions of a joint graph, and tell the values of its calls apart.

    Args:
        gm: the joint graph, its regions partitioned already; changed in place.
    """
    calls: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if is_region(node):
            calls.setdefault(node.args[0].target, []).append(node)
    for name, nodes in calls.items():
        body = gm.get_submodule(name)
        assert isinstance(body, fx.GraphModule)
        _lead_inputs_past(body, nodes)
        body.recompile()
        for node in nodes:
            _give_own_values(node)


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


def _lead_inputs_past(body: fx.GraphModule, calls: list[fx.Node]) -> None:
    """Drop outputs that are inputs; their users take what the region was called with."""
    position = {n: i for i, n in enumerate(body.graph.find_nodes(op="placeholder"))}
    output = _output_of(body)
    outputs = list(output.args[0])  # type: ignore[arg-type]
    kept = [i for i, node in enumerate(outputs) if node not in position]
    if len(kept) == len(outputs):
        return
    number = {old: new for new, old in enumerate(kept)}
    output.args = (tuple(outputs[i] for i in kept),)
    for call in calls:
        for index, items in _items(call).items():
            for item in items:
                if index in number:
                    item.args = (call, number[index])
                else:
                    operand = call.args[2 + position[outputs[index]]]
                    item.replace_all_uses_with(cast(fx.Node, operand))
                    item.graph.erase_node(item)
        call.meta["val"] = tuple(call.meta["val"][i] for i in kept)


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
