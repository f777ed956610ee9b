"""Who holds which part of a tensor, in the words of torch's ShardedTensor.

Scripts for FSDP1 ask values of a sharded state dict for ``local_shards()`` and ``metadata()``. The
answers here have the attributes that ShardedTensor's have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import TensorProperties


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
