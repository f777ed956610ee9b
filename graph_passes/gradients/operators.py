"""Operators that write a gradient into its slice of a flat gradient.

``new_flat`` makes the buffer. Every other operator mutates its first argument and returns it, so
that a graph holds the writes of one flat gradient as a chain, and whoever moves nodes by what
they depend on keeps the order right::

    new_flat -> mm_into -> sum_into -> write -> reduce_scatter

A slice is given as ``size`` (where the operator cannot tell), ``stride`` and ``offset`` within
the flat gradient ``(padded_numel,)``, in elements. ``accumulate`` adds to what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_passes.markers import NO_VALUE

NAMESPACE = "fsdp_dynamo_grad"


def new_flat(like: Tensor, numel: int, gaps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialized flat gradient, ``NO_VALUE`` in its gaps.

    Args:
        like: any tensor of the same device.
        numel: its length.
        gaps: begin and end of each range that nothing is written to, in order:
            ``[b0, e0, b1, e1, ...]``.
        dtype: its dtype.
    """
    return new_flat_on(str(like.device), numel, gaps, dtype)


def new_flat_on(device: str, numel: int, gaps: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``new_flat``, on a device that is given by name."""
    flat = torch.empty(numel, dtype=dtype, device=device)
    for begin, end in zip(gaps[::2], gaps[1::2], strict=True):
        flat[begin:end].fill_(NO_VALUE)
    return flat


def mm_into(
    flat: Tensor, offset: int, stride: Sequence[int], a: Tensor, b: Tensor, accumulate: bool
) -> Tensor:
    """The product of two matrices, or of two batches of matrices."""
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
    """The sum of ``source`` over ``dims``."""
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
    """Rows ``values``, summed by ``indices``; 0 where ``mask`` is false, and at ``padding_idx``."""
    out = flat.as_strided(size, stride, offset).zero_()
    rows = indices.reshape(-1)
    values = values.reshape(-1, size[-1])
    if mask is not None:
        mask = mask.reshape(-1)
        rows = rows.masked_fill(~mask, 0)
        values = values.masked_fill(~mask.unsqueeze(1), 0)
    if out.is_cuda:  # index_add_ would use atomics: another sum in every run
        out.index_put_((rows,), values, accumulate=True)
    else:
        out.index_add_(0, rows, values)
    if padding_idx >= 0:
        out[padding_idx].zero_()
    return flat


def add_into(flat: Tensor, offset: int, stride: Sequence[int], source: Tensor) -> Tensor:
    """Add a gradient to what is in its slice."""
    flat.as_strided(source.shape, stride, offset).add_(source)
    return flat


def write(flat: Tensor, offset: int, stride: Sequence[int], source: Tensor) -> Tensor:
    """Copy a gradient into its slice, cast to the flat gradient's dtype."""
    flat.as_strided(source.shape, stride, offset).copy_(source)
    return flat


def write_many(flat: Tensor, offsets: Sequence[int], sources: Sequence[Tensor]) -> Tensor:
    """``write`` of several small gradients, each contiguous in its slice."""
    pairs = zip(offsets, sources, strict=True)
    slices = [flat.narrow(0, offset, source.numel()).view_as(source) for offset, source in pairs]
    torch._foreach_copy_(slices, list(sources))
    return flat


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (new_flat, mm_into, sum_into, embedding_into, add_into, write, write_many)
}
"""Functions behind the operators, by name; a graph run as Python may call them directly."""

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
"""The operators. Each but ``new_flat`` also comes as ``<name>_``, which returns nothing: the form
that Inductor takes."""
