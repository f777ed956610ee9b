"""Prefetch: all-gathers are issued ahead of their use.

Before::

    ag(k) wait(k) compute(k) ag(k+1) wait(k+1) compute(k+1)

After::

    ag(k) ag(k+1) wait(k) compute(k) wait(k+1) compute(k+1)

Seen from the end of the graph: an all-gather must begin so early that it and all gathers behind it
on the link arrive in time (times a margin), but at least one unit ahead; it is issued at the last
change of units before that. Where memory or places in flight run out, it is issued later.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from graph_passes.scheduling.limits import Limits, Room
from graph_passes.scheduling.problem import Problem, Transfer


def gathers_by_need(problem: Problem) -> list[int]:
    """Indices of the gathers in the order in which they are needed."""
    indices = [i for i, t in enumerate(problem.transfers) if t.is_gather]
    return sorted(indices, key=lambda i: (problem.transfers[i].need, i))


def place_just_in_time(problem: Problem, limits: Limits) -> dict[int, int]:
    """The gap of each gather, as late as hides it.

    Args:
        problem: of one graph.
        limits: resolved for it.

    Returns:
        Gap by index of the transfer.
    """
    starts = problem.segment_starts()
    clock = list(accumulate(problem.compute_ms, initial=0.0))
    times = [clock[gap] for gap in starts]
    begin_by: dict[str, float] = {}
    wanted: dict[int, int] = {}
    for index in reversed(gathers_by_need(problem)):
        transfer = problem.transfers[index]
        latest = min(clock[transfer.need], begin_by.get(transfer.link, clock[transfer.need]))
        latest -= transfer.ms * limits.margin
        begin_by[transfer.link] = latest
        in_time = starts[max(0, bisect_right(times, latest) - 1)] if starts else 0
        wanted[index] = max(transfer.ready, min(in_time, _one_unit_ahead(starts, transfer)))
    return _in_order(problem, _fitted(problem, limits, wanted))


def _fitted(problem: Problem, limits: Limits, wanted: dict[int, int]) -> dict[int, int]:
    """The gaps wanted, or later ones where memory or places run out; first needed, first served."""
    room = Room(problem, limits)
    gaps: dict[int, int] = {}
    for index in gathers_by_need(problem):
        transfer = problem.transfers[index]
        gaps[index] = room.earliest(transfer, wanted[index])
        room.take(transfer, gaps[index])
    return gaps


def place_as_early_as_possible(problem: Problem, limits: Limits) -> dict[int, int]:
    """The gap of each gather, as early as dependencies, memory and places allow."""
    wanted = {i: problem.transfers[i].ready for i in gathers_by_need(problem)}
    return _in_order(problem, _fitted(problem, limits, wanted))


def _one_unit_ahead(starts: list[int], transfer: Transfer) -> int:
    """Start of the last unit's compute that ends before the gather is needed."""
    position = bisect_right(starts, max(transfer.need - 1, 0)) - 1
    if position > 0 and starts[position] == transfer.need:
        position -= 1
    return starts[position] if starts else 0


def _in_order(problem: Problem, gaps: dict[int, int]) -> dict[int, int]:
    """Gaps in which no gather overtakes one that is needed earlier."""
    last: dict[str, int] = {}
    for index in gathers_by_need(problem):
        transfer = problem.transfers[index]
        gaps[index] = min(max(gaps[index], last.get(transfer.link, 0)), transfer.need)
        last[transfer.link] = gaps[index]
    return gaps
