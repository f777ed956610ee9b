"""Flat gradients in a graph: the gradient buffer of one flat parameter, written slice by slice."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from graph_passes.graph_utils import collectives, is_reduction, op_name
from graph_passes.markers import NO_VALUE

CASTS = frozenset({"aten::_to_copy", "prims::convert_element_type"})


class Range(NamedTuple):
    """Elements of a flat gradient that one node writes, or adds to."""

    begin: int
    end: int
    adds: bool


def write_name(node: fx.Node) -> str:
    """Return the name of the operator below that a node calls, else ``""``."""
    namespace, _, name = op_name(node).partition("::")
    return name if namespace == NAMESPACE else ""


def reductions(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield the marked collectives that reduce gradients, in graph order."""
    return filter(is_reduction, collectives(graph))


def concatenation_of(reduction: fx.Node) -> fx.Node | None:
    """Return the concatenation of flattened gradients that only this reduction reads, if any."""
    source = reduction.args[0]
    cat: Any = source
    if isinstance(source, fx.Node) and op_name(source) in CASTS and len(source.users) == 1:
        cat = source.args[0]
    if not isinstance(cat, fx.Node) or op_name(cat) != "aten::cat" or len(cat.users) != 1:
        return None
    pieces: list[fx.Node] = cat.args[0]  # type: ignore[assignment]
    values = [piece.meta.get("val") for piece in pieces]
    one_row = all(v is not None and v.dim() == 1 and isinstance(v.numel(), int) for v in values)
    return cat if one_row else None


def chain_of(reduction: fx.Node) -> list[fx.Node]:
    """Return the writes of a reduction's flat gradient, from the last to ``new_flat``."""
    return chain_of_writes(reduction.args[0])


def chain_of_writes(node: object) -> list[fx.Node]:
    """Return the writes of a flat gradient, given the last one; empty for other nodes."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and write_name(node):
        chain.append(node)
        node = None if write_name(node) == "new_flat" else node.args[0]
    return chain


def ranges_of(write: fx.Node) -> list[Range]:
    """Return the elements that a node of a chain writes."""
    name = write_name(write)
    args: Any = write.args
    if name == "new_flat":
        return [Range(b, e, adds=False) for b, e in zip(args[2][::2], args[2][1::2], strict=True)]
    if name == "write_many":
        starts = list(args[1])
        numels = [source.meta["val"].numel() for source in args[2]]
    elif name == "mm_into":
        starts = [args[1]]
        numels = [math.prod(args[3].meta["val"].shape[:-1]) * args[4].meta["val"].shape[-1]]
    elif name in ("sum_into", "embedding_into"):
        starts, numels = [args[1]], [math.prod(args[2])]
    else:
        starts, numels = [args[1]], [args[3].meta["val"].numel()]
    adds = name == "add_into" or (name == "mm_into" and bool(args[5]))
    return [Range(b, b + numel, adds) for b, numel in zip(starts, numels, strict=True)]


def misplaced_writes(found: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str, str]]:
    """Find elements that are left out, written twice, or added to before they are written.

    Args:
        found: marked collectives of a graph.

    Yields:
        The node, what was expected of it, and what was found.
    """
    for reduction in filter(is_reduction, found):
        chain = chain_of(reduction)
        if not chain:
            continue
        if write_name(chain[-1]) != "new_flat":
            yield chain[-1], "a chain of writes that begins with new_flat", str(chain[-1].args[0])
            continue
        for node in chain:
            if len(node.users) != 1:
                yield node, "the next write as its only user", str(list(node.users))
        yield from _misplaced(chain[::-1])


def _misplaced(chain: list[fx.Node]) -> Iterator[tuple[fx.Node, str, str]]:
    """Check one chain, given from its first node to its last."""
    written: set[tuple[int, int]] = set()
    for node in chain:
        for begin, end, adds in ranges_of(node):
            if adds and (begin, end) not in written:
                yield node, f"a write of elements {begin} to {end} before adding", "none"
            written.add((begin, end))
    position = 0
    plain = [(r.begin, r.end, node) for node in chain for r in ranges_of(node) if not r.adds]
    for begin, end, node in sorted(plain, key=lambda item: item[:2]):
        if begin != position:
            yield node, f"a write from element {position} on", f"one from element {begin} on"
        position = end
    numel = chain[0].args[1]
    if position != numel:
        yield chain[0], f"writes up to element {numel}", f"writes up to {position}"


# -- operators -------------------------------------------------------------------------------------
# Operators that write a gradient into its slice of a flat gradient.
#
# ``new_flat`` allocates the buffer. Every other operator mutates its first argument and returns it.
# So the writes of one flat gradient are a chain in the graph, and reordering by dependencies keeps
# their order::
#
#     new_flat -> mm_into -> sum_into -> write -> reduce_scatter
#
# ``size`` (if it is not implied), ``stride`` and ``offset`` describe a slice of the flat gradient
# ``(padded_numel,)``, in elements. ``accumulate`` adds to what is there.


NAMESPACE = "fsdp_dynamo_grad"


def new_flat(like: Tensor, numel: int, gaps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized flat gradient with ``NO_VALUE`` in its gaps.

    Args:
        like: any tensor of the same device.
        numel: length.
        gaps: begin and end of each range that nothing is written to: ``[b0, e0, b1, e1, ...]``.
        dtype: dtype.
    """
    return new_flat_on(str(like.device), numel, gaps, dtype)


