"""Flat layout of a unit's parameters: integers, and the views that they cut from tensors.

A rank holds some rows of every parameter, as ``torch.chunk`` divides them: of N ranks, rank r has
rows ``r * c`` to ``(r + 1) * c``, ``c = ceil(rows / N)``; the last ones may have fewer, or none.
In a shard, room for c rows of each parameter follows room for c rows of the next one. The unsharded
flat parameter is parameter-major: N times as much room for each. Two ranks, ``w`` of 4 rows, ``b``
of 3 elements::

    shard of rank 0    | w0 w1 | b0 b1 |          shard of rank 1    | w2 w3 | b2 .. |
    unsharded          | w0 w1 w2 w3 | b0 b1 b2 .. |

Every parameter starts at a multiple of ``align_numel`` in both. How shards become the unsharded
flat parameter is the gather plan's (``comm/gather_plan``); parameters that are gathered by
themselves come first. What is divided along another dimension than the first is packed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fsdp_dynamo.comm.gather_plan import GatherPlan, one_slice, plan_of
from graph_passes.markers import NO_VALUE, is_no_value

ALIGN_BYTES = 16


@dataclass(frozen=True)
class Slot:
    """Where one original parameter lies.

    Attributes:
        fqn: the parameter's FQN in the plain model, relative to its unit.
        shape: its original shape.
        offset: first element in the unsharded flat parameter.
        shard_start: first element in each shard.
        shard_numel: elements that a shard has room for: the same on all ranks.
        copies: how often it is in the unsharded flat parameter: one that is not divided, such as a
            scalar, may be in each shard.
        dim: along which it is divided.
    """

    fqn: str
    shape: tuple[int, ...]
    offset: int
    shard_start: int
    shard_numel: int
    copies: int = 1
    dim: int = 0

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Where it ends in the flat parameter, in elements."""
        return self.offset + self.numel * self.copies

    @property
    def blocks(self) -> int:
        """Into how many blocks its part on one rank is cut in the flat parameter."""
        return math.prod(self.shape[: self.dim])


@dataclass(frozen=True)
class ShardRange:
    """The part of one parameter that one rank holds.

    Attributes:
        start: index of the part's first row, or of what ``dim`` counts, in the parameter.
        shard_start: first element of the part within the rank's shard.
        numel: length; 0 where the rank holds nothing of the parameter.
        shape: of the part, ``(rows, *shape[1:])``, or the parameter's where nothing is sharded.
        dim: along which the parameter is divided.
    """

    start: int
    shard_start: int
    numel: int
    shape: tuple[int, ...]
    dim: int = 0

    def of(self, param_like: torch.Tensor) -> torch.Tensor:
        """The part of a tensor in the parameter's shape, contiguous: fused optimizers assume it."""
        return self.view_of(param_like).contiguous()

    def view_of(self, param_like: torch.Tensor) -> torch.Tensor:
        """The part of a tensor in the parameter's shape, in its memory."""
        if not self.shape:
            return param_like
        return param_like.narrow(self.dim, self.start, self.shape[self.dim])


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
        numel: elements of the shard.
        ranges: one per parameter.
    """

    numel: int
    ranges: tuple[ShardRange, ...]

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
        """Sizes that cut the shard; each parameter's piece and shape; whether some have no piece.

        A piece of -1 is none, a shape of ``None`` is 1-D.
        """
        held = [(one.shard_start, one.numel) for one in self.ranges if one.numel]
        sizes, found = _cut(held, self.numel)
        index = iter(found)
        at = [next(index) if part.numel else -1 for part in self.ranges]
        shapes = [None if len(part.shape) == 1 else part.shape for part in self.ranges]
        return sizes, list(zip(at, shapes, strict=True)), -1 in at


def _cut(ranges: Sequence[tuple[int, int]], numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes that cut a tensor into ranges, given as start and length, and what is between them.

    Returns:
        The sizes, and the index of each range's.
    """
    sizes: list[int] = []
    index = [0] * len(ranges)
    position = 0
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number]):
        start, length = ranges[number]
        if start > position:
            sizes.append(start - position)
        index[number] = len(sizes)
        sizes.append(length)
        position = start + length
    if numel > position:
        sizes.append(numel - position)
    return tuple(sizes), tuple(index)


