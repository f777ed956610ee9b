"""Whole tensors of torch's own sharded values: ShardedTensor and DTensor.

State dicts that FSDP1 and FSDP2 wrote hold these, and so does what
``torch.distributed.checkpoint.optimizer`` reads. They may be split otherwise than ours,
so one value at a time is gathered while it is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp_dynamo.agreement.store import exchange_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.whole_dtensor import whole_of


def whole_tensor(value: Any) -> Any:
    """The whole tensor of a ShardedTensor or DTensor; anything else as it is.

    All ranks that share the value must call this together.
    """
    if isinstance(value, DTensor):
        return whole_of(value)
    return _gathered(value) if isinstance(value, ShardedTensor) else value


def _gathered(value: ShardedTensor) -> torch.Tensor:
    """All shards in one tensor, on the device where their group communicates."""
    group = value._process_group
    by_rank: dict[int, list[ShardMetadata]] = {}
    for shard in value.metadata().shards_metadata:
        placement: Any = shard.placement
        by_rank.setdefault(placement.rank(), []).append(shard)
    longest = max(sum(math.prod(s.shard_sizes) for s in held) for held in by_rank.values())
    device = exchange_device(group, value.device)
    sent = torch.zeros(max(1, longest), dtype=value.dtype, device=device)
    own = {tuple(one.metadata.shard_offsets): one.tensor for one in value.local_shards()}
    for place, shard in _places(sent, by_rank.get(dist.get_rank(), [])):
        place.copy_(own[tuple(shard.shard_offsets)])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    with watched(group, "all_gather", "a ShardedTensor", value.size().numel()):
        dist.all_gather([one.view(torch.uint8) for one in received], sent.view(torch.uint8), group)
    whole = torch.empty(value.size(), dtype=value.dtype, device=device)
    for rank, buffer in zip(dist.get_process_group_ranks(group), received, strict=True):
        for place, shard in _places(buffer, by_rank.get(rank, [])):
            pairs = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in pairs)] = place
    return whole


def _places(
    buffer: torch.Tensor, shards: Sequence[ShardMetadata]
) -> Iterator[tuple[torch.Tensor, ShardMetadata]]:
    """Views of a 1-D buffer that holds some shards, one behind the other."""
    begin = 0
    for shard in shards:
        end = begin + math.prod(shard.shard_sizes)
        yield buffer[begin:end].view(shard.shard_sizes), shard
        begin = end
