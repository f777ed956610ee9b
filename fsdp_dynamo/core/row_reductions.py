"""Operators of ``RowDTensor`` over all elements: this rank's, then an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as traced_all_reduce
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.tensor import DTensor

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.memory_runs import by_kind, runs_of
from fsdp_dynamo.core.row_gathers import on_whole
from fsdp_dynamo.core.row_operands import rows_of
from fsdp_dynamo.errors import UnsupportedError

aten = torch.ops.aten
_USE = "a norm or another value of all ranks, as in clip_grad_norm_()"


def total_norm(rows: Sequence[Any], others: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """The p-norm over whole tensors of which ranks hold rows, and over plain ones.

    One all-reduce for all tensors on the same ranks.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): list(others)}
    for row in rows:
        by_groups.setdefault(row._placing.rows.groups, []).append(row._local_tensor)
    found = [tensor for tensors in by_groups.values() for tensor in tensors]
    dtype = norm_dtype_of([torch.float32, *(tensor.dtype for tensor in found)])
    powers = [
        power_sum(runs_of(tensors), groups, order, dtype, found[0].device)
        for groups, tensors in by_groups.items()
        if tensors
    ]
    total = torch.stack(powers)
    norm = total.max() if math.isinf(order) else total.sum() ** (1 / order)
    widest, fewest = (key(by_groups.keys() - {()}, key=_num_ranks) for key in (max, min))
    if _num_ranks(fewest) < _num_ranks(widest):
        first = next(row for row in rows if row._placing.rows.groups == fewest)
        where = f"a norm of several tensors, '{first._placing.rows.fqn}' among them"
        require_one_norm(norm, widest, _num_ranks(fewest), where)
    return norm


def norm_dtype_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Real dtype that the dtypes of tensors with a common norm are promoted to."""
    return reduce(torch.promote_types, {one.to_real() if one.is_complex else one for one in dtypes})


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


def power_sum(
    tensors: Sequence[torch.Tensor],
    groups: Sequence[dist.ProcessGroup],
    order: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Sum of |x|^p over all elements on all ranks of some groups; for inf the largest |x|.

    NaN if a rank has one.

    Args:
        tensors: this rank's, none of them empty; none, perhaps.
        groups: the ranks.
        order: p.
        dtype: of the sum.
        device: of the sum.
    """
    real = [tensor.abs() if tensor.is_complex() else tensor for tensor in tensors]
    norms = [
        torch.stack(torch._foreach_norm(same, order, dtype=dtype)).to(device)
        for same in by_kind(_in_blocks(real))
    ]
    own = torch.cat([*norms, torch.zeros(1, dtype=dtype, device=device)])
    if math.isinf(order):
        return _reduced(own.max(), groups, dist.ReduceOp.MAX)
    return _reduced((own**order).sum(), groups, dist.ReduceOp.SUM)


_BLOCK = 1 << 16
"""Elements of which a kernel of a CPU takes the norm; it adds them up in as many floats as a
vector has, which lose 1 % of the norm of 128 M elements."""


def _in_blocks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same elements in blocks, where kernels need them."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() > _BLOCK:
            yield from tensor.reshape(-1).split(_BLOCK)
        else:
            yield tensor


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
        if torch.compiler.is_compiling():  # a trace takes in no change in place by another rank
            value = wait_tensor(traced_all_reduce(value, operation.name.lower(), group))
            continue
        sent = value.to(served_device(group, value.device))
        with watched(group, "all_reduce", _USE, sent.numel()):
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


def _norm(cls: type[DTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    norm = _norm_of_all(*args, **kwargs)
    return on_whole(cls, func, args, kwargs) if norm is None else norm


def _norm_of_all(
    row: Any,
    order: float | None = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The norm over all elements, ``None`` where another one is asked for."""
    order = 2.0 if order is None else float(order)
    if keepdim or not _is_every_dim(row, dim) or order <= 0:
        return None
    return _value(row, total_norm([row], [], order).to(dtype or norm_dtype_of([row.dtype])))


def _foreach_norm(
    cls: type[DTensor],
    func: Any,
    tensors: Sequence[Any],
    order: float = 2,
    dtype: torch.dtype | None = None,
) -> list[Any]:
    return [_norm(cls, func, (row, order), {"dtype": dtype}) for row in tensors]


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
            return on_whole(cls, func, args, kwargs)
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
REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.linalg_vector_norm.default: _norm,
    aten.norm.Scalar: _norm,
    aten.norm.ScalarOpt_dim: _norm,
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
"""By operator."""
