"""Division of a range of a row-major tensor into chunks, rectangular as checkpoints need them.

A rank holds a contiguous range of a tensor that is flattened row by row. In the tensor, the range
begins somewhere in a row, spans whole rows, and ends somewhere in a row::

    . . . # #        1 chunk:  the rest of the first row
    # # # # #        1 chunk:  all whole rows
    # # # # #
    # # . . .        1 chunk:  the beginning of the last row

In more dimensions, the first and last row are ranges themselves: at most ``2 * ndim - 1`` chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """A rectangular block of a tensor, contiguous in memory.

    Attributes:
        offsets: where it begins, per dimension.
        sizes: its lengths, per dimension.
        start: position of its first element in the range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def chunks_of(shape: Sequence[int], begin: int, end: int) -> list[Chunk]:
    """Divide elements ``begin`` to ``end`` of a flattened tensor of this shape into chunks.

    They are disjoint and in order, and each is contiguous in the range; an empty range has none.
    """
    if end <= begin:
        return []
    chunks: list[Chunk] = []
    start = 0
    for offsets, sizes in _cut(tuple(shape), begin, end):
        chunks.append(Chunk(offsets, sizes, start))
        start += math.prod(sizes)
    return chunks


def _cut(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the chunks."""
    if len(shape) < 2:
        yield (begin,) * len(shape), (end - begin,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # whole rows
    if first > last:  # within one row
        yield from _in_row(shape, last, begin - last * row, end - last * row)
        return
    if begin < first * row:
        yield from _in_row(shape, first - 1, begin - (first - 1) * row, row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(
    shape: tuple[int, ...], index: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _cut(shape[1:], begin, end):
        yield (index, *offsets), (1, *sizes)
