"""Operators of ``RowDTensor``.

==================================  ==============================================================
element by element, also of lists   on this rank's rows; other operands have the same rows, are
                                    whole tensors, or broadcast to one
sums, norms, largest values         of the whole tensor: this rank's, then an all-reduce
random values                       drawn for the whole tensor, so that ranks with equal seeds get
                                    what one process gets
anything else                       on whole tensors, which all ranks gather; raises where a
                                    gradient is needed (``row_gathers``)
==================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_dynamo.core.row_gathers import WholeDTensor, count_write, on_whole
from fsdp_dynamo.core.row_operands import holds_rows, rows_of, rows_of_torchs
from fsdp_dynamo.core.row_reductions import REDUCTIONS

aten = torch.ops.aten


def run(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator with a ``RowDTensor`` among its arguments.

    Raises:
        UnsupportedError: an operator of the table's last row, where a gradient is needed.
        FSDPValueError: an operand of another shape, or of other rows.
    """
    return _implementation(func)(cls, func, args, kwargs)


@cache
def _implementation(func: Any) -> Callable[..., Any]:
    operator = _operator(func)
    return _counted(operator) if func._schema.is_mutable else operator


def _operator(func: Any) -> Callable[..., Any]:
    if func in _OWN:
        return _OWN[func]
    name = func._schema.name
    if name in _RANDOM:
        return _random
    if name in _NEW:
        return _new
    if name in _VIEWS:
        return _view
    if name in _REDUCING_LISTS:
        return on_whole
    if name in _FUSED or name.startswith("aten::_foreach_"):
        return _elementwise_lists
    if name in _ELEMENTWISE:
        return _elementwise
    return _elementwise if torch.Tag.pointwise in func.tags else on_whole


