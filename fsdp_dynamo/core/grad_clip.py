"""Global gradient norm over sharded and unsharded parameters, and clipping by it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.norms import by_kind, norm_dtype_of, power_sum, require_one_norm
from fsdp_dynamo.errors import unit_name


@torch.no_grad()
def clip_grad_norm(
    flats: Iterable[FlatParameter],
    others: Iterable[torch.Tensor],
    groups: Sequence[dist.ProcessGroup],
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    Args:
        flats: all flat parameters. Parts of sharded ones are summed over the ranks that shard
            them; the others are whole on every rank and counted once.
        others: parameters that no unit manages; whole on every rank.
        groups: the root's, whose ranks must agree on the norm.
        max_norm: wanted bound.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before clipping: a scalar in the real dtype that gradients of all units are
        promoted to (computed in float32 at least), equal on all ranks.

    Raises:
        UnsupportedError: ranks of the root have different norms, as they train different
            parameters in a unit on fewer ranks.
    """
    # By the groups over which their elements are spread; on every rank in the same order.
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {
        (): [p.grad for p in others if p.grad is not None and p.grad.numel()]
    }
    num_ranks = math.prod(group.size() for group in groups)
    dtypes = [grad.dtype for grad in spread[()]]
    partial: FlatParameter | None = None
    device = torch.device("cpu")
    for flat in flats:
        device = flat.device
        if math.prod(group.size() for group in flat.groups.all) < num_ranks:
            partial = partial or flat
        shard = (flat.group,) if flat.is_sharded else ()
        for original in flat.originals:
            splits = () if original.parallel is None else original.parallel.splitting_groups
            same = spread.setdefault((() if original.is_replicated else shard) + splits, [])
            if (grad := original.grad) is not None and grad.numel():
                same.append(grad)
        if flat.is_trainable or any(o.param.grad is not None for o in flat.originals):
            dtypes.append(flat.grad_dtype)  # known on ranks that hold no part of it, too
    has_grads = any(spread.values())
    wanted = norm_dtype_of(dtypes or [torch.float32])
    dtype = torch.promote_types(wanted, torch.float32)
    norm_type = float(norm_type)
    totals = torch.stack(
        [power_sum(same, over, norm_type, dtype, device) for over, same in spread.items()]
    )
    norm = totals.max() if math.isinf(norm_type) else totals.sum() ** (1.0 / norm_type)
    if partial is not None:
        on_ranks = math.prod(group.size() for group in partial.groups.all)
        where = f"clip_grad_norm_(), {unit_name(partial.unit_fqn)}"
        require_one_norm(norm, groups, on_ranks, where)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grads in by_kind(grad for same in spread.values() for grad in same):
        torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].dtype))
    if not has_grads and not norm:  # read on the host only where this rank has no gradient
        warnings.warn(
            f"clip_grad_norm_() found no gradient that is not zero: its norm is 0, in {wanted}",
            stacklevel=4,
        )
    return norm.to(wanted)
