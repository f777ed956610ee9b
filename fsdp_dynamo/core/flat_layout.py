"""Flat layout of a unit's parameters: integers, and the views that they cut from tensors.

A rank holds some rows of every parameter, as ``torch.chunk`` divides them: of N ranks, rank r has
rows ``r * c`` to ``(r + 1) * c``, ``c = ceil(rows / N)``; the last ranks may have fewer rows, or
none. A shard reserves c rows for each parameter, one parameter after the other. The unsharded
buffer is parameter-major and reserves ``N * c`` rows for each. Two ranks, ``w`` of 4 rows, ``b`` of
3 elements::

    shard of rank 0    | w0 w1 | b0 b1 |          shard of rank 1    | w2 w3 | b2 .. |
    unsharded buffer   | w0 w1 w2 w3 | b0 b1 b2 .. |

Every parameter starts at a multiple of ``align_numel`` in both. Directly gathered parameters come
first, packed ones follow (``comm/gather_plan``). A parameter that is divided along another
dimension than the first is packed.
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
    """Place of one original parameter.

    Attributes:
        fqn: FQN relative to the unit.
        shape: original shape.
        offset: first element in the unsharded buffer.
        shard_start: first element in each shard.
        shard_numel: elements reserved in a shard, equal on all ranks.
        copies: number of copies in the unsharded buffer: one per shard where the parameter is not
            divided (a scalar), else 1.
        dim: dimension along which the parameter is divided.
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
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel * self.copies

    @property
    def blocks(self) -> int:
        """Number of blocks in the unsharded buffer that one rank's part consists of."""
        return math.prod(self.shape[: self.dim])


@dataclass(frozen=True)
class ShardRange:
    """Part of one parameter on one rank: ``shape[dim]`` rows from row ``start`` on, or none."""

    start: int
    shard_start: int
    numel: int
    shape: tuple[int, ...]
    dim: int = 0

    def of(self, param_like: torch.Tensor) -> torch.Tensor:
        """Cut the part from a tensor of the parameter's shape, contiguous for fused optimizers."""
        return self.view_of(param_like).contiguous()

    def view_of(self, param_like: torch.Tensor) -> torch.Tensor:
        if not self.shape:
            return param_like
        return param_like.narrow(self.dim, self.start, self.shape[self.dim])


