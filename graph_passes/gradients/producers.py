"""From a gradient in a graph to the operators that write it into its slice.

A gradient reaches the concatenation through views (``mm -> t -> view -> cat``). ``trace_back``
undoes them on the slice, so that the gradient's producer can write there::

    slice (512,) at 1696   <- view   <- (16, 32), stride (32, 1), at 1696   <- mm
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from graph_passes.gradients.flat_gradient import CASTS, OPERATORS, chain_of_writes
from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import is_collective, is_wait, op_name
from graph_passes.markers import NO_VALUE, cuts_views

_RESHAPES = frozenset(
    f"aten::{name}" for name in ("view", "_unsafe_view", "reshape", "clone", "unsqueeze", "squeeze")
)
_TRANSPOSES = frozenset({"aten::t", "aten::transpose", "aten::permute"})
_ZEROS = frozenset({"aten::zeros", "aten::zeros_like", "aten::new_zeros"})
_FULL = {"aten::full": 1, "aten::full_like": 1, "aten::new_full": 2}  # where the value stands
_ROW_WRITES = frozenset({"aten::index_put", "aten::_unsafe_index_put"})


@dataclass(frozen=True)
class GradSlice:
    """A gradient and its slice.

    Attributes:
        node: node that makes the gradient.
        slot: meta tensor with shape, stride and offset of the slice, and the flat gradient's dtype.
    """

    node: fx.Node
    slot: torch.Tensor

    @property
    def value(self) -> torch.Tensor:
        """Metadata of the gradient."""
        value: torch.Tensor = self.node.meta["val"]
        return value

    @property
    def is_cast(self) -> bool:
        """Whether writing it changes its dtype."""
        return self.value.dtype != self.slot.dtype

    @property
    def where(self) -> tuple[int, list[int]]:
        """Offset and stride of the slice."""
        return int(self.slot.storage_offset()), list(self.slot.stride())


@dataclass(frozen=True)
class Write:
    """An operator that writes a gradient.

    Attributes:
        node: the gradient's producer, whose place the write takes.
        target: the operator.
        args: its arguments after the flat gradient.
    """

    node: fx.Node
    target: torch._ops.OpOverload
    args: tuple[Any, ...]


def is_private(node: fx.Node) -> bool:
    """Whether a node is exactly one argument of exactly one node."""
    if len(node.users) != 1 or node.op != "call_function":
        return False
    count = 0

    def see(argument: fx.Node) -> None:
        nonlocal count
        count += argument is node

    user = next(iter(node.users))
    fx.map_arg((user.args, user.kwargs), see)
    return count == 1


def is_zero(node: fx.Node) -> bool:
    """Whether a node is a constant of zeros, possibly seen through views."""
    name = op_name(node)
    if name in _RESHAPES or name == "aten::expand":
        return isinstance(node.args[0], fx.Node) and is_zero(node.args[0])
    return name in _ZEROS or (name in _FULL and bool(node.args[_FULL[name]] == 0))


def trace_back(piece: GradSlice) -> GradSlice:
    """Undo views, and a cast to the flat gradient's dtype, between a producer and its slice."""
    while is_private(piece.node):
        source = _before(piece)
        if source is None:
            break
        piece = source
    return piece


def _before(piece: GradSlice) -> GradSlice | None:
    """Undo one node of ``trace_back``; ``None`` if it is no view, or none that can be undone."""
    node, slot = piece.node, piece.slot
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    name = op_name(node)
    if name in _RESHAPES:
        try:
            return GradSlice(source, slot.view(source.meta["val"].shape))
        except (RuntimeError, ValueError):  # on meta tensors, and on fake ones
            return None
    if name in _TRANSPOSES:
        return GradSlice(source, slot.permute(_inverse(node, slot.dim())))
    if name in CASTS and not piece.is_cast and source.meta["val"].shape == slot.shape:
        return GradSlice(source, slot)
    return None


def _inverse(node: fx.Node, num_dims: int) -> list[int]:
    """Return the permutation that undoes a transposing node."""
    dims = list(range(num_dims))
    if num_dims < 2:
        return dims
    if op_name(node) == "aten::permute":
        order: list[int] = list(node.args[1])  # type: ignore[arg-type]
        for position, dim in enumerate(order):
            dims[dim % num_dims] = position
    else:
        one, other = node.args[1:3] if op_name(node) == "aten::transpose" else (0, -1)
        dims[one], dims[other] = dims[other], dims[one]  # type: ignore[index]
    return dims


