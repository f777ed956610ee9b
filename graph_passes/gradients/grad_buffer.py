"""Gradient buffer: producers of gradients write into the flat gradient that is reduced.

Before::

    mm_1 -> view --+
    zeros ---------+-> cat (-> cast) -> reduce_scatter
    sum_1 -> view -+

After::

    new_flat -> mm_into -> sum_into -> reduce_scatter

The flat gradient is allocated right before its first write, with ``NO_VALUE`` where nothing is
written: padding, and parameters without a gradient. A gradient is copied (``write``) if another
node reads it too, or if its operator cannot write into a slice. If gradients are cast for the
reduction, that copy is the cast.

``add(mm, mm)``, a weight used twice, becomes a product and a product that accumulates. That rounds
once less: the only change that is not bitwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graph_passes.gradients.flat_gradient import (
    OPERATORS,
    chain_of,
    concatenation_of,
    reductions,
    write_name,
)
from graph_passes.gradients.producers import PRODUCERS, SUMS, GradSlice, Write, is_zero, writes_of
from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import num_bytes, order_index


@graph_pass()
def grad_buffer(graph: fx.Graph) -> None:
    """Write gradients right into the flat gradient; a compiler fuses sums with the copy."""
    _rewrite_all(graph, PRODUCERS)


@graph_pass("grad_buffer")
def grad_buffer_node_by_node(graph: fx.Graph) -> None:
    """Write gradients right into the flat gradient, sums included."""
    _rewrite_all(graph, PRODUCERS | SUMS)


def _rewrite_all(graph: fx.Graph, producers: dict[str, Any]) -> None:
    for node in list(reductions(graph)):
        cat = concatenation_of(node)
        if cat is not None:
            _rewrite(graph, node, cat, producers)


def _rewrite(graph: fx.Graph, reduction: fx.Node, cat: fx.Node, producers: dict[str, Any]) -> None:
    """Replace one concatenation by a chain of writes."""
    source: fx.Node = reduction.args[0]  # type: ignore[assignment]
    value = source.meta["val"]
    gaps: list[int] = []
    writes: list[Write] = []
    for node, slot in _slots(cat, value.dtype):
        if not slot.numel():
            continue
        if not is_zero(node):
            writes += writes_of(GradSlice(node, slot), producers)
            continue
        begin = int(slot.storage_offset())
        if gaps and gaps[-1] == begin:
            gaps[-1] += slot.numel()
        else:
            gaps += [begin, begin + slot.numel()]
    if not writes:
        return
    places = {write.node: _place(write.node, cat) for write in writes}
    writes.sort(key=lambda write: places[write.node])  # nodes compare by their place in the graph
    like = next(argument for argument in writes[0].args if isinstance(argument, fx.Node))
    place = places[writes[0].node]
    args = (like, int(value.numel()), gaps, value.dtype)
    flat = _behind(place, OPERATORS.new_flat.default, args)
    _describe(flat, writes[0].node, value)
    for write in writes:
        anchor = flat if places[write.node] is place else places[write.node]
        place = places[write.node]
        flat = _behind(anchor, write.target, (flat, *write.args))
        _describe(flat, write.node, value)
    reduction.replace_input_with(source, flat)
    _erase_unused(graph, source)


def _slots(cat: fx.Node, dtype: torch.dtype) -> list[tuple[fx.Node, torch.Tensor]]:
    """Return the inputs of a concatenation, each with its slice of a flat gradient on meta."""
    pieces: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    sizes = [int(piece.meta["val"].numel()) for piece in pieces]
    flat = torch.empty(sum(sizes), dtype=dtype, device="meta")
    return list(zip(pieces, flat.split(sizes), strict=True))


def _place(producer: fx.Node, cat: fx.Node) -> fx.Node:
    """Return the node that a write follows; inputs are copied right before ``cat``."""
    return cat.prev if producer.op == "placeholder" else producer


def _behind(anchor: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with anchor.graph.inserting_after(anchor):
        return anchor.graph.call_function(target, args)


def _describe(node: fx.Node, producer: fx.Node, value: torch.Tensor) -> None:
    """Give a write the marks of the compute that it replaces."""
    if producer.op != "placeholder":
        dropped = ("val", "tensor_meta", "eager_input_vals")
        node.meta.update({k: v for k, v in producer.meta.items() if k not in dropped})
    node.meta["val"] = value


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node without users, and what only it needed."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for source in inputs:
        _erase_unused(graph, source)


# -- group writes ----------------------------------------------------------------------------------
# Group writes: small gradients are copied into the flat gradient together.
#
# Before::
#
#     new_flat -> write -> mm_into -> write -> reduce_scatter
#
# After::
#
#     new_flat -> mm_into -> write_many -> reduce_scatter
#
# For graphs that are run node by node, where every node costs host time. Large gradients are
# written where they are made, so that each is freed at once.


SMALL_BYTES = 1 << 16


@graph_pass(is_bitwise=True)
def group_writes(graph: fx.Graph) -> None:
    """Merge each flat gradient's small copies into one, after the last of their sources."""
    for reduction in list(reductions(graph)):
        small = [node for node in reversed(chain_of(reduction)) if _is_small(node)]
        if len(small) > 1:
            _merge(graph, reduction, small)


def _is_small(node: fx.Node) -> bool:
    if write_name(node) != "write":
        return False
    source: fx.Node = node.args[3]  # type: ignore[assignment]
    strides = torch.empty(source.meta["val"].shape, device="meta").stride()
    return num_bytes(source) <= SMALL_BYTES and list(node.args[2]) == list(strides)  # type: ignore[arg-type]


def _merge(graph: fx.Graph, reduction: fx.Node, writes: list[fx.Node]) -> None:
    offsets = [node.args[1] for node in writes]
    sources: list[fx.Node] = [node.args[3] for node in writes]  # type: ignore[misc]
    meta = dict(writes[-1].meta)
    for node in writes:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    flat: fx.Node = reduction.args[0]  # type: ignore[assignment]
    index = order_index(graph)
    last = max([flat, *sources], key=index.__getitem__)
    with graph.inserting_after(last):
        merged = graph.call_function(OPERATORS.write_many.default, (flat, offsets, sources))
    merged.meta.update(meta)
    reduction.replace_input_with(flat, merged)
    _make_late(chain_of(reduction)[-1])


def _make_late(new_flat: fx.Node) -> None:
    """Move the allocation of a flat gradient to its first write, which may be later now."""
    first = next(iter(new_flat.users))
    first.prepend(new_flat)
    like = next(node for node in first.all_input_nodes if node is not new_flat)
    new_flat.args = (like, *new_flat.args[1:])
