"""Binding constraints: why each collective of a schedule did not move further.

The next move is tried, and the constraint that it violates is the reason. An all-gather moves
earlier by one unit's compute, the wait of a reduction later by one. Collectives of a launch move
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import (
    Limits,
    Placement,
    Schedule,
    is_within,
    peak_bytes,
    simulate,
)

Reason = Literal["hidden", "dependency", "memory", "in flight", "order", "bandwidth", "not planned"]

_EPSILON_MS = 1e-6


@dataclass(frozen=True)
class Constraint:
    """The constraint that keeps a collective from a better place.

    Attributes:
        reason: ``"hidden"``: the collective exposes nothing. ``"dependency"``: its input is not
            ready earlier, or its result is needed. ``"memory"``: the move would exceed the budget.
            ``"in flight"``: too many collectives would be in flight. ``"order"``: it would overtake
            another one on its link and gain nothing. ``"bandwidth"``: the link is busy, so the move
            would gain nothing. ``"not planned"``: the move is allowed and would save time, but an
            option or a given plan rules it out, or the search ended before it.
        bytes_short: excess over the budget; 0 for other reasons.
        behind: unit of the collective ahead on the link, where that matters.
        saves_ms: time that the move would save; 0 unless it is not planned.
    """

    reason: Reason
    bytes_short: int = 0
    behind: str | None = None
    saves_ms: float = 0.0


def with_launches(problem: Problem, schedule: Schedule, launches: Mapping[int, int]) -> Problem:
    """Return the problem with one latency per launch, at its first transfer.

    Args:
        problem: problem of single transfers.
        schedule: order of the launches.
        launches: launch number by index of the transfer.
    """
    transfers = list(problem.transfers)
    seen: set[int] = set()
    for placement in schedule:
        index = placement.transfer
        if launches[index] in seen:
            one = transfers[index]
            transfers[index] = replace(one, ms=max(0.0, one.ms - one.latency_ms), latency_ms=0.0)
        seen.add(launches[index])
    return replace(problem, transfers=tuple(transfers))


class ConstraintFinder:
    """Finder of binding constraints, by trial moves in one schedule.

    Args:
        problem: from ``with_launches``.
        schedule: the decided schedule.
        launches: launch number by index of the transfer.
        limits: limits that are resolved for the problem.
    """

    def __init__(
        self, problem: Problem, schedule: Schedule, launches: Mapping[int, int], limits: Limits
    ) -> None:
        self.problem = problem
        self.schedule = schedule
        self.launches = launches
        self.limits = limits
        self.timeline = simulate(problem, schedule)

    def constraint_of(self, index: int) -> Constraint:
        """Return the constraint that keeps transfer number ``index`` in its place."""
        if self.timeline.timings[index].exposed_ms <= _EPSILON_MS:
            return Constraint("hidden")
        return self._gather(index) if self._transfer(index).is_gather else self._reduction(index)

    def _transfer(self, index: int) -> Transfer:
        return self.problem.transfers[index]

    def _members(self, index: int) -> list[Placement]:
        """Return the placements of a transfer's launch, in order."""
        return [p for p in self.schedule if self.launches[p.transfer] == self.launches[index]]

    def _gather(self, index: int) -> Constraint:
        members = self._members(index)
        ready = max(self._transfer(p.transfer).ready for p in members)
        issue = members[0].issue
        ahead = self._ahead(members[0])
        queued = self._is_queued(members[0])
        if issue <= ready:
            if queued:
                return Constraint("bandwidth", behind=self._unit(ahead))
            return Constraint("dependency")
        earlier = [gap for gap in self.problem.segment_starts() if gap < issue]
        target = max([ready, *earlier[-1:]])
        overtakes = ahead is not None and ahead.issue == issue
        if ahead is not None and not overtakes:
            target = max(target, ahead.issue)  # right behind it on the link
        found = self._try(index, self._issued_at(members, target))
        if found.reason != "bandwidth":
            return found
        return Constraint("order" if overtakes else "bandwidth", behind=self._unit(ahead))

    def _reduction(self, index: int) -> Constraint:
        members = self._members(index)
        need = min(self._transfer(p.transfer).need for p in members)
        ready = max(self._transfer(p.transfer).ready for p in members)
        wait, issue = members[0].wait, members[0].issue
        if wait < need:
            later = [gap for gap in self.problem.segment_starts() if gap > wait]
            target = min([need, *later[:1]])
            moved = {p.transfer: replace(p, wait=target) for p in members}
            return self._try(index, tuple(moved.get(p.transfer, p) for p in self.schedule))
        ahead = self._ahead(members[0])
        if issue > ready:
            found = self._try(index, self._issued_at(members, ready))
            if found.reason != "bandwidth":
                return found
            return Constraint("order", behind=self._unit(ahead))
        if self._is_queued(members[0]):
            return Constraint("bandwidth", behind=self._unit(ahead))
        return Constraint("dependency")

    def _try(self, index: int, trial: Schedule) -> Constraint:
        """Return the constraint that rules out a trial: memory, number in flight, or no gain."""
        budget = self.limits.memory_budget_bytes
        peak = peak_bytes(self.problem, trial)
        if budget is not None and peak > budget:
            return Constraint("memory", bytes_short=peak - budget)
        if not is_within(self.problem, trial, self.limits):
            return Constraint("in flight")
        saved = self.timeline.total_ms - simulate(self.problem, trial).total_ms
        if saved > _EPSILON_MS:
            return Constraint("not planned", saves_ms=saved)
        return Constraint("bandwidth")

    def _issued_at(self, members: list[Placement], gap: int) -> Schedule:
        """Return the schedule with a launch issued in another gap, after the launches there."""
        taken = {p.transfer for p in members}
        rest = [p for p in self.schedule if p.transfer not in taken]
        last = max((i + 1 for i, p in enumerate(rest) if p.issue <= gap), default=0)
        return (*rest[:last], *(replace(p, issue=gap) for p in members), *rest[last:])

    def _ahead(self, placement: Placement) -> Placement | None:
        """Return the placement right before a launch on the same link, if any."""
        link = self._transfer(placement.transfer).link
        on_link = [p for p in self.schedule if self._transfer(p.transfer).link == link]
        on_link.sort(key=lambda p: p.issue)  # stable: within a gap, the schedule's order
        position = on_link.index(placement)
        return on_link[position - 1] if position else None

    def _is_queued(self, placement: Placement) -> bool:
        """Whether the link is still busy when a launch is issued."""
        timing = self.timeline.timings[placement.transfer]
        return timing.begin_ms > timing.issued_ms + _EPSILON_MS

    def _unit(self, placement: Placement | None) -> str | None:
        return None if placement is None else self._transfer(placement.transfer).mark.unit


__all__ = ["Constraint", "ConstraintFinder", "Reason", "with_launches"]
