"""Boundaries of regions: what a region takes and returns, before the graph around is partitioned.

Before::

    y, flat', x', s, v = region_forward(flat, x)     flat' is flat, x' is x, v is a view of y
    grads = region_backward(flat', x', s, v, grad_y)

After::

    y, s, v = region_forward(flat, x)                y is a copy
    grads = region_backward(flat, x, s, v, grad_y)

What a region saves of its inputs is the input itself, so the partition of the graph around it can
gather ``flat`` again for the backward. And no output shares memory with another value that the
graph around the region knows under another name: a compiler may reuse the memory of the one while
the other is alive.
"""

from __future__ import annotations

import operator
from typing import cast

import torch
from torch import fx

from graph_passes.graph_utils import is_backward_region, is_region


def tidy_region_boundaries(gm: fx.GraphModule) -> None:
    """Return no inputs and no shared memory from the regions of a joint graph.

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
        _separate_outputs(body, nodes)
        body.recompile()


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


def _separate_outputs(body: fx.GraphModule, calls: list[fx.Node]) -> None:
    """Copy outputs that share memory with an input, or with another output and not only saved."""
    output = _output_of(body)
    outputs = list(output.args[0])  # type: ignore[arg-type]
    inputs = {_storage(node) for node in body.graph.find_nodes(op="placeholder")}
    users = [_items(call) for call in calls]
    for index, node in enumerate(outputs):
        storage = _storage(node)
        if storage is None:
            continue
        others = {_storage(other) for i, other in enumerate(outputs) if i != index}
        if storage in inputs or (storage in others and not _only_saved(users, index)):
            outputs[index] = _copy(body.graph, output, node)
    output.args = (tuple(outputs),)


def _only_saved(items: list[dict[int, list[fx.Node]]], index: int) -> bool:
    """Whether an output goes to nothing but the backward."""
    nodes = [item for by_index in items for item in by_index.get(index, ())]
    return all(is_backward_region(user) for item in nodes for user in item.users)


def _copy(graph: fx.Graph, output: fx.Node, node: fx.Node) -> fx.Node:
    with graph.inserting_before(output):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = {k: v for k, v in node.meta.items() if k not in ("eager_input_vals", "recompute")}
    value = node.meta["val"]
    with value.fake_mode:
        copy.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return copy


def _storage(node: object) -> int | None:
    """A number of the memory behind a node's tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
