"""Operators of ``RowDTensor``.

==================================  ==============================================================
element by element, also of lists   on this rank's rows; other operands have the same rows, are
                                    whole tensors of the same shape, or have one element
sums, norms, largest values         of the whole tensor: this rank's, then an all-reduce
random values                       drawn for the whole tensor, so that ranks with equal seeds get
                                    what one process gets
anything else                       raises: torch would need to know where rows begin
==================================  ==============================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.core.rows import Rows
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError

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
        return _refused
    if name in _FUSED or name.startswith("aten::_foreach_"):
        return _elementwise_lists
    if name in _ELEMENTWISE:
        return _elementwise
    return _elementwise if torch.Tag.pointwise in func.tags else _refused


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


def _refused(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows = _rows_in([*args, *kwargs.values()], cls)
    raise UnsupportedError(
        expected="operators that work element by element, sums, norms, to_local() or full_tensor()",
        got=f"{func} on rows of a sharded parameter",
        where=f"'{rows.fqn}'",
        fix="Compute with full_tensor(), which all ranks must call, or inside "
        "summon_full_params(). In a forward, parameters are whole inside of their own unit only: "
        "shard the module that uses it as one unit.",
    )


def _rows_in(values: Sequence[Any], cls: type[DTensor]) -> Rows:
    """Those of the first ``RowDTensor`` among values and lists of them."""
    for value in values:
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, cls):
                return one._placing.rows  # type: ignore[attr-defined,no-any-return]
    raise AssertionError("torch has called an operator of another class")


# -- element by element --------------------------------------------------------------------------


def rows_of(row: Any, value: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a tensor that has the shape of ``row``; those of ``value`` if it has one.

    Raises:
        FSDPValueError: another shape, or other rows.
    """
    rows = row._placing.rows
    if isinstance(value, type(row)):
        if rows.holds_as(value._placing.rows):  # type: ignore[attr-defined]
            own: torch.Tensor = value._local_tensor
            return own
        raise _mismatch(rows, f"other rows, of '{value._placing.rows.fqn}'")  # type: ignore[attr-defined]
    if value.shape != rows.shape:
        raise _mismatch(rows, f"a tensor of shape {tuple(value.shape)}")
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()  # type: ignore[attr-defined]
    part: torch.Tensor = rows.take(value)
    return part


def _mismatch(rows: Rows, got: str) -> FSDPValueError:
    return FSDPValueError(
        expected=f"the same rows, or a whole tensor of shape {tuple(rows.shape)}",
        got=got,
        where=f"an operator on '{rows.fqn}'",
        fix="Compute with full_tensor() where shapes differ.",
    )


def _operand(value: Any, row: Any) -> Any:
    """What an operator on rows takes in place of an operand."""
    if not isinstance(value, torch.Tensor) or row is None:
        return value
    if value.numel() == 1 and not isinstance(value, type(row)):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        return value.reshape(()) if value.dim() else value
    is_torchs = isinstance(value, DTensor) and not isinstance(value, type(row))
    placements: Any = value.placements if is_torchs else ()  # type: ignore[attr-defined]
    if not all(placement.is_replicate() for placement in placements):
        # With rows of its own: DTensor.from_local() has made it, perhaps, of ours.
        raise _mismatch(row._placing.rows, f"a DTensor of torch's with {placements}")
    return rows_of(row, value)


