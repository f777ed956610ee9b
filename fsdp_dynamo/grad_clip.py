"""Global gradient norm over sharded and unsharded parameters, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fsdp_dynamo.flat_parameter import FlatParameter


@torch.no_grad()
def clip_grad_norm(
    flats: Iterable[FlatParameter],
    others: Iterable[torch.Tensor],
    group: dist.ProcessGroup,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    Args:
        flats: all flat parameters. Parts of sharded ones are summed over ranks; the others are
            whole on every rank and counted once.
        others: parameters that no unit manages; whole on every rank.
        group: the ranks to sum over.
        max_norm: wanted bound.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before clipping: a float32 scalar (float64 if a gradient is), equal on all ranks.
    """
    parts = [_Part(())]
    parts[0].whole = [p.grad for p in others if p.grad is not None]
    device = torch.device("cpu")
    for flat in flats:
        device = flat.device
        for original in flat.originals:
            splits = () if original.parallel is None else original.parallel.splitting_groups
            part = next((part for part in parts if part.splits == splits), None)
            if part is None:
                parts.append(part := _Part(splits))
            if original.param.grad is not None:
                (part.sharded if flat.is_sharded else part.whole).append(original.param.grad)
    grads = [grad for part in parts for grad in part.sharded + part.whole]
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norm_type = float(norm_type)
    totals = torch.stack([part.total(group, norm_type, dtype, device) for part in parts])
    norm = totals.max() if math.isinf(norm_type) else totals.sum() ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return norm


@dataclass
class _Part:
    """Gradients whose elements tensor parallelism has spread over the same groups, if over any.

    Attributes:
        splits: these groups; the same on every rank, in the same order of parts.
        sharded: gradients of which this rank has its shard.
        whole: gradients that are the same on every rank that shards.
    """

    splits: tuple[dist.ProcessGroup, ...]
    sharded: list[torch.Tensor] = field(default_factory=list)
    whole: list[torch.Tensor] = field(default_factory=list)

    def total(
        self,
        group: dist.ProcessGroup,
        norm_type: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Sum of |g|^p over all elements on all ranks (largest |g| for inf)."""
        infinite = math.isinf(norm_type)
        operation = dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM
        total = _power_sum(self.sharded, norm_type, dtype, device)
        dist.all_reduce(total, operation, group=group)
        local = _power_sum(self.whole, norm_type, dtype, device)
        total = torch.maximum(total, local) if infinite else total + local
        for split in self.splits:
            dist.all_reduce(total, operation, group=split)
        return total


def _power_sum(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of |g|^p over all elements (largest |g| for inf)."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack(
        [torch.linalg.vector_norm(g, norm_type, dtype=dtype).to(device) for g in grads]
    )
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
