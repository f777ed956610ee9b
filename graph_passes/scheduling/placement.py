"""Places of collectives: gathers ahead of their use, waits late, and a local search."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import (
    Limits,
    Placement,
    Room,
    Schedule,
    is_within,
    live_bytes,
    lower_bound_ms,
    total_ms,
)

# -- prefetch --------------------------------------------------------------------------------------
# Prefetch: all-gathers are issued ahead of their use.
#
# Before::
#
#     ag(k) wait(k) compute(k) ag(k+1) wait(k+1) compute(k+1)
#
# After::
#
#     ag(k) ag(k+1) wait(k) compute(k) wait(k+1) compute(k+1)
#
# Gathers are placed from the end of the graph. A gather must begin so early that it and all gathers
# behind it on the link arrive in time (times a margin), and at least one unit ahead. It is issued
# at the last change of units before that, or later if memory or places in flight run out.


def gathers_by_need(problem: Problem) -> list[int]:
    """Return the indices of the gathers in the order in which they are needed."""
    indices = [i for i, t in enumerate(problem.transfers) if t.is_gather]
    return sorted(indices, key=lambda i: (problem.transfers[i].need, i))


def place_just_in_time(problem: Problem, limits: Limits) -> dict[int, int]:
    """Return the gap of each gather, as late as hides it; ``limits`` are resolved."""
    starts = problem.segment_starts()
    clock = problem.step_starts_ms
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
    """Return the wanted gaps, or later ones if there is no room; first needed, first served."""
    room = Room(problem, limits)
    gaps: dict[int, int] = {}
    for index in gathers_by_need(problem):
        transfer = problem.transfers[index]
        gaps[index] = room.earliest(transfer, wanted[index])
        room.take(transfer, gaps[index])
    return gaps


def place_as_early_as_possible(problem: Problem, limits: Limits) -> dict[int, int]:
    """Return the gap of each gather, as early as dependencies, memory and places allow."""
    wanted = {i: problem.transfers[i].ready for i in gathers_by_need(problem)}
    return _in_order(problem, _fitted(problem, limits, wanted))


def _one_unit_ahead(starts: list[int], transfer: Transfer) -> int:
    """Return the start of the last unit's compute that ends before the gather is needed."""
    position = bisect_right(starts, max(transfer.need - 1, 0)) - 1
    if position > 0 and starts[position] == transfer.need:
        position -= 1
    return starts[position] if starts else 0


def _in_order(problem: Problem, gaps: dict[int, int]) -> dict[int, int]:
    """Delay gathers so that none overtakes a gather that is needed earlier."""
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
# Until its wait, a reduction holds the unsharded gradient and what it receives. When memory or
# places in flight run out, the oldest reduction is waited for; all are at the end.


def place_waits(problem: Problem, gather_gaps: dict[int, int], limits: Limits) -> dict[int, int]:
    """Return the gap of each reduction's wait, given the gaps of the gathers' issues."""
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


# -- local search ----------------------------------------------------------------------------------
# Local search: try every transfer in other gaps and other orders on the link; keep the fastest.
#
# A placement rule looks in one direction: gathers against compute, reductions against memory. On a
# shared link they delay each other, and this search on the simulated clock finds the better order.
# It is bounded, deterministic, and never returns a slower schedule than it was given.


_MAX_SWEEPS = 4
_MAX_TRIALS = 6000
_REACH = 8
"""A transfer is tried in gaps up to this far from its place, and where the unit changes."""
_GAIN = 1e-3
"""A change must save this part of the time: otherwise the schedule stays."""
_NEAR = 1.005
"""This close to the lower bound the search ends: the cost model errs by more."""


def nothing_to_gain(problem: Problem, schedules: Iterable[Schedule]) -> bool:
    """Whether one of the schedules is close to the lower bound."""
    return any(total_ms(problem, schedule) <= _good_ms(problem) for schedule in schedules)


def _good_ms(problem: Problem) -> float:
    return lower_bound_ms(problem) * _NEAR


def refine(problem: Problem, schedule: Schedule, limits: Limits) -> Schedule:
    """Return a schedule within the limits that is at least as fast as the given one."""
    best, best_ms = schedule, total_ms(problem, schedule)
    good_ms = _good_ms(problem)
    trials = 0
    for _ in range(_MAX_SWEEPS):
        before_ms = best_ms
        for index in range(len(problem.transfers)):
            for other in _neighbours(problem, best, index, limits):
                trials += 1
                if trials > _MAX_TRIALS or best_ms <= good_ms:
                    return best
                ms = total_ms(problem, other)
                if ms < best_ms * (1 - _GAIN) and is_within(problem, other, limits):
                    best, best_ms = other, ms
        if best_ms >= before_ms:
            break
    return best


def _neighbours(
    problem: Problem, schedule: Schedule, index: int, limits: Limits
) -> Iterator[Schedule]:
    """Yield schedules in which one transfer is elsewhere."""
    position = next(i for i, p in enumerate(schedule) if p.transfer == index)
    placement, transfer = schedule[position], problem.transfers[index]
    rest = schedule[:position] + schedule[position + 1 :]
    for moved in _placements(problem, placement, transfer):
        same_gap = [
            i
            for i, p in enumerate(rest)
            if p.issue == moved.issue and problem.transfers[p.transfer].link == transfer.link
        ]
        for slot in {same_gap[0], same_gap[-1] + 1} if same_gap else {position}:
            other = (*rest[:slot], moved, *rest[slot:])
            yield other
            if not is_within(problem, other, limits):
                yield from _making_room(problem, other, moved, limits)


def _making_room(
    problem: Problem, schedule: Schedule, moved: Placement, limits: Limits
) -> Iterator[Schedule]:
    """Yield schedules with one move, and room for it.

    Either all waits of reductions are as early as memory needs, or one other transfer is shortened.
    """
    gathers = {p.transfer: p.issue for p in schedule if problem.transfers[p.transfer].is_gather}
    waits = place_waits(problem, gathers, limits)
    yield tuple(
        replace(p, wait=max(p.issue, waits[p.transfer])) if p.transfer in waits else p
        for p in schedule
    )
    begin, end = moved.issue, max(moved.wait, moved.issue + 1)
    for position, other in enumerate(schedule):
        if other.transfer == moved.transfer or other.wait <= begin or other.issue >= end:
            continue
        if problem.transfers[other.transfer].is_gather:
            shorter = replace(other, issue=min(end, other.wait))
        else:
            shorter = replace(other, wait=max(begin, other.issue))
        yield (*schedule[:position], shorter, *schedule[position + 1 :])


def _placements(problem: Problem, placement: Placement, transfer: Transfer) -> Iterator[Placement]:
    within = range(transfer.ready, transfer.need + 1)
    near = {g + d for g in (placement.issue, placement.wait) for d in range(-_REACH, _REACH + 1)}
    gaps = {g for g in (*problem.segment_starts(), *near) if g in within} | {within[0], within[-1]}
    for gap in sorted(gaps):
        if transfer.is_gather:
            yield replace(placement, issue=gap)
        else:
            if gap >= placement.issue:
                yield replace(placement, wait=gap)
            if gap <= placement.wait:
                yield replace(placement, issue=gap)