# -- producers ------------------------------------------------------------------------------------


def _product(piece: GradSlice, accumulate: bool) -> Write | None:
    a, b = piece.node.args[-2:]
    target = OPERATORS.mm_into.default
    return Write(piece.node, target, (*piece.where, a, b, accumulate))


def _sum(piece: GradSlice, accumulate: bool) -> Write | None:
    node = piece.node
    if accumulate or node.kwargs or len(node.args) < 2 or not node.args[1]:
        return None
    offset, stride = piece.where
    keepdim = len(node.args) > 2 and bool(node.args[2])
    args = (offset, list(piece.slot.shape), stride, node.args[0], node.args[1], keepdim)
    return Write(node, OPERATORS.sum_into.default, args)


def _rows(piece: GradSlice, indices: Any, values: Any, mask: Any, padding_idx: int) -> Write | None:
    """Write rows summed by index. In low precision only the operator itself sums in float."""
    size = list(piece.slot.shape)
    shape = [*indices.meta["val"].shape, *size[1:]]
    if piece.slot.dtype not in (torch.float32, torch.float64) or len(size) != 2:
        return None
    if list(values.meta["val"].shape) != shape:
        return None
    if mask is not None and list(mask.meta["val"].shape) != [*shape[:-1], 1]:
        return None
    offset, stride = piece.where
    args = (offset, size, stride, indices, values, mask, padding_idx)
    return Write(piece.node, OPERATORS.embedding_into.default, args)


def _embedding(piece: GradSlice, accumulate: bool) -> Write | None:
    values, indices, _, padding_idx, scale_by_frequency = piece.node.args
    if accumulate or scale_by_frequency:
        return None
    return _rows(piece, indices, values, None, padding_idx)  # type: ignore[arg-type]


def _masked_rows(piece: GradSlice, accumulate: bool) -> Write | None:
    base, mask, indices, values = piece.node.args
    if accumulate or not is_zero(base) or len(indices) != 1:  # type: ignore[arg-type]
        return None
    return _rows(piece, indices[0], values, mask, -1)  # type: ignore[index]


def _unmasked_rows(piece: GradSlice, accumulate: bool) -> Write | None:
    base, indices, values, *adds = piece.node.args
    if accumulate or adds != [True] or not is_zero(base) or len(indices) != 1:  # type: ignore[arg-type]
        return None
    return _rows(piece, indices[0], values, None, -1)  # type: ignore[index]


_Producer = Callable[[GradSlice, bool], Write | None]

PRODUCERS: dict[str, _Producer] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product,  # only as a term: see below
    "aten::embedding_dense_backward": _embedding,
    "aten::_unsafe_masked_index_put_accumulate": _masked_rows,
    **dict.fromkeys(_ROW_WRITES, _unmasked_rows),
}
"""Producers that can write into a slice under every compiler."""

SUMS: dict[str, _Producer] = {"aten::sum": _sum}
"""Reductions, which write into a slice only where no compiler fuses them with the copy."""


def writes_of(piece: GradSlice, producers: dict[str, _Producer]) -> list[Write]:
    """Return the writes that replace a gradient, in graph order.

    A sum of two gradients, ``add(mm, x)``, becomes a write and a write that accumulates.

    Args:
        piece: input of a concatenation and its slice.
        producers: operators that can write by themselves.
    """
    whole = trace_back(piece)
    terms = _terms(whole)
    terms.sort(key=lambda term: term.node)  # nodes compare by their place in the graph
    first = _direct(terms[0], producers, accumulate=False)
    if first is None:
        return [_copy(whole)]
    writes = [first]
    for term in terms[1:]:
        write = _direct(term, producers, accumulate=True)
        writes.append(write or _add(term))
    return writes


def _direct(piece: GradSlice, producers: dict[str, _Producer], accumulate: bool) -> Write | None:
    producer = producers.get(op_name(piece.node))
    if producer is None or piece.is_cast or not is_private(piece.node):
        return None
    if op_name(piece.node) == "aten::addmm" and not accumulate:
        return None  # its first operand could not be written before it
    return producer(piece, accumulate)


def _copy(piece: GradSlice) -> Write:
    return Write(piece.node, OPERATORS.write.default, (*piece.where, piece.node))