def _copy(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``row.copy_(value)``, of torch's DTensors too."""
    row, value, *others = args
    if not isinstance(row, cls):
        return _refused(cls, func, args, kwargs)  # a plain tensor would take rows
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
            return _refused(cls, func, args, kwargs)  # a plain tensor would take rows
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
        return _refused(type(row), func, (row,), {})
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
        return _refused(cls, func, args, kwargs)  # a plain tensor would take rows
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
        return _refused(cls, func, args, kwargs)
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
    return _refused(cls, func, args, kwargs)


def _random(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    row, *others = args
    rows, local = row._placing.rows, row._local_tensor
    whole = torch.empty(rows.shape, dtype=local.dtype, device=local.device)
    drawn = rows.take(func(whole, *others, **kwargs))
    if not func._schema.is_mutable:
        return row._placing.dtensor(drawn.clone())
    local.copy_(drawn)
    return row


# -- over all elements ---------------------------------------------------------------------------


def total_norm(rows: Sequence[Any], others: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The p-norm over whole tensors of which ranks hold rows, and over plain ones.

    One all-reduce for all tensors on the same ranks.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): list(others)}
    for row in rows:
        by_groups.setdefault(row._placing.rows.groups, []).append(row._local_tensor)
    powers = [_power(tensors, groups, order) for groups, tensors in by_groups.items() if tensors]
    total = torch.stack([power.to(powers[0].device) for power in powers])
    norm = total.max() if math.isinf(order) else total.sum() ** (1 / order)
    widest, fewest = (key(by_groups.keys() - {()}, key=_num_ranks) for key in (max, min))
    if _num_ranks(fewest) < _num_ranks(widest):
        first = next(row for row in rows if row._placing.rows.groups == fewest)
        where = f"a norm of several tensors, '{first._placing.rows.fqn}' among them"
        require_one_norm(norm, widest, _num_ranks(fewest), where)
    return norm


def _num_ranks(groups: Sequence[dist.ProcessGroup]) -> int:
    return math.prod(group.size() for group in groups)


def require_one_norm(
    norm: torch.Tensor, groups: Sequence[dist.ProcessGroup], fewest: int, where: str
) -> None:
    """Raise on all ranks of some groups if their norms differ by more than rounding.

    Args:
        norm: of what this rank knows.
        groups: the ranks.
        fewest: on how many ranks a part of the gradients is.
        where: for the message.

    Raises:
        UnsupportedError: they differ.
    """
    bounds = _reduced(torch.stack([norm, -norm]), groups, dist.ReduceOp.MAX)
    most, least = bounds[0], -bounds[1]
    if most - least > 1e-4 * most:
        raise UnsupportedError(
            expected="one norm on all ranks of the root",
            got=f"{float(least)} to {float(most)}: what other ranks hold of a unit on {fewest} "
            "ranks differs",
            where=where,
            fix="Give the unit a replicate group (HYBRID_SHARD) where ranks hold copies. Where "
            "they hold different experts, let those be DTensors over these ranks before "
            "fully_shard, or clip by a norm of your own.",
        )


def _power(
    tensors: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], order: float
) -> torch.Tensor:
    """Sum of |x|^p over all elements on all ranks of the groups; for inf the largest |x|."""
    norms = [
        torch.linalg.vector_norm(tensor, order, dtype=_precise(tensor.dtype))
        for tensor in tensors
        if tensor.numel()
    ]
    zero = torch.zeros((), dtype=_precise(tensors[0].dtype), device=tensors[0].device)
    own = torch.stack([*norms, zero])
    if math.isinf(order):
        return _reduced(own.max(), groups, dist.ReduceOp.MAX)
    return _reduced((own**order).sum(), groups, dist.ReduceOp.SUM)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _reduced(
    value: torch.Tensor, groups: Sequence[dist.ProcessGroup], operation: Any
) -> torch.Tensor:
    """A value of all ranks of some groups; of largest and smallest ones, NaN if a rank has it."""
    if value.is_floating_point() and operation == dist.ReduceOp.MIN:
        return -_reduced(-value, groups, dist.ReduceOp.MAX)
    if value.is_floating_point() and operation == dist.ReduceOp.MAX:
        known = value.nan_to_num(-math.inf, math.inf, -math.inf)
        both = _all_reduced(torch.stack([known, value.isnan().to(value.dtype)]), groups, operation)
        return both[0].masked_fill(both[1] > 0, math.nan)
    return _all_reduced(value, groups, operation)


def _all_reduced(
    value: torch.Tensor, groups: Sequence[dist.ProcessGroup], operation: Any
) -> torch.Tensor:
    for group in groups:
        sent = value.to(served_device(group, value.device))
        dist.all_reduce(sent, operation, group=group)
        value = sent.to(value.device)
    return value


