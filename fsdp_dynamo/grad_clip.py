"""Global gradient norm over sharded and unsharded parameters, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
    sharded: list[torch.Tensor] = []
    whole: list[torch.Tensor] = [p.grad for p in others if p.grad is not None]
    device = torch.device("cpu")
    for flat in flats:
        device = flat.device
        grads = [o.param.grad for o in flat.originals if o.param.grad is not None]
        (sharded if flat.is_sharded else whole).extend(grads)
    grads = sharded + whole
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norm_type = float(norm_type)
    total = _power_sum(sharded, norm_type, dtype, device)
    infinite = math.isinf(norm_type)
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
    local = _power_sum(whole, norm_type, dtype, device)
    norm = torch.maximum(total, local) if infinite else (total + local) ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return norm


def _power_sum(
    grads: list[torch.Tensor], norm_type: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Sum of |g|^p over all elements (largest |g| for inf)."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    norms = torch.stack([torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in grads])
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()
