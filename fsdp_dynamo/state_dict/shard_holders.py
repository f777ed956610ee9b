"""Who holds which part of a tensor, in the words of torch's ShardedTensor.

Scripts for FSDP1 ask values of a sharded state dict for ``local_shards()`` and ``metadata()``. The
answers here have the attributes that ShardedTensor's have.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorProperties

from fsdp_dynamo.agreement.store import exchange_device
from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.core.flat_parameter import FlatParameter


@dataclass(frozen=True)
class ShardPlacement:
    """The rank that holds a shard, and its device there."""

    holder: int
    where: torch.device

    def rank(self) -> int:
        """In the default group."""
        return self.holder

    def device(self) -> torch.device:
        """On that rank."""
        return self.where


@dataclass(frozen=True)
class ShardInfo:
    """A rectangular shard of a tensor.

    Attributes:
        shard_offsets: where it begins, per dimension.
        shard_sizes: its lengths, per dimension.
        placement: who holds it.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: ShardPlacement


@dataclass(frozen=True)
class LocalShard:
    """A shard of this rank.

    Attributes:
        tensor: its elements, in its shape; memory is shared.
        metadata: where it is.
    """

    tensor: torch.Tensor
    metadata: ShardInfo


@dataclass(frozen=True)
class ShardedInfo:
    """A tensor and all of its shards.

    Attributes:
        shards_metadata: the shards of all ranks.
        size: of the tensor.
        tensor_properties: dtype and layout.
    """

    shards_metadata: list[ShardInfo]
    size: torch.Size
    tensor_properties: TensorProperties


class Holders:
    """The ranks that hold an original parameter, or a tensor as large as it, in parts.

    Args:
        flat: the flat parameter, of which only the layout is kept.
        index: of the parameter in it.
    """

    def __init__(self, flat: FlatParameter, index: int) -> None:
        self._layout, self._index = flat.layout, index
        self._group, self._label = flat.group, flat.unit_fqn

    def __reduce__(self) -> Any:
        """In a file there are no ranks."""
        return NoneType, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Holders:
        return self

    def ranges(self) -> list[tuple[int, int, int]]:
        """Rank in the default group, first element and end of each part, in order."""
        layout, ranks = self._layout, dist.get_process_group_ranks(self._group)
        parts = [layout.shard_range(self._index, i) for i in range(layout.world_size)]
        return [
            (rank, part.param_start, part.param_start + part.numel)
            for rank, part in zip(ranks, parts, strict=True)
        ]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """All parts, flattened, on the device of this rank's; all ranks must call it."""
        sizes = [end - begin for _, begin, end in self.ranges()]
        longest, device = max(sizes), exchange_device(self._group, local.device)
        sent = local.new_zeros(longest, device=device)
        sent[: local.numel()].copy_(local)
        received = sent.new_empty(longest * len(sizes))
        all_gather(received, sent, self._group, self._label)
        rows = received.view(len(sizes), longest)
        held = [row[:size] for row, size in zip(rows, sizes, strict=True)]
        return torch.cat(held).to(local.device)
