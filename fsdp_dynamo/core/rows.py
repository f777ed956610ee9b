"""Which rows of a parameter each rank holds.

One object says it for a parameter, its gradient and an optimizer's states of the same size::

    rank 0   rows 0:3  \\
    rank 1   rows 3:8   >  of (8, 5); any numbers, often 0:0, in the order of the ranks
    rank 2   rows 8:8  /

With a hierarchy of ranks, their parts are in the order of shards, which is another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.comm.process_groups import Groups, served_device
from fsdp_dynamo.core.layout.flat_layout import FlatLayout, ShardRange, Slot
from fsdp_dynamo.errors import FSDPStateError


class Rows:
    """The parts of an original parameter, or of a tensor as large as it, that ranks hold.

    Args:
        slot: the parameter in its flat parameter.
        parts: one per rank.
        group: the ranks, in the order of the parts.
        fqn: of the parameter, for messages.
    """

    def __init__(
        self,
        slot: Slot,
        parts: Sequence[ShardRange],
        group: dist.ProcessGroup,
        fqn: str,
    ) -> None:
        self.fqn = fqn
        self.group = group
        self.slot, self.parts = slot, tuple(parts)

    def __reduce__(self) -> Any:
        """In a file there are no ranks."""
        return NoneType, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Rows:
        """Groups of ranks are shared between copies."""
        return self

    def ranges(self) -> list[tuple[int, int, int]]:
        """Rank in the default group, first element and end of each part, in order."""
        ranks = dist.get_process_group_ranks(self.group)
        return [
            (rank, part.param_start, part.param_start + part.numel)
            for rank, part in zip(ranks, self.parts, strict=True)
        ]

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor, on the device of this rank's part; all ranks must call it.

        Raises:
            FSDPStateError: it has no values: it is on the meta device.
        """
        if local.is_meta:
            raise FSDPStateError(
                expected="a tensor with values",
                got="one on the meta device",
                where=f"full_tensor(), '{self.fqn}'",
                fix="Call model.to_empty(device=...) and initialise it, or load a state dict.",
            )
        sizes = [part.numel for part in self.parts]
        longest, device = max(1, *sizes), served_device(self.group, local.device)
        sent = local.new_zeros(longest, device=device)
        sent[: local.numel()].copy_(local.reshape(-1))
        received = sent.new_empty(longest * len(sizes))
        all_gather(received, sent, self.group, self.fqn)
        each = received.view(-1, longest)
        order = sorted(range(len(sizes)), key=lambda rank: self.parts[rank].param_start)
        held = [each[rank][: sizes[rank]] for rank in order]
        return torch.cat(held).to(local.device).view(self.slot.shape)


def rows_in(layout: FlatLayout, index: int, groups: Groups, fqn: str) -> Rows:
    """``Rows`` of the parameter in slot ``index`` of a flat parameter."""
    if layout.world_size == 1:  # in its own shape, also where rows would be other ones
        parts = [layout.whole().ranges[index]]
    else:
        ranks = range(layout.world_size)
        parts = [layout.shard_range(index, groups.shard_of(rank)) for rank in ranks]
    return Rows(layout.slots[index], parts, groups.shard, fqn)