def _add(piece: GradSlice) -> Write:
    return Write(piece.node, OPERATORS.add_into.default, (*piece.where, piece.node))


def _terms(piece: GradSlice) -> list[GradSlice]:
    """Return the terms whose sum a gradient is."""
    node = piece.node
    name = op_name(node)
    if piece.is_cast or not is_private(node) or node.kwargs:
        return [piece]
    if name == "aten::add":
        summands = list(node.args)
    elif name == "aten::addmm":
        summands = [node.args[0]]
    else:
        return [piece]
    if not all(isinstance(s, fx.Node) and _is_like(s, piece) for s in summands):
        return [piece]
    found = [] if name == "aten::add" else [piece]
    for summand in summands:
        found += _terms(trace_back(GradSlice(summand, piece.slot)))  # type: ignore[arg-type]
    return found


def _is_like(node: fx.Node, piece: GradSlice) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.shape == piece.slot.shape
        and value.dtype == piece.slot.dtype
        and is_private(node)
    )


# -- absent ----------------------------------------------------------------------------------------
# Unused parameters: what a graph puts into a flat gradient for parameters that no loss touches.
#
# Before::
#
#     mm -> view --+
#     zeros -------+-> cat -> reduce_scatter
#
# After::
#
#     mm -> view --+
#     full(-0.0) --+-> cat -> reduce_scatter
#
# Autograd fills in zeros. After the reduction they could not be told from a gradient that is zero.


_CONSTANTS = frozenset({"aten::zeros", "aten::full"})

Ranges = Sequence[tuple[int, int]]
"""Begin and end of ranges of elements, in order."""


@graph_pass(is_bitwise=True)
def absent_gradients(graph: fx.Graph) -> None:
    """Write ``NO_VALUE`` for parameters without a gradient, in what is reduced."""
    for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        if not cuts_views(cat):
            continue
        for index, piece in enumerate(cat.args[0]):
            if op_name(piece) in _CONSTANTS and is_zero(piece):
                _replace(cat, index, piece)


def _replace(cat: fx.Node, index: int, piece: fx.Node) -> None:
    value = piece.meta["val"]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with cat.graph.inserting_before(cat):
        size = [value.numel()]
        absent = cat.graph.call_function(torch.ops.aten.full.default, (size, NO_VALUE), options)
    absent.meta.update(piece.meta)
    pieces: list[Any] = list(cat.args[0])  # type: ignore[arg-type]
    pieces[index] = absent
    cat.args = (pieces, *cat.args[1:])
    if not piece.users:
        cat.graph.erase_node(piece)


def absent_in(flat_gradient: object) -> Ranges:
    """Return the elements of a flat gradient that this rank does not compute.

    Args:
        flat_gradient: input of a reduction: a concatenation or a chain of writes, perhaps cast or
            reduced before. Of a sum (a unit that is called several times), the result is what all
            terms lack. Gradients of earlier steps, a graph input, are left out: their values tell.
    """
    if not isinstance(flat_gradient, fx.Node):
        return ()
    node, name = flat_gradient, op_name(flat_gradient)
    if name in CASTS or is_wait(node) or is_collective(node):
        return absent_in(node.args[0])
    if name == "aten::add":
        terms = [absent_in(term) for term in node.all_input_nodes if not _is_input(term)]
        return reduce(_common, terms) if terms else ()
    if name == "aten::cat":
        return _absent_pieces(node)
    chain = chain_of_writes(node)
    if not chain:
        return ()
    gaps: Any = chain[-1].args[2]
    return tuple(zip(gaps[::2], gaps[1::2], strict=True))


def _is_input(node: fx.Node) -> bool:
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _common(one: Ranges, other: Ranges) -> Ranges:
    pairs = [(max(a, b), min(end, other_end)) for a, end in one for b, other_end in other]
    return tuple((begin, end) for begin, end in pairs if begin < end)


def _absent_pieces(cat: fx.Node) -> Ranges:
    pieces: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    ends = list(accumulate(int(piece.meta["val"].numel()) for piece in pieces))
    begins = [0, *ends[:-1]]
    spans = zip(pieces, begins, ends, strict=True)
    return tuple((begin, end) for piece, begin, end in spans if _is_absent(piece))


def _is_absent(piece: fx.Node) -> bool:
    return op_name(piece) == "aten::full" and is_zero(piece)
