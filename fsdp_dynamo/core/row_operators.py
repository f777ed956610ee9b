"""Operators of ``RowDTensor``.

==================================  ==============================================================
element by element, also of lists   on this rank's rows; other operands have the same rows, are
                                    whole tensors of the same shape, or have one element
sums, norms, largest values         of the whole tensor: this rank's, then an all-reduce
random values                       drawn for the whole tensor, so that ranks with equal seeds get
                                    what one process gets
anything else                       raises: torch would need to know where rows begin; on one rank,
                                    runs as torch's own
==================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fsdp_dynamo.core.row_operands import is_made_of_rows, mismatch, refused, rows_of
from fsdp_dynamo.core.row_reductions import REDUCTIONS

aten = torch.ops.aten


def run(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator with a ``RowDTensor`` among its arguments.

    Raises:
        UnsupportedError: an operator that is not in the table above.
        FSDPValueError: an operand of another shape, or of other rows.
    """
    return _implementation(func)(cls, func, args, kwargs)


@cache
def _implementation(func: Any) -> Callable[..., Any]:
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
        return refused
    if name in _FUSED or name.startswith("aten::_foreach_"):
        return _elementwise_lists
    if name in _ELEMENTWISE:
        return _elementwise
    return _elementwise if torch.Tag.pointwise in func.tags else refused


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
    if not isinstance(value, torch.Tensor) or row is None:
        return value
    if value.numel() == 1 and not isinstance(value, type(row)):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.reshape(()) if value.dim() else value
    if not isinstance(value, DTensor) or isinstance(value, type(row)):
        return rows_of(row, value)
    if all(placement.is_replicate() for placement in value.placements):
        return rows_of(row, value)
    if is_made_of_rows(row._placing, value):
        return value._local_tensor
    raise mismatch(row._placing.rows, f"a DTensor of torch's with {value.placements}")


def _copy(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``row.copy_(value)``, of torch's DTensors too."""
    row, value, *others = args
    if not isinstance(row, cls):
        if not isinstance(row, DTensor) or not is_made_of_rows(value._placing, row):
            return refused(cls, func, args, kwargs)  # a plain tensor would take rows
        func(row._local_tensor, value._local_tensor, *others)
        return row
    is_whole = isinstance(value, DTensor) and value.numel() > 1
    func(row._local_tensor, rows_of(row, value) if is_whole else _operand(value, row), *others)  # type: ignore[attr-defined]
    return row


def _elementwise(
    cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    row: Any = next(one for one in (*args, *kwargs.values()) if isinstance(one, cls))
    schema = func._schema
    if schema.is_mutable:
        target = kwargs.get("out", args[0])
        if not isinstance(target, cls):
            return refused(cls, func, args, kwargs)  # a plain tensor would take rows
    local = [_operand(one, row) for one in args]
    out = func(*local, **{name: _operand(one, row) for name, one in kwargs.items()})
    if schema.is_mutable:
        return target
    if isinstance(out, torch.Tensor):
        return _as_rows(out, row, func)
    return [_as_rows(one, row, func) for one in out] if isinstance(out, (list, tuple)) else out


def _as_rows(out: torch.Tensor, row: Any, func: Any) -> Any:
    """A result as rows; of another shape, it is of an operator that is wrong in the lists above."""
    if out.shape != row._local_tensor.shape:
        return refused(type(row), func, (row,), {})
    return row._placing.dtensor(out)


def _elementwise_lists(
    cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An operator of lists, element by element of the tensors in the same place of each list."""
    first = args[0]
    if all(type(one) is cls for one in first):
        rows: list[Any] = list(first)
    else:  # plain tensors among them, or in the place of all
        lists = [one for one in args if isinstance(one, (list, tuple)) and len(one) == len(first)]
        rows = [
            next((t for t in at if isinstance(t, cls)), None) for at in zip(*lists, strict=True)
        ]
    if func._schema.is_mutable and any(
        row is not None and not isinstance(one, cls) for row, one in zip(rows, first, strict=True)
    ):
        return refused(cls, func, args, kwargs)  # a plain tensor would take rows
    common = next((row for row in rows if row is not None), None)

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            return _operand(value, common)
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
    return [
        one if row is None else _as_rows(one, row, func) for row, one in zip(rows, out, strict=True)
    ]


def _index_put(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``row[mask] = value`` with a mask of the same rows."""
    row, masks, value, *others = args
    is_mask = len(masks) == 1 and isinstance(masks[0], cls) and masks[0].dtype is torch.bool
    if not is_mask or value.numel() != 1:
        return refused(cls, func, args, kwargs)
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
    return refused(cls, func, args, kwargs)


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
