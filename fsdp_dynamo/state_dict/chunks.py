"""A range of a row-major tensor as boxes: what checkpoints can describe.

Flattened row by row, the part that a rank holds of a tensor is a contiguous range. In the tensor it
begins somewhere in a row, spans whole rows, and ends somewhere in a row::

    . . . # #        1 box:  the rest of the first row
    # # # # #        1 box:  all whole rows
    # # # # #
    # # . . .        1 box:  the begin of the last row

In more dimensions the first and the last row are ranges themselves: at most ``2 * ndim - 1`` boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A block of a tensor, contiguous in it.

    Attributes:
        offsets: where it begins, one a dimension.
        sizes: how long it is, one a dimension.
        start: its first element within the range.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Cut elements ``begin`` to ``end`` of a flattened tensor of this shape into boxes.

    They are disjoint, in order, and each is contiguous in the range; none for an empty range.
    """
    if end <= begin:
        return []
    boxes: list[Box] = []
    start = 0
    for offsets, sizes in _cut(tuple(shape), begin, end):
        boxes.append(Box(offsets, sizes, start))
        start += math.prod(sizes)
    return boxes


def _cut(
    shape: tuple[int, ...], begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes."""
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