def _value(row: Any, value: torch.Tensor) -> torch.Tensor:
    """One value of a whole tensor: a replicated DTensor, as torch has it.

    A plain tensor where it has a gradient: added to a loss, a DTensor would give the model's
    backward, which is of plain tensors, gradients that are DTensors.
    """
    if row.requires_grad and torch.is_grad_enabled():
        return value
    return row._placing.replicated(value)  # type: ignore[no-any-return]


def _norm(
    cls: type[DTensor],
    func: Any,
    row: Any,
    order: float | None = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    order = 2.0 if order is None else float(order)
    if keepdim or not _is_every_dim(row, dim) or order <= 0:
        return _refused(cls, func, (row,), {})
    return _value(row, total_norm([row], [], order).to(dtype or row.dtype))


def _foreach_norm(
    cls: type[DTensor],
    func: Any,
    tensors: Sequence[Any],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[Any]:
    return [_norm(cls, func, row, order, dtype=dtype) for row in tensors]


def _is_every_dim(row: Any, dim: Any) -> bool:
    """Whether a reduction is over all dimensions."""
    if dim is None or dim == []:
        return True
    given = dim if isinstance(dim, (list, tuple)) else [dim]
    return len({one % max(1, row.dim()) for one in given}) == len(row.shape)


def _whole_value(operation: Any, identity: Callable[[torch.dtype], float]) -> Callable[..., Any]:
    """An operator that makes one value of a tensor, as ``sum()``."""

    def run_it(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row, *others = args
        rows, local = row._placing.rows, row._local_tensor
        if others:
            return _refused(cls, func, args, kwargs)
        if local.numel() == 0:
            local = local.new_full((1,), identity(local.dtype))
        own = func(local, **kwargs)
        kind = own.dtype
        value = _reduced(own.int() if kind is torch.bool else own, rows.groups, operation)
        return _value(row, value.to(kind))

    return run_it


def _mean(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (row,) = args
    own = row._local_tensor.sum(**kwargs)
    total = _reduced(own, row._placing.rows.groups, dist.ReduceOp.SUM)
    return _value(row, total / max(1, row.numel()))


def _equal(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """``equal()`` and ``allclose()``: one answer on all ranks."""
    row: Any = next(value for value in args if isinstance(value, cls))
    own, other = (rows_of(row, value) for value in args[:2])
    same = torch.tensor(int(func(own, other, *args[2:], **kwargs)), device=own.device)
    return bool(_reduced(same, row._placing.rows.groups, dist.ReduceOp.MIN))


def _unscale(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What ``torch.amp.GradScaler`` does to gradients; whether one overflows is for all ranks."""
    grads, found, inverse = args
    rows: list[Any] = [grad for grad in grads if isinstance(grad, cls)]
    local = [grad._local_tensor for grad in rows]
    local += [grad for grad in grads if not isinstance(grad, cls)]
    func([grad for grad in local if grad.numel()], found, inverse)
    groups = dict.fromkeys(group for grad in rows for group in grad._placing.rows.groups)
    found.copy_(_reduced(found, tuple(groups), dist.ReduceOp.MAX))


def _plain_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    def run_it(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(cls, func, *args, **kwargs)

    return run_it


def _zero(dtype: torch.dtype) -> float:
    return 0


def _one(dtype: torch.dtype) -> float:
    return 1


def _least(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> float:
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


_SUM, _MAX, _MIN = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN
_OWN: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: _copy,
    aten.index_put_.default: _index_put,
    aten.linalg_vector_norm.default: _plain_arguments(_norm),
    aten.norm.Scalar: _plain_arguments(_norm),
    aten.norm.ScalarOpt_dim: _plain_arguments(_norm),
    aten._foreach_norm.Scalar: _plain_arguments(_foreach_norm),
    aten.sum.default: _whole_value(_SUM, _zero),
    aten.count_nonzero.default: _whole_value(_SUM, _zero),
    aten.max.default: _whole_value(_MAX, _least),
    aten.min.default: _whole_value(_MIN, _most),
    aten.any.default: _whole_value(_MAX, _zero),
    aten.all.default: _whole_value(_MIN, _one),
    aten.mean.default: _mean,
    aten.allclose.default: _equal,
    aten.equal.default: _equal,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
