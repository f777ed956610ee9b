"""Coarsening: a problem with fewer steps, for a search that tries many places.

A graph has hundreds of steps, but a transfer need not be tried between any two of them::

    steps    . . . . . . | . . . . . . . . . . . | . . . .       unit changes at |
    coarse   [    ][   ] | [     ][    ][      ] | [  ][ ]       cut at what counts, and evenly

A coarse step computes as long as its steps together, and has alive what the largest of them has. So
a schedule of the coarse problem takes as long in the other one, and keeps the same limits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.simulation import Schedule

_PIECES = 4
"""Parts of equal time into which each unit's compute is cut."""


@dataclass(frozen=True)
class Coarse:
    """A problem of fewer steps.

    Attributes:
        problem: with the same transfers.
        gaps: by gap of ``problem``, the gap of the problem that it was made of.
    """

    problem: Problem
    gaps: tuple[int, ...]

    def original(self, schedule: Schedule) -> Schedule:
        """A schedule of ``problem`` as one of the problem that it was made of."""
        return tuple(replace(p, issue=self.gaps[p.issue], wait=self.gaps[p.wait]) for p in schedule)


def coarsen(problem: Problem) -> Coarse:
    """Merge steps between changes of unit, limits of transfers, and even distances in time."""
    gaps = sorted({0, problem.num_steps, *_even_cuts(problem), *_limits(problem)})
    place = {gap: i for i, gap in enumerate(gaps)}
    spans = list(pairwise(gaps))
    transfers = tuple(
        replace(t, ready=place[t.ready], need=place[t.need]) for t in problem.transfers
    )
    coarse = Problem(
        tuple(sum(problem.compute_ms[a:b]) for a, b in spans),
        tuple(problem.units[a] for a, _ in spans),
        tuple(max(problem.base_bytes[a:b]) for a, b in spans),
        transfers,
    )
    return Coarse(coarse, tuple(gaps))


def _limits(problem: Problem) -> Iterator[int]:
    for transfer in problem.transfers:
        yield transfer.ready
        yield transfer.need


def _even_cuts(problem: Problem) -> Iterator[int]:
    """Gaps where units change, and in between at equal distances in time."""
    clock = list(accumulate(problem.compute_ms, initial=0.0))
    for begin, end in pairwise([*problem.segment_starts(), problem.num_steps]):
        yield begin
        for piece in range(1, _PIECES):
            at = clock[begin] + (clock[end] - clock[begin]) * piece / _PIECES
            yield min(end, max(begin, bisect_left(clock, at)))
