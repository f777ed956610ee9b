"""Global gradient norm over sharded and unsharded parameters, and clipping by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as traced_all_reduce
from torch.distributed._functional_collectives import wait_tensor

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.errors import UnsupportedError, unit_name


@torch.no_grad()
def clip_grad_norm(
    flats: Iterable[FlatParameter],
    others: Iterable[torch.Tensor],
    groups: Sequence[dist.ProcessGroup],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``; return the norm.

    ``flats`` are all flat parameters, ``others`` parameters that no unit manages, whole on every
    rank and counted once. The ranks of ``groups``, the root's, must agree on the norm. The result
    is the norm before clipping: a scalar in the real dtype that gradients of all units are promoted
    to, computed in float32 at least.

    Raises:
        UnsupportedError: ranks of the root have different norms, as they train different
            parameters in a unit on fewer ranks.
    """
    flats = [*flats]
    loose = [p.grad for p in others if p.grad is not None and p.grad.numel()]
    spread = _by_groups(flats, loose)
    dtypes = [grad.dtype for grad in loose]
    for flat in flats:
        if flat.is_trainable or any(o.param.grad is not None for o in flat.originals):
            dtypes.append(flat.grad_dtype)  # also where this rank holds no elements
    wanted = norm_dtype_of(dtypes or [torch.float32])
    dtype = torch.promote_types(wanted, torch.float32)
    device = flats[-1].device if flats else torch.device("cpu")
    norm_type = float(norm_type)
    totals = torch.stack(
        [power_sum(same, over, norm_type, dtype, device) for over, same in spread.items()]
    )
    norm = totals.max() if math.isinf(norm_type) else totals.sum() ** (1.0 / norm_type)
    for flat in flats:
        if _num_ranks(flat.groups.all) < _num_ranks(groups):
            where = f"clip_grad_norm_(), {unit_name(flat.unit_fqn)}"
            require_one_norm(norm, groups, _num_ranks(flat.groups.all), where)
            break
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grads in by_kind(grad for same in spread.values() for grad in same):
        torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
    has_grads = any(spread.values())
    if not has_grads and not norm:  # the host reads the norm only if this rank has no gradient
        warnings.warn(
            f"clip_grad_norm_() found no gradient that is not zero: its norm is 0, in {wanted}",
            stacklevel=4,
        )
    return norm.to(wanted)


def _by_groups(
    flats: Sequence[FlatParameter], loose: list[torch.Tensor]
) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    """Sort gradients by the groups over which their elements are spread; ``loose``: over none.

    The order of the keys is equal on all ranks, which issue one all-reduce for each.
    """
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {(): [*loose]}
    for flat in flats:
        shard = (flat.group,) if flat.is_sharded else ()
        for original in flat.originals:
            splits = () if original.parallel is None else original.parallel.splitting_groups
            same = spread.setdefault((() if original.is_replicated else shard) + splits, [])
            if (grad := original.grad) is not None and grad.numel():
                same.append(grad)
    return spread


def _num_ranks(groups: Iterable[dist.ProcessGroup]) -> int:
    return math.prod([group.size() for group in groups])


# -- norms -----------------------------------------------------------------------------------------


_USE = "a norm of all ranks, as in clip_grad_norm_()"


def norm_dtype_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the real dtype to which tensors of the given dtypes are promoted."""
    return reduce(torch.promote_types, {one.to_real() if one.is_complex else one for one in dtypes})


def require_one_norm(
    norm: torch.Tensor, groups: Sequence[dist.ProcessGroup], fewest: int, where: str
) -> None:
    """Raise on all ranks of the groups if their norms differ by more than rounding.

    ``fewest`` is the number of ranks of the smallest unit, for the message.
    """
    bounds = _reduced(torch.stack([norm, -norm]), groups, dist.ReduceOp.MAX)
    most, least = bounds[0], -bounds[1]
    if most - least > 1e-4 * most:
        raise UnsupportedError(
            f"{where}: expected one norm on all ranks of the root, got {float(least)} to "
            f"{float(most)}: what other ranks hold of a unit on {fewest} ranks differs. Give the "
            "unit a replicate group (HYBRID_SHARD) where ranks hold copies. Where they hold "
            "different experts, let those be DTensors over these ranks before fully_shard, or clip "
            "by a norm of your own."
        )


def power_sum(
    tensors: Sequence[torch.Tensor],
    groups: Sequence[dist.ProcessGroup],
    order: float,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Sum ``|x|**order`` over all elements on all ranks of the groups; for inf the largest ``|x|``.

    NaN if a rank has one. ``tensors`` are this rank's, nonempty each; the result has ``dtype`` and
    is on ``device``.
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


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device and dtype: ``torch._foreach_*`` is fast on such lists."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


_BLOCK = 1 << 16
"""Elements per norm on a CPU. The kernel accumulates in one float per vector lane, which loses 1 %
of the norm of 128 M elements."""


def _in_blocks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors, on CPUs in blocks of ``_BLOCK`` elements."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel() > _BLOCK:
            yield from tensor.reshape(-1).split(_BLOCK)
        else:
            yield tensor


def _reduced(
    value: torch.Tensor, groups: Sequence[dist.ProcessGroup], operation: Any
) -> torch.Tensor:
    """Reduce a value over the groups; a maximum is NaN if a rank has NaN."""
    if operation == dist.ReduceOp.MAX:
        known = value.nan_to_num(-math.inf, math.inf, -math.inf)
        both = _all_reduced(torch.stack([known, value.isnan().to(value.dtype)]), groups, operation)
        return both[0].masked_fill(both[1] > 0, math.nan)
    return _all_reduced(value, groups, operation)


def _all_reduced(
    value: torch.Tensor, groups: Sequence[dist.ProcessGroup], operation: Any
) -> torch.Tensor:
    for group in groups:
        if torch.compiler.is_compiling():  # graphs need the functional collective
            value = wait_tensor(traced_all_reduce(value, operation.name.lower(), group))
            continue
        sent = value.to(served_device(group, value.device))
        with watched(group, "all_reduce", _USE, sent.numel()):
            dist.all_reduce(sent, operation, group=group)
        value = sent.to(value.device)
    return value
