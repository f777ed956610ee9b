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

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Limits, Placement, Room, live_bytes


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


# -- sink waits ------------------------------------------------------------------------------------
# Sink waits: a reduction is issued as soon as its gradient is ready and waited for late.
#
# Before::
#
#     rs(k) wait(k) compute(k-1) rs(k-1) wait(k-1) compute(k-2) ...
#
# After::
#
#     rs(k) compute(k-1) rs(k-1) compute(k-2) rs(k-2) wait(k) ...
#
# Until its wait a reduction holds the unsharded gradient and what arrives for it. The oldest is
# waited for when memory or places in flight run out, and all at the end.


def place_waits(problem: Problem, gather_gaps: dict[int, int], limits: Limits) -> dict[int, int]:
    """The gap of each reduction's wait.

    Args:
        problem: of one graph.
        gather_gaps: where the gathers are issued.
        limits: resolved for it.

    Returns:
        Gap by index of the transfer.
    """
    budget = limits.memory_budget_bytes
    assert budget is not None  # resolved
    gathers = tuple(Placement(i, gap, problem.transfers[i].need) for i, gap in gather_gaps.items())
    live = live_bytes(problem, gathers)
    begins: list[list[int]] = [[] for _ in range(problem.num_steps + 1)]
    for index, transfer in enumerate(problem.transfers):
        if not transfer.is_gather:
            begins[transfer.ready].append(index)
    in_flight: list[int] = []
    held = 0
    gaps: dict[int, int] = {}
    for gap in range(problem.num_steps + 1):
        in_flight += begins[gap]
        held += sum(problem.transfers[i].held_bytes for i in begins[gap])
        for index in list(in_flight):
            crowded = len(in_flight) > limits.max_in_flight or (
                gap < problem.num_steps and live[gap] + held > budget
            )
            if crowded or problem.transfers[index].need <= gap:
                in_flight.remove(index)
                held -= problem.transfers[index].held_bytes
                gaps[index] = gap
    return gaps
