"""Local search: try every transfer in other gaps and other orders on the link; keep the fastest.

A placement rule sees one direction at a time: gathers against compute, reductions against memory.
Where both share a link they delay each other, and this search on the simulated clock finds the
better order. It is bounded, deterministic, and never returns anything worse than it was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from graph_passes.scheduling.prefetch import place_waits
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import (
    Limits,
    Placement,
    Schedule,
    is_within,
    lower_bound_ms,
    total_ms,
)

_MAX_SWEEPS = 4
_MAX_TRIALS = 6000
_REACH = 8
"""A transfer is tried in the gaps up to so far from where it is, and where the unit changes."""
_GAIN = 1e-3
"""A change must save this part of the time: ties go to what was there before."""
_NEAR = 1.005
"""So near to the lower bound there is nothing to look for: the cost model errs by more."""


def nothing_to_gain(problem: Problem, schedules: Iterable[Schedule]) -> bool:
    """Whether one of the schedules takes hardly longer than the lower bound."""
    return any(total_ms(problem, schedule) <= _good_ms(problem) for schedule in schedules)


def _good_ms(problem: Problem) -> float:
    return lower_bound_ms(problem) * _NEAR


def refine(problem: Problem, schedule: Schedule, limits: Limits) -> Schedule:
    """A schedule within the limits that is at least as fast as the one given."""
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
    """Schedules in which one transfer is elsewhere."""
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
    """Schedules with one move, and room for it.

    All waits of reductions are as early as memory needs, or one other transfer is shortened.
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
