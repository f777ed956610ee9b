"""A shard of parts, and a whole tensor of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.core.flat_parameter import FlatParameter


def shard_of(flat: FlatParameter, locals_: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """A shard ``(shard_numel,)`` of tensors of one dtype, as large as this rank's parts, on the
    device where collectives work; zero where there is none."""
    dtypes = {local.dtype for local in locals_ if local is not None} or {flat.dtype}
    assert len(dtypes) == 1, f"tensors of one dtype, got {dtypes}"
    shard = torch.zeros(flat.layout.shard_numel, dtype=dtypes.pop(), device=flat.device)
    for place, local in zip(flat.shard_layout.split(shard), locals_, strict=True):
        if local is not None:
            place.copy_(local)
    return shard


def unsharded_of(flat: FlatParameter, shard: torch.Tensor) -> torch.Tensor:
    """The tensor ``(padded_numel,)`` of every rank's shard; where nothing is sharded, the shard."""
    if not flat.is_sharded:
        return shard
    unsharded = shard.new_empty(flat.layout.padded_numel)
    hierarchy, group, plan = flat.groups.hierarchy, flat.group, flat.layout.plan
    if hierarchy is not None:
        secondary = shard.new_empty(shard.numel() * hierarchy.across.size())
        all_gather(secondary, shard, hierarchy.across, flat.unit_fqn, plan)
        shard, group = secondary, hierarchy.node
        plan = plan.scaled(hierarchy.across.size())
    all_gather(unsharded, shard, group, flat.unit_fqn, plan)
    return unsharded