@dataclass(frozen=True)
class FlatLayout:
    """Places, gaps and shards of one flat parameter.

    Attributes:
        slots: one per parameter.
        world_size: number of shards.
        plan: how shards become the unsharded flat parameter.
    """

    slots: tuple[Slot, ...]
    world_size: int
    plan: GatherPlan

    @cached_property
    def shard_numel(self) -> int:
        """Elements of a shard."""
        return self.plan.shard_numel

    @cached_property
    def padded_numel(self) -> int:
        """Elements of all shards."""
        return self.plan.shard_numel * self.world_size

    @cached_property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter, gaps included."""
        return self.padded_numel - sum(slot.end - slot.offset for slot in self.slots)

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes that cut the unsharded flat parameter into parameters and gaps."""
        return self._pieces[0]

    @property
    def split_slots(self) -> tuple[int, ...]:
        """For each slot, the index of its piece in ``split_sizes``."""
        return self._pieces[1]

    @cached_property
    def split_gaps(self) -> tuple[int, ...]:
        """Indices of the pieces in ``split_sizes`` that are gaps or padding."""
        return tuple(sorted({*range(len(self.split_sizes))}.difference(self.split_slots)))

    @cached_property
    def _shaped(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """For each slot, the index of its piece and the shape to give it (``None``: it has it)."""
        shapes = [
            None if len(slot.shape) == 1 or slot.copies > 1 else slot.shape for slot in self.slots
        ]
        return list(zip(self.split_slots, shapes, strict=True))

    @cached_property
    def _pieces(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranges = [(slot.offset, slot.end - slot.offset) for slot in self.slots]
        return _cut(ranges, self.padded_numel)

    @cached_property
    def _copied(self) -> tuple[int, ...]:
        """Indices of slots that are in each shard."""
        return tuple([index for index, slot in enumerate(self.slots) if slot.copies > 1])

    def repeat(self, unsharded: torch.Tensor) -> None:
        """Let all copies of a parameter be what the first one is."""
        for index in self._copied:
            slot = self.slots[index]
            copies = unsharded[slot.offset : slot.end].view(slot.copies, -1)
            copies[1:] = copies[0]

    def shard_range(self, index: int, rank: int) -> ShardRange:
        """Which part of the parameter in slot ``index`` a rank holds."""
        slot = self.slots[index]
        if slot.copies > 1 or not slot.shape:
            return ShardRange(0, slot.shard_start, slot.numel, slot.shape)
        size = slot.shape[slot.dim]
        each = size_per_rank(size, self.world_size)
        start = min(rank * each, size)
        shape = *slot.shape[: slot.dim], min(each, size - start), *slot.shape[slot.dim + 1 :]
        return ShardRange(start, slot.shard_start, math.prod(shape), shape, slot.dim)

    def shard(self, rank: int) -> ShardLayout:
        """Layout of a rank's shard."""
        ranges = tuple(self.shard_range(i, rank) for i in range(len(self.slots)))
        return ShardLayout(self.shard_numel, ranges)

    def whole(self) -> ShardLayout:
        """Layout of all shards as one, with parameters in their shapes."""
        parts = (ShardRange(0, s.offset, s.numel, s.shape, s.dim) for s in self.slots)
        return ShardLayout(self.padded_numel, tuple(parts))

    def parts_of(self, unsharded: torch.Tensor, ranges: Sequence[ShardRange]) -> list[torch.Tensor]:
        """A rank's parts of the parameters in a tensor ``(padded_numel,)`` (views)."""
        pairs = zip(ranges, self.split(unsharded), strict=True)
        return [part.view_of(view) for part, view in pairs]

    def shard_of(self, unsharded: torch.Tensor, rank: int) -> torch.Tensor:
        """A copy of a rank's shard ``(shard_numel,)`` of a tensor ``(padded_numel,)``."""
        return self.plan.shard_of(unsharded, rank, self.world_size)

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
        views = [pieces[i] if shape is None else pieces[i].view(shape) for i, shape in self._shaped]
        for index in self._copied:
            slot = self.slots[index]
            views[index] = views[index][: slot.numel].view(slot.shape)
        return views

    def fill(self, unsharded: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write values in the parameters' shapes into ``(padded_numel,)``, in one pass.

        Gaps and padding become zero, parameters without a value ``NO_VALUE``.
        """
        values = self._with_copies(values)
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

    def messages(
        self,
        values: Sequence[torch.Tensor | None],
        plan: GatherPlan,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Values in the parameters' shapes as what a reduce-scatter sends, in one pass.

        Gaps and padding are zero, parameters without a value ``NO_VALUE``.

        Args:
            values: one per parameter.
            plan: of the reduce-scatter.
            size: its ranks, a divisor of ``world_size``.
            dtype: of the result.
            device: of the result.

        Returns:
            ``(padded_numel,)``: direct slices as in the unsharded flat parameter, packed pieces as
            their message (``GatherPlan``).
        """
        if not plan.widths:
            flat = torch.empty(self.padded_numel, dtype=dtype, device=device)
            self.fill(flat, values)
            return flat
        values = self._with_copies(values)
        fills_all = self.padding_numel == 0 and not plan.packed_start and not plan.blocks
        if fills_all and all(value is not None for value in values):
            return self._concatenated(values, size, dtype)
        flat = torch.empty(self.padded_numel, dtype=dtype, device=device)
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for slot, room, value in zip(self.slots, self._rooms, values, strict=True):
            places, gaps = self._places(flat, slot, room, plan, size)
            for gap in gaps:
                gap.zero_()
            if value is None:
                for place in places:
                    place.fill_(NO_VALUE)
            elif places and slot.dim:
                targets.append(places[0].unflatten(1, (slot.blocks, -1)))
                sources.append(value.reshape(slot.blocks, size, -1).transpose(0, 1))
            elif places:
                targets += places
                numels = [place.numel() for place in places]
                pieces = value.reshape(-1).split_with_sizes(numels)
                sources += [one.view_as(to) for one, to in zip(pieces, places, strict=True)]
        if targets:
            torch._foreach_copy_(targets, sources)
        return flat

    def _places(
        self, flat: torch.Tensor, slot: Slot, room: int, plan: GatherPlan, size: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where ``messages`` writes one parameter, element by element, and what is beside it."""
        factor = self.world_size // size
        first, width, room = (factor * n for n in (slot.shard_start, slot.shard_numel, room))
        if first < plan.packed_start:  # direct
            end = size * (first + room)
            places, gaps = [flat[slot.offset : slot.end]], [flat[slot.end : end]]
        else:
            columns = plan.packed(flat, size).view(size, -1)[:, first - plan.packed_start :]
            column = columns[:, :width]
            numel = slot.end - slot.offset
            full, rest = divmod(numel, width) if width else (0, 0)
            places = [column[:full], column[full, :rest] if rest else column[:0]]
            gaps = [column[full, rest:] if rest else column[:0], column[full + bool(rest) :]]
            gaps.append(columns[:, width:room])
        return [one for one in places if one.numel()], [one for one in gaps if one.numel()]

    @cached_property
    def _rooms(self) -> list[int]:
        """For each slot, elements from its start in the shard to the start of the next one."""
        bounds = sorted({slot.shard_start for slot in self.slots if slot.numel})
        following = dict(zip(bounds, [*bounds[1:], self.shard_numel], strict=True))
        return [following[s.shard_start] - s.shard_start if s.numel else 0 for s in self.slots]

    def _with_copies(self, values: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Values, each as often as it is in the flat parameter."""
        if not self._copied:
            return values
        expanded = [*values]
        for index in self._copied:
            value = expanded[index]
            if value is not None:
                expanded[index] = value.reshape(1, -1).expand(self.slots[index].copies, -1)
                expanded[index] = expanded[index].reshape(-1)  # type: ignore[union-attr]
        return expanded

    def _concatenated(
        self, values: Sequence[torch.Tensor | None], size: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The message among ``size`` ranks of values that fill all parts."""
        pieces: list[Any] = [None] * len(values)
        for index, value in zip(self.split_slots, values, strict=True):
            width = self.split_sizes[index] // size
            pieces[index] = value.reshape(size, width)  # type: ignore[union-attr]
        message = torch.cat(pieces, 1)
        return message.view(-1) if message.dtype == dtype else message.view(-1).to(dtype)


def size_per_rank(size: int, world_size: int) -> int:
    """Number of rows that the first ranks hold of ``size``, as ``torch.chunk`` divides them."""
    return -(-size // world_size)


def make_layout(
    fqns: Sequence[str],
    shapes: Sequence[Sequence[int]],
    world_size: int,
    align_numel: int,
    direct_numel: int | None = None,
    *,
    dims: Sequence[int] = (),
    undivided: Collection[int] = (),
) -> FlatLayout:
    """Lay parameters out, those that are gathered by themselves first.

    Args:
        fqns: FQNs, one per parameter.
        shapes: original shapes, one per parameter.
        world_size: number of shards, at least 1.
        align_numel: every parameter starts at a multiple of it.
        direct_numel: from so many elements per rank on they are gathered by themselves; ``None``:
            none is.
        dims: along which parameters are divided, one per parameter; by rows if not given. Others
            than 0 divide by ``world_size``, and their parameters are packed.
        undivided: indices of parameters, beside scalars, that are in each shard.
    """
    dims = dims or [0] * len(shapes)
    copies = [
        world_size if index in undivided or not shape else 1 for index, shape in enumerate(shapes)
    ]
    numels = [
        math.prod(shape)
        if number > 1 or not shape
        else size_per_rank(shape[dim], world_size) * math.prod((*shape[:dim], *shape[dim + 1 :]))
        for shape, number, dim in zip(shapes, copies, dims, strict=True)
    ]
    is_direct = [
        direct_numel is not None and numel >= max(1, direct_numel) and not dim
        for numel, dim in zip(numels, dims, strict=True)
    ]
    starts, ends, packed_start = [0] * len(shapes), [0], 0
    for wanted in (True, False):
        for index in (i for i, direct in enumerate(is_direct) if direct is wanted):
            starts[index] = -(-ends[-1] // align_numel) * align_numel
            ends.append(starts[index] + numels[index])
        packed_start = packed_start if not wanted else -(-ends[-1] // align_numel) * align_numel
    slots = tuple(
        Slot(
            fqn,
            tuple(shape),
            world_size * start,
            start,
            numel,
            number,
            dim,
        )
        for fqn, shape, start, numel, number, dim in zip(
            fqns, shapes, starts, numels, copies, dims, strict=True
        )
    )
    end = max(1, ends[-1])
    plan = one_slice(end) if world_size == 1 else _plan(slots, is_direct, packed_start, end)
    return FlatLayout(slots, world_size, plan)


def _plan(
    slots: Sequence[Slot], is_direct: Sequence[bool], packed_start: int, end: int
) -> GatherPlan:
    """The gather plan of slots, of which the direct ones lie before ``packed_start``."""
    direct = [slot for slot, wanted in zip(slots, is_direct, strict=True) if wanted]
    packed = [slot for slot, wanted in zip(slots, is_direct, strict=True) if not wanted]
    if not packed:
        packed_start = end
    ranges = [(slot.shard_start - packed_start, slot.shard_numel) for slot in packed]
    widths, pieces = _cut(ranges, end - packed_start)
    blocks = [1] * len(widths)
    for slot, piece in zip(packed, pieces, strict=True):
        blocks[piece] = slot.blocks
    return plan_of(
        [slot.shard_start for slot in direct],
        [slot.shard_numel for slot in direct],
        widths,
        packed_start,
        blocks,
    )
