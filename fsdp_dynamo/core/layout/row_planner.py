"""Starts of parameters, and a shard size, so that shards begin and end between rows.

A row is a slice of a parameter's dimension 0. One behind the other, parameters would be cut
somewhere in a row; here they are shifted, and shards made a little larger. Two ranks, ``w`` of the
shape (5, 4), ``b`` of 5 elements and ``v`` of the shape (5, 6), a character for each element::

    any starts  |wwwwwwwwwwwwwwwwwwwwbbbbbvvv|vvvvvvvvvvvvvvvvvvvvvvvvvvv.|
    rows        |wwwwwwwwwwwwwwwwwwwwbbbbb.....|vvvvvvvvvvvvvvvvvvvvvvvvvvvvvv|

A parameter larger than a shard crosses several bounds, so its row must divide the shard size. One
that crosses a single bound only has to begin at the right distance from it.

Where that would cost more padding than ``MAX_PADDING_PERCENT`` (rows that have no small common
multiple, or rows as large as a shard: eight stacked experts on 64 ranks), the largest rows are made
finer. A stack of matrices is then cut between rows of the matrices, and at last any parameter
between elements.

Source: veScale-FSDP (arXiv:2602.22437) plans ragged shards for blocks of rows likewise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_PADDING_PERCENT = 3
"""Of all elements; rows are made finer where there would be more, and more than ``FREE_NUMEL``."""
FREE_NUMEL = 1024
"""Elements of padding per shard that take no time worth cutting rows for."""


_SMALL_STEPS = 64
"""Sizes of shards that are tried one by one before the steps become larger."""


@dataclass(frozen=True)
class RowPlan:
    """Where parameters begin, and how large shards are.

    Attributes:
        offsets: first element of each parameter in the flat parameter.
        row_shapes: shape of a row of each, ``shape[1:]`` unless rows had to be made finer; ``(1,)``
            where a parameter of more than one dimension is cut between elements.
        shard_numel: elements of a shard.
    """

    offsets: tuple[int, ...]
    row_shapes: tuple[tuple[int, ...], ...]
    shard_numel: int


def plan_rows(
    shapes: Sequence[Sequence[int]],
    num_shards: int,
    align_numel: int,
    rows_together: Sequence[int] | None = None,
) -> RowPlan:
    """Lay parameters out in the order given, with no row on two shards.

    Equal arguments give an equal plan, so ranks need not talk about it. Padding, gaps included, is
    at most the larger of ``MAX_PADDING_PERCENT`` of all elements and ``FREE_NUMEL`` a shard, beyond
    what alignment costs; where rows are to stay together, it may be more.

    Args:
        shapes: of the parameters.
        num_shards: at least 1.
        align_numel: every parameter starts at a multiple of it.
        rows_together: how many rows of each stay on one shard; by default one, and where that would
            cost too much, less.
    """
    row_shapes = [tuple(shape[1:]) for shape in shapes]
    together = rows_together or [1] * len(shapes)
    unpadded = sum(_round_up(math.prod(shape), align_numel) for shape in shapes)
    limit = unpadded + max(unpadded * MAX_PADDING_PERCENT // 100, FREE_NUMEL * num_shards)
    while True:
        blocks = [_Block(*one) for one in zip(shapes, row_shapes, together, strict=True)]
        placed = _place(blocks, num_shards, align_numel, limit)
        if placed is not None:
            return RowPlan(placed.offsets, tuple(row_shapes), placed.shard_numel)
        may_be_cut = [block for block in blocks if block.rows == 1 and block.row_numel > 1]
        if not may_be_cut:
            limit = unpadded * (num_shards + 1)  # rows that stay together cost what they cost
            continue
        crossing = [block for block in may_be_cut if block.numel * num_shards > unpadded]
        largest = max(block.row_numel for block in crossing or may_be_cut)
        row_shapes = [
            _finer(block.row_shape)
            if block.rows == 1 and block.row_numel > largest * 7 // 8
            else block.row_shape
            for block in blocks
        ]


@dataclass(frozen=True)
class _Block:
    """A parameter's shape, that of a row of it, and how many rows stay together."""

    shape: Sequence[int]
    row_shape: tuple[int, ...]
    rows: int

    @cached_property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    @cached_property
    def row_numel(self) -> int:
        """Elements of what is never cut."""
        return max(1, min(self.numel, self.rows * math.prod(self.row_shape)))


@dataclass(frozen=True)
class _Placed:
    """Starts that fit into shards of one size."""

    offsets: tuple[int, ...]
    shard_numel: int


def _finer(row_shape: tuple[int, ...]) -> tuple[int, ...]:
    """A row's shape with one dimension less; of a matrix, single elements."""
    return row_shape[1:] if len(row_shape) > 1 else (1,)


def _place(blocks: Sequence[_Block], num_shards: int, align: int, allowed: int) -> _Placed | None:
    """The smallest shards that can be had, or ``None`` if all together are above ``allowed``.

    Tried are the smallest possible size, and sizes from which on another parameter crosses one
    bound at most, so that its row need not divide them.
    """
    if num_shards == 1:
        offsets, end = _starts(blocks, allowed, align)
        return _Placed(offsets, max(1, end))
    smallest = max(1, _ceil_div(sum(block.numel for block in blocks), num_shards))
    limit = allowed // num_shards
    best: _Placed | None = None
    for least in [smallest, *sorted({b.numel for b in blocks if smallest < b.numel <= limit})]:
        for unit in (align, 1):
            if best is not None and least >= best.shard_numel:
                return best
            found = _grow(blocks, least, num_shards, align, unit, limit)
            if found is not None and (best is None or found.shard_numel < best.shard_numel):
                best = found
    return best


def _grow(
    blocks: Sequence[_Block], least: int, num_shards: int, align: int, unit: int, limit: int
) -> _Placed | None:
    """Shards of at least ``least`` elements, a multiple of ``unit``, that hold everything."""
    attempts = 0
    while True:
        step = math.lcm(unit, *(block.row_numel for block in blocks if block.numel > least))
        shard = _round_up(least, step)
        if shard > limit:
            return None
        offsets, end = _starts(blocks, shard, align)
        if end <= shard * num_shards:
            return _Placed(offsets, shard)
        least = max(shard + 1, _ceil_div(end, num_shards))
        attempts += 1
        if attempts > _SMALL_STEPS:
            least += shard // 256


def _starts(blocks: Sequence[_Block], shard: int, align: int) -> tuple[tuple[int, ...], int]:
    """Starts, each shifted so that bounds of shards fall between rows, and the end of the last."""
    offsets: list[int] = []
    position = 0
    for block in blocks:
        start = _round_up(position, align)
        while start % shard + block.numel > shard:
            bound = (start // shard + 1) * shard
            fitting = _between_rows(bound, start, block.row_numel, align)
            if fitting is not None:
                start = fitting
                break
            start = _round_up(bound, align)
        offsets.append(start)
        position = start + block.numel
    return tuple(offsets), position


def _between_rows(bound: int, least: int, row_numel: int, align: int) -> int | None:
    """The first aligned start from ``least`` to a bound from which the bound is between rows."""
    first = bound - (bound - least) // row_numel * row_numel
    candidates = range(first, min(bound, first + align * row_numel) + 1, row_numel)
    return next((start for start in candidates if start % align == 0), None)


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _round_up(number: int, multiple: int) -> int:
    return _ceil_div(number, multiple) * multiple