def has_value(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it has elements other than ``NO_VALUE``: the host waits."""
    if not tensors:
        return []
    found = [(~is_no_value(tensor)).any().to(tensors[0].device) for tensor in tensors]
    return torch.stack(found).tolist()


@dataclass(frozen=True)
class ShardLayout:
    """Parts of the parameters in one rank's shard of ``numel`` elements, one range each."""

    numel: int
    ranges: tuple[ShardRange, ...]

    def split(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(numel,)`` into views of the parameters' parts, which may be empty."""
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
        """Split sizes, ``(piece, shape)`` per parameter, and whether a parameter has no elements.

        Piece -1 stands for no elements, shape ``None`` for 1-D.
        """
        held = [(one.shard_start, one.numel) for one in self.ranges if one.numel]
        sizes, found = _cut(held, self.numel)
        index = iter(found)
        at = [next(index) if part.numel else -1 for part in self.ranges]
        shapes = [None if len(part.shape) == 1 else part.shape for part in self.ranges]
        return sizes, list(zip(at, shapes, strict=True)), -1 in at


def _cut(ranges: Sequence[tuple[int, int]], numel: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes that split ``numel`` elements into ranges and gaps, and each range's index."""
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
    """Layout of one flat parameter over ``world_size`` shards, gathered by ``plan``."""

    slots: tuple[Slot, ...]
    world_size: int
    plan: GatherPlan

    @cached_property
    def shard_numel(self) -> int:
        return self.plan.shard_numel

    @cached_property
    def padded_numel(self) -> int:
        return self.plan.shard_numel * self.world_size

    @cached_property
    def padding_numel(self) -> int:
        """Elements that belong to no parameter, gaps included."""
        return self.padded_numel - sum(slot.end - slot.offset for slot in self.slots)

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """Sizes that split the unsharded buffer into parameters and gaps."""
        return self._pieces[0]

    @property
    def split_slots(self) -> tuple[int, ...]:
        return self._pieces[1]

    @cached_property
    def split_gaps(self) -> tuple[int, ...]:
        """Positions in ``split_sizes`` that are gaps or padding."""
        return tuple(sorted({*range(len(self.split_sizes))}.difference(self.split_slots)))

    @cached_property
    def _shaped(self) -> list[tuple[int, tuple[int, ...] | None]]:
        """``(piece, shape)`` per slot; shape ``None``: the piece needs no reshape."""
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
        return tuple([index for index, slot in enumerate(self.slots) if slot.copies > 1])

    def repeat(self, unsharded: torch.Tensor) -> None:
        """Overwrite all copies of each replicated parameter with its first copy."""
        for index in self._copied:
            slot = self.slots[index]
            copies = unsharded[slot.offset : slot.end].view(slot.copies, -1)
            copies[1:] = copies[0]

    def shard_range(self, index: int, rank: int) -> ShardRange:
        """Return the part of the parameter in slot ``index`` that a rank holds."""
        slot = self.slots[index]
        if slot.copies > 1 or not slot.shape:
            return ShardRange(0, slot.shard_start, slot.numel, slot.shape)
        size = slot.shape[slot.dim]
        each = size_per_rank(size, self.world_size)
        start = min(rank * each, size)
        shape = *slot.shape[: slot.dim], min(each, size - start), *slot.shape[slot.dim + 1 :]
        return ShardRange(start, slot.shard_start, math.prod(shape), shape, slot.dim)

    def shard(self, rank: int) -> ShardLayout:
        ranges = tuple(self.shard_range(i, rank) for i in range(len(self.slots)))
        return ShardLayout(self.shard_numel, ranges)

    def whole(self) -> ShardLayout:
        parts = (ShardRange(0, s.offset, s.numel, s.shape, s.dim) for s in self.slots)
        return ShardLayout(self.padded_numel, tuple(parts))

    def parts_of(self, unsharded: torch.Tensor, ranges: Sequence[ShardRange]) -> list[torch.Tensor]:
        """Cut a rank's parts of the parameters from a tensor ``(padded_numel,)`` (views)."""
        pairs = zip(ranges, self.split(unsharded), strict=True)
        return [part.view_of(view) for part, view in pairs]

    def shard_of(self, unsharded: torch.Tensor, rank: int) -> torch.Tensor:
        """Copy a rank's shard ``(shard_numel,)`` out of a tensor ``(padded_numel,)``."""
        return self.plan.shard_of(unsharded, rank, self.world_size)

    def slots_within(self, ranges: Sequence[tuple[int, int]]) -> set[int]:
        """Indices of nonempty parameters that lie within one of the ranges."""
        return {
            index
            for index, slot in enumerate(self.slots)
            if slot.numel and any(begin <= slot.offset and slot.end <= end for begin, end in ranges)
        }

    def split(self, unsharded: torch.Tensor) -> list[torch.Tensor]:
        """Cut a tensor ``(padded_numel,)`` into views of the parameters' shapes."""
        pieces = torch.split_with_sizes(unsharded, self.split_sizes)
        views = [pieces[i] if shape is None else pieces[i].view(shape) for i, shape in self._shaped]
        for index in self._copied:
            slot = self.slots[index]
            views[index] = views[index][: slot.numel].view(slot.shape)
        return views

    def fill(self, unsharded: torch.Tensor, values: Sequence[torch.Tensor | None]) -> None:
        """Write values of the parameters' shapes into ``(padded_numel,)``.

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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Copy values of the parameters' shapes into the input of a reduce-scatter, in one copy.

        In the result ``(padded_numel,)``, ``out`` if given, direct slices lie as in the unsharded
        buffer, and packed pieces in rank-major order (``GatherPlan``). Gaps and padding become
        zero, parameters without a value ``NO_VALUE``. ``size`` is the number of ranks, a divisor of
        ``world_size``.
        """
        if plan.widths:
            values = self._with_copies(values)
            fills_all = self.padding_numel == 0 and not plan.packed_start and not plan.blocks
            if fills_all and all(value is not None for value in values):
                return self._concatenated(values, size, dtype, out)
        flat = torch.empty(self.padded_numel, dtype=dtype, device=device) if out is None else out
        if plan.widths:
            self._fill_messages(flat, values, plan, size)
        else:
            self.fill(flat, values)
        return flat

    def _fill_messages(
        self,
        flat: torch.Tensor,
        values: Sequence[torch.Tensor | None],
        plan: GatherPlan,
        size: int,
    ) -> None:
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

    def _places(
        self, flat: torch.Tensor, slot: Slot, room: int, plan: GatherPlan, size: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the views of ``flat`` that hold one parameter, in order, and the gaps."""
        factor = self.world_size // size
        first, width, room = (factor * n for n in (slot.shard_start, slot.shard_numel, room))
        if first < plan.packed_start:  # direct: contiguous, as in the unsharded buffer
            end = size * (first + room)
            places, gaps = [flat[slot.offset : slot.end]], [flat[slot.end : end]]
        else:
            # Packed: a column of the rank-major message. The first `full` ranks receive `width`
            # elements each, the next rank receives the rest.
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
        """Elements from each slot's start in the shard to the start of the next slot."""
        bounds = sorted({slot.shard_start for slot in self.slots if slot.numel})
        following = dict(zip(bounds, [*bounds[1:], self.shard_numel], strict=True))
        return [following[s.shard_start] - s.shard_start if s.numel else 0 for s in self.slots]

    def _with_copies(self, values: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
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
        self,
        values: Sequence[torch.Tensor | None],
        size: int,
        dtype: torch.dtype,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Build ``messages`` with one ``cat``, for values that leave no gaps."""
        pieces: list[Any] = [None] * len(values)
        for index, value in zip(self.split_slots, values, strict=True):
            width = self.split_sizes[index] // size
            pieces[index] = value.reshape(size, width)  # type: ignore[union-attr]
        if out is not None and pieces[0].dtype == dtype:
            torch.cat(pieces, 1, out=out.view(size, -1))
            return out
        message = torch.cat(pieces, 1).view(-1)
        if out is not None:
            return out.copy_(message)
        return message if message.dtype == dtype else message.to(dtype)


def size_per_rank(size: int, world_size: int) -> int:
    """Return how many of ``size`` rows a rank holds at most, as ``torch.chunk`` divides them."""
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
    """Lay out parameters, directly gathered ones first.

    Args:
        fqns, shapes, world_size: as in ``Slot`` and ``FlatLayout``.
        align_numel: every parameter starts at a multiple of it.
        direct_numel: parameters with at least this many elements per rank are gathered directly;
            ``None``: all are packed.
        dims: dimensions along which parameters are divided; empty: all 0. A size along another
            dimension than 0 is a multiple of ``world_size``, and the parameter is packed.
        undivided: indices of parameters, beside scalars, that each shard holds whole.
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
        Slot(fqn, tuple(shape), world_size * start, start, numel, number, dim)
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