def new_flat_on(device: str, numel: int, gaps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return ``new_flat`` on a device that is given by name."""
    flat = torch.empty(numel, dtype=dtype, device=device)
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        flat[begin:end].fill_(NO_VALUE)
    return flat


def mm_into(
    flat: Tensor, offset: int, stride: Sequence[int], a: Tensor, b: Tensor, accumulate: bool
) -> Tensor:
    """Write the product of two matrices, or of two batches of matrices."""
    out = flat.as_strided((*a.shape[:-1], b.shape[-1]), stride, offset)
    if a.dim() == 3:
        if accumulate:
            out.baddbmm_(a, b)
        else:
            torch.bmm(a, b, out=out)
    elif accumulate:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
    return flat


def sum_into(
    flat: Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    source: Tensor,
    dims: Sequence[int],
    keepdim: bool,
) -> Tensor:
    """Write the sum of ``source`` over ``dims``."""
    torch.sum(source, list(dims), keepdim, out=flat.as_strided(size, stride, offset))
    return flat


def embedding_into(
    flat: Tensor,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    indices: Tensor,
    values: Tensor,
    mask: Tensor | None,
    padding_idx: int,
) -> Tensor:
    """Write ``values`` summed by ``indices``; 0 where ``mask`` is false, and at ``padding_idx``."""
    out = flat.as_strided(size, stride, offset).zero_()
    rows = indices.reshape(-1)
    values = values.reshape(-1, size[-1])
    if mask is not None:
        mask = mask.reshape(-1)
        rows = rows.masked_fill(~mask, 0)
        values = values.masked_fill(~mask.unsqueeze(1), 0)
    if out.is_cuda:  # index_add_ would use atomics, and sum in another order in every run
        out.index_put_((rows,), values, accumulate=True)
    else:
        out.index_add_(0, rows, values)
    if padding_idx >= 0:
        out[padding_idx].zero_()
    return flat


def add_into(flat: Tensor, offset: int, stride: Sequence[int], source: Tensor) -> Tensor:
    """Add a gradient to its slice."""
    flat.as_strided(source.shape, stride, offset).add_(source)
    return flat


def write(flat: Tensor, offset: int, stride: Sequence[int], source: Tensor) -> Tensor:
    """Copy a gradient into its slice, cast to the flat gradient's dtype."""
    flat.as_strided(source.shape, stride, offset).copy_(source)
    return flat


def write_many(flat: Tensor, offsets: Sequence[int], sources: Sequence[Tensor]) -> Tensor:
    """Copy several small gradients, each contiguous in its slice."""
    pairs = zip(offsets, sources, strict=True)
    slices = [flat.narrow(0, offset, source.numel()).view_as(source) for offset, source in pairs]
    torch._foreach_copy_(slices, list(sources))
    return flat


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (new_flat, mm_into, sum_into, embedding_into, add_into, write, write_many)
}
"""Functions behind the operators, by name; a graph run as Python calls them directly."""

_FLAT = "Tensor(a!) flat, "
_SCHEMAS = {
    "new_flat": "Tensor like, int numel, int[] gaps, ScalarType dtype",
    "mm_into": _FLAT + "int offset, int[] stride, Tensor a, Tensor b, bool accumulate",
    "sum_into": _FLAT
    + "int offset, int[] size, int[] stride, Tensor source, int[] dims, bool keepdim",
    "embedding_into": _FLAT + "int offset, int[] size, int[] stride, Tensor indices, "
    "Tensor values, Tensor? mask, int padding_idx",
    "add_into": _FLAT + "int offset, int[] stride, Tensor source",
    "write": _FLAT + "int offset, int[] stride, Tensor source",
    "write_many": _FLAT + "int[] offsets, Tensor[] sources",
}


def _fake_new_flat(like: Any, numel: int, gaps: Any, dtype: torch.dtype) -> Any:
    return like.new_empty(numel, dtype=dtype)


def _fake_write(flat: Any, *_: Any) -> Any:
    return flat


def _returning_nothing(function: Callable[..., Any]) -> Callable[..., None]:
    def run(*args: Any) -> None:
        function(*args)

    return run


_library = torch.library.Library(NAMESPACE, "DEF")


def _define(name: str, returns: str, function: Callable[..., Any], fake: Any) -> None:
    schema = f"{name}({_SCHEMAS[name.rstrip('_')]}) -> {returns}"
    _library.define(schema, tags=(torch.Tag.flexible_layout,))
    for key in ("CPU", "CUDA"):
        _library.impl(name, function, key)
    _library.impl(name, fake, "Meta")


for _name, _function in FUNCTIONS.items():
    if _name == "new_flat":
        _define(_name, "Tensor", _function, _fake_new_flat)
    else:
        _define(_name, "Tensor(a!)", _function, _fake_write)
        _nothing = _returning_nothing(_function)
        _define(f"{_name}_", "()", _nothing, _returning_nothing(_fake_write))

OPERATORS = getattr(torch.ops, NAMESPACE)
"""The operators. Each but ``new_flat`` has a form ``<name>_`` without result, for Inductor."""
