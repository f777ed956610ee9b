"""Norms over elements that are spread over ranks: this rank's, then an all-reduce."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce as traced_all_reduce
from torch.distributed._functional_collectives import wait_tensor

from fsdp_dynamo.comm.process_groups import served_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.errors import UnsupportedError

_USE = "a norm of all ranks, as in clip_grad_norm_()"


def norm_dtype_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Real dtype that the dtypes of tensors with a common norm are promoted to."""
    return reduce(torch.promote_types, {one.to_real() if one.is_complex else one for one in dtypes})


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


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Lists of equal device and dtype, each of which one ``torch._foreach_*`` takes at once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(kinds.values())


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
    """A value of all ranks of some groups; of the largest one, NaN if a rank has it."""
    if operation == dist.ReduceOp.MAX:
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
