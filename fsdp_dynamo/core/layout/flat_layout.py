"""Flat layout of a unit's parameters: integers, and the views that they cut from tensors.

A flat parameter is one row of elements::

    | param 0 | gap | param 1 | param 2 | ... | padding |
    |<------ shard of rank 0 ------>|<-- rank 1 -->| ...

Every parameter starts at a multiple of ``align_numel``. Rank r holds the r-th contiguous 1/N, which
may begin and end inside a parameter, but between two rows of it (``row_planner``)::

    shard of rank 1    | last rows of param 1 | param 2 | ... | padding |
    ShardRange of 1    |<-------------------->|            param_start = elements that rank 0 holds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fsdp_dynamo.core.layout.row_planner import plan_rows
from graph_passes.markers import NO_VALUE, is_no_value

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """Where one original parameter lies in the unsharded flat parameter.

    Attributes:
        fqn: the parameter's FQN in the plain model, relative to its unit.
        shape: its original shape.
        offset: first element in the flat parameter.
        row_shape: of what is never cut: ``shape[1:]``, or finer (``row_planner``).
    """

    fqn: str
    shape: tuple[int, ...]
    offset: int
    row_shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Where it ends in the flat parameter, in elements."""
        return self.offset + self.numel

    def part_shape(self, numel: int) -> tuple[int, ...]:
        """Shape ``(rows, *row_shape)`` of a part of so many elements."""
        return (numel // max(1, math.prod(self.row_shape)), *self.row_shape)


@dataclass(frozen=True)
class ShardRange:
    """The part of one parameter that one rank holds.

    Attributes:
        param_start: first element of the part within the flattened parameter.
        shard_start: first element of the part within the rank's shard.
        numel: length; 0 where the rank holds nothing of the parameter.
        shape: of the part: 1-D, or ``(rows, *row_shape)``, or the parameter's where nothing is
            sharded.
    """

    param_start: int
    shard_start: int
    numel: int
    shape: tuple[int, ...]

    def of(self, param_like: torch.Tensor) -> torch.Tensor:
        """The part, in its shape, of a tensor as large as the parameter."""
        flat = param_like.reshape(-1)
        return flat[self.param_start : self.param_start + self.numel].view(self.shape)


def has_value(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Whether each of some tensors of one device has elements other than ``NO_VALUE``."""
    if not tensors:
        return []
    found = [(~is_no_value(tensor)).any() for tensor in tensors]
    return torch.stack(found).tolist()


@dataclass(frozen=True)
class ShardLayout:
    """Parts of parameters in one rank's shard.

    Attributes:
        start: first element of the shard in the flat parameter.
        numel: elements of the shard.
        ranges: one per parameter.
    """

    start: int
    numel: int
    ranges: tuple[ShardRange, ...]

    def of(self, unsharded: torch.Tensor) -> torch.Tensor:
        """The shard ``(numel,)`` of a tensor ``(padded_numel,)``, a view."""
        return unsharded.narrow(0, self.start, self.numel)

    def split(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(numel,)`` into the parts of the parameters (views, often empty)."""
        flat = shard.detach() if shard.requires_grad else shard
        sizes, places, lacks_some = self._pieces
        pieces = torch.split_with_sizes(flat, sizes)
        if lacks_some:
            pieces = (*pieces, flat[:0])
        return [
            pieces[index] if shape is None else pieces[index].view(shape) for index, shape in places
        ]

    @cached_property
    def _pieces(self) -> tuple[tuple[int, ...], list[tuple[int, tuple[int, ...] | None]], bool]:
        """Sizes that cut the shard; each parameter's piece (-1: none) and shape (``None``: 1-D);
        whether some have none."""
        sizes: list[int] = []
        index: list[int] = []
        position = 0
        for part in self.ranges:
            if not part.numel:
                index.append(-1)
                continue
            if part.shard_start > position:
                sizes.append(part.shard_start - position)
            index.append(len(sizes))
            sizes.append(part.numel)
            position = part.shard_start + part.numel
        if self.numel > position:
            sizes.append(self.numel - position)
        shapes = [None if len(part.shape) == 1 else part.shape for part in self.ranges]
        return tuple(sizes), list(zip(index, shapes, strict=True)), -1 in index


@dataclass(frozen=True)
class FlatLayout:
    """Offsets, gaps and shards of one flat parameter.

    Attributes:
        slots: one per parameter, by offset.
        unpadded_numel: end of the last parameter.
        padded_numel: elements of all shards.
        world_size: number of shards.
        keeps_rows: whether parts have the shape of rows; otherwise they are 1-D.
    """

    slots: tuple[Slot, ...]
    unpadded_numel: int
    padded_numel: int
    world_size: int
    keeps_rows: bool

    @property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.padded_numel // self.world_size

    @property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter, gaps included."""
        return self.padded_numel - sum(slot.numel for slot in self.slots)

    @cached_property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes that cut the unsharded flat parameter into slots and gaps, in order."""
        return tuple(size for size, _ in self._pieces)

    @cached_property
    def split_slots(self) -> tuple[int, ...]:
        """For each slot, the index of its piece in ``split_sizes``."""
        return tuple(i for i, (_, is_slot) in enumerate(self._pieces) if is_slot)

    @cached_property
    def split_gaps(self) -> tuple[int, ...]:
        """Indices of the pieces in ``split_sizes`` that are gaps or padding."""
        return tuple(i for i, (_, is_slot) in enumerate(self._pieces) if not is_slot)

    @cached_property
    def _shaped(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """For each slot, the index of its piece and the shape to give it (``None``: it has it)."""
        shapes = [None if len(slot.shape) == 1 else slot.shape for slot in self.slots]
        return list(zip(self.split_slots, shapes, strict=True))

    @cached_property
    def _pieces(self) -> tuple[tuple[int, bool], ...]:
        pieces: list[tuple[int, bool]] = []
        position = 0
        for slot in self.slots:
            if slot.offset > position:
                pieces.append((slot.offset - position, False))
            pieces.append((slot.numel, True))
            position = slot.end
        if self.padded_numel > position:
            pieces.append((self.padded_numel - position, False))
        return tuple(pieces)

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """First element and end of a rank's shard in the flat parameter."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def shard_range(self, index: int, rank: int) -> ShardRange:
        """Which part of the parameter in slot ``index`` a rank holds."""
        slot = self.slots[index]
        low, high = self.shard_bounds(rank)
        start, end = max(slot.offset, low), min(slot.end, high)
        if start >= end:
            return ShardRange(0, 0, 0, slot.part_shape(0) if self.keeps_rows else (0,))
        shape = slot.part_shape(end - start) if self.keeps_rows else (end - start,)
        return ShardRange(start - slot.offset, start - low, end - start, shape)

    def shard(self, rank: int) -> ShardLayout:
        """Layout of a rank's shard."""
        start, end = self.shard_bounds(rank)
        ranges = tuple(self.shard_range(i, rank) for i in range(len(self.slots)))
        return ShardLayout(start, end - start, ranges)

    def whole(self) -> ShardLayout:
        """Layout of all shards as one, with parameters in their shapes."""
        parts = (ShardRange(0, slot.offset, slot.numel, slot.shape) for slot in self.slots)
        return ShardLayout(0, self.padded_numel, tuple(parts))

    def slots_within(self, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Indices of parameters that have elements, all of them in one of some ranges."""
        return {
            index
            for index, slot in enumerate(self.slots)
            if slot.numel and any(begin <= slot.offset and slot.end <= end for begin, end in ranges)
        }

    def split(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(padded_numel,)`` into the parameters' shapes (views)."""
        pieces = torch.split_with_sizes(unsharded, self.split_sizes)
        return [pieces[i] if shape is None else pieces[i].view(shape) for i, shape in self._shaped]

    def fill(self, unsharded: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write values in the parameters' shapes into ``(padded_numel,)``, in one pass.

        Gaps and padding become zero, parameters without a value ``NO_VALUE``.
        """
        pieces = torch.split_with_sizes(unsharded, self.split_sizes)
        for i in self.split_gaps:
            pieces[i].zero_()
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for value, (i, shape) in zip(values, self._shaped, strict=True):
            if value is None:
                pieces[i].fill_(NO_VALUE)
            else:
                targets.append(pieces[i] if shape is None else pieces[i].view(shape))
                sources.append(value)
        if targets:
            torch._foreach_copy_(targets, sources)


def make_layout(
    fqns: Sequence[str],
    shapes: Sequence[Sequence[int]],
    world_size: int,
    align_numel: int,
    rows_together: Sequence[int] | None = None,
    *,
    keeps_rows: bool = False,
) -> FlatLayout:
    """Lay parameters out in the order given, no row of them on two shards.

    Args:
        fqns: FQNs, one per parameter.
        shapes: original shapes, one per parameter.
        world_size: number of shards, at least 1.
        align_numel: every parameter starts at a multiple of it.
        rows_together: how many rows of each stay on one shard; one by default.
        keeps_rows: whether parts have the shape of rows; otherwise they are 1-D.
    """
    plan = plan_rows(shapes, world_size, align_numel, rows_together)
    slots = tuple(
        Slot(fqn, tuple(shape), offset, row_shape)
        for fqn, shape, offset, row_shape in zip(
            fqns, shapes, plan.offsets, plan.row_shapes, strict=True
        )
    )
    return FlatLayout(slots, slots[-1].end, plan.shard_numel * world_size, world_size, keeps_rows)