def _counted(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that writes into rows, of which views of rows have to know."""

    def run_it(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = operator(cls, func, args, kwargs)
        count_write()
        if isinstance(args[0], (list, tuple)):  # autograd raises the versions of single tensors
            increment_version(args[0])
        return out

    return run_it


_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "_pin_memory",
        "_to_copy",
        "alias",
        "clone",
        "detach",
        "detach_",
        "empty_like",
        "fill_",
        "full_like",
        "is_pinned",
        "masked_fill",
        "masked_fill_",
        "nan_to_num_",
        "ones_like",
        "record_stream",
        "zero_",
        "zeros_like",
    )
)
"""Beside those that torch tags as pointwise."""
_FUSED = frozenset(f"aten::_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd"))
_REDUCING_LISTS = frozenset(("aten::_foreach_max", "aten::_foreach_powsum"))
_RANDOM = frozenset(
    f"aten::{name}"
    for name in (
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "rand_like",
        "randint_like",
        "randn_like",
        "random_",
        "uniform_",
    )
)
_NEW = frozenset(f"aten::new_{name}" for name in ("empty", "full", "ones", "zeros"))
_VIEWS = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "expand", "reshape"))


# -- element by element --------------------------------------------------------------------------


def _operand(value: Any, row: Any) -> Any:
    """What an operator on rows takes in place of an operand."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.current() if isinstance(value, WholeDTensor) else value
    if value.numel() == 1 and not isinstance(value, type(row)):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.reshape(()) if value.dim() else value
    if not isinstance(value, DTensor) or isinstance(value, type(row)):
        return rows_of(row, value)
    if all(placement.is_replicate() for placement in value.placements):
        return rows_of(row, value._local_tensor)
    return rows_of_torchs(row._placing, value)


def _copy(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``row.copy_(value)``, of torch's DTensors too."""
    row, value, *others = args
    if isinstance(row, cls):
        func(row._local_tensor, _operand(value, row), *others)  # type: ignore[attr-defined]
        return row
    is_torchs = isinstance(row, DTensor) and not isinstance(row, WholeDTensor)
    if not is_torchs or not holds_rows(value._placing, row):
        return on_whole(cls, func, args, kwargs)  # a plain tensor would take rows
    func(row._local_tensor, value._local_tensor, *others)
    return row


def _elementwise(
    cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    row: Any = next(one for one in (*args, *kwargs.values()) if isinstance(one, cls))
    schema = func._schema
    if schema.is_mutable:
        target = kwargs.get("out", args[0])
        if not isinstance(target, cls):
            return on_whole(cls, func, args, kwargs)  # a plain tensor would take rows
    local = [_operand(one, row) for one in args]
    out = func(*local, **{name: _operand(one, row) for name, one in kwargs.items()})
    if schema.is_mutable:
        return target
    if isinstance(out, torch.Tensor):
        return _as_rows(out, row)
    return [_as_rows(one, row) for one in out] if isinstance(out, (list, tuple)) else out


def _as_rows(out: torch.Tensor, row: Any) -> Any:
    """A result as rows; of another shape, it is of an operator that is wrong in the lists above."""
    assert out.shape == row._local_tensor.shape
    return row._placing.dtensor(out)


def _elementwise_lists(
    cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An operator of lists, element by element of the tensors in the same place of each list."""
    first = args[0]
    if all(type(one) is cls for one in first):
        rows: list[Any] = list(first)
    else:  # others among them, or in the place of all
        lists = [one for one in args if isinstance(one, (list, tuple)) and len(one) == len(first)]
        rows = [
            next((t for t in at if isinstance(t, cls)), None) for at in zip(*lists, strict=True)
        ]
        is_of_rows = [row is not None for row in rows]
        if not any(is_of_rows):
            return on_whole(cls, func, args, kwargs)
        if not all(is_of_rows):
            return _in_two_calls(func, args, kwargs, is_of_rows)
    if func._schema.is_mutable and any(not isinstance(one, cls) for one in first):
        return on_whole(cls, func, args, kwargs)  # a plain tensor would take rows

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _operand(value, rows[0])
        if len(value) != len(rows):
            return value
        return [
            one._local_tensor
            if type(one) is cls and one._placing is row._placing  # type: ignore[attr-defined]
            else _operand(one, row)
            for one, row in zip(value, rows, strict=True)
        ]

    out = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        return None
    return [_as_rows(one, row) for row, one in zip(rows, out, strict=True)]


def _in_two_calls(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_of_rows: list[bool]
) -> Any:
    """An operator of lists of which only some tensors are rows."""

    def called(wanted: bool) -> Iterator[Any]:
        def part(value: Any) -> Any:
            if not isinstance(value, (list, tuple)) or len(value) != len(is_of_rows):
                return value
            return [one for one, is_row in zip(value, is_of_rows, strict=True) if is_row == wanted]

        return iter(
            func(*map(part, args), **{name: part(one) for name, one in kwargs.items()}) or ()
        )

    outs = {wanted: called(wanted) for wanted in (True, False)}
    return None if func._schema.is_mutable else [next(outs[is_row]) for is_row in is_of_rows]


def _index_put(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``row[mask] = value`` with a mask of the same rows."""
    row, masks, value, *others = args
    is_mask = len(masks) == 1 and isinstance(masks[0], cls) and masks[0].dtype is torch.bool
    if not is_mask or value.numel() != 1:
        return on_whole(cls, func, args, kwargs)
    func(row._local_tensor, [rows_of(row, masks[0])], _operand(value, row), *others)
    return row


def _new(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``new_zeros()`` and others: rows of the same shape, else a plain tensor."""
    row, size, *others = args
    local = row._local_tensor
    if torch.Size(size) == row.shape:
        return row._placing.dtensor(func(local, local.shape, *others, **kwargs))
    return func(local, size, *others, **kwargs)


def _view(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of the same shape."""
    row, size = args[:2]
    wanted = [own if one == -1 else one for one, own in zip(size, row.shape, strict=False)]
    if len(size) == row.dim() and torch.Size(wanted) == row.shape:
        return row._placing.dtensor(row._local_tensor.view_as(row._local_tensor))
    return on_whole(cls, func, args, kwargs)


def _random(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row, *others = args
    rows, local = row._placing.rows, row._local_tensor
    whole = torch.empty(rows.shape, dtype=local.dtype, device=local.device)
    drawn = rows.take(func(whole, *others, **kwargs))
    if not func._schema.is_mutable:
        return row._placing.dtensor(drawn.clone())
    local.copy_(drawn)
    return row


_OWN: dict[Any, Callable[..., Any]] = {
    **REDUCTIONS,
    aten.copy_.default: _copy,
    aten.index_put_.default: _index_put,
}
