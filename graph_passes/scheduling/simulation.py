"""Simulation of a schedule: one pass over its steps on a clock.

A link carries one transfer after the other, in order of issue: NCCL's streams and a pair of sockets
do that, and sharing the bandwidth ends at the same time for the last transfer. Issues cost nothing;
a wait blocks until its transfer has arrived. A transfer with a format is encoded by the compute
before its issue and decoded after its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from graph_passes.scheduling.problem import Problem, Transfer


@dataclass(frozen=True)
class Placement:
    """Place of a transfer.

    Attributes:
        transfer: index into ``Problem.transfers``.
        issue: gap of the issue.
        wait: gap of the wait.
    """

    transfer: int
    issue: int
    wait: int


Schedule = tuple[Placement, ...]
"""One placement a transfer. Within a gap, issues are in this order and come before waits."""


@dataclass(frozen=True)
class Timing:
    """Times of one transfer, in milliseconds from the start of the graph."""

    issued_ms: float
    begin_ms: float
    end_ms: float
    wait_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Timeline:
    """Result of a simulation.

    Attributes:
        total_ms: from the first step to the last wait.
        timings: by index of the transfer.
        step_begin_ms: start of every step.
    """

    total_ms: float
    timings: dict[int, Timing]
    step_begin_ms: tuple[float, ...]

    @property
    def exposed_ms(self) -> float:
        """Time in which nothing was computed."""
        return sum(timing.exposed_ms for timing in self.timings.values())


def by_gap(schedule: Schedule, num_steps: int) -> Iterator[tuple[list[Placement], list[Placement]]]:
    """Yield for each gap the placements that are issued in it, and those that are waited for."""
    issues: list[list[Placement]] = [[] for _ in range(num_steps + 1)]
    waits: list[list[Placement]] = [[] for _ in range(num_steps + 1)]
    for placement in schedule:
        issues[placement.issue].append(placement)
        waits[placement.wait].append(placement)
    return zip(issues, waits, strict=True)


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Run a schedule on the clock."""
    now = 0.0
    free: dict[str, float] = {}
    spans: dict[int, tuple[float, float, float]] = {}
    timings: dict[int, Timing] = {}
    begins = []
    for gap, (issues, waits) in enumerate(by_gap(schedule, problem.num_steps)):
        for placement in issues:
            transfer = problem.transfers[placement.transfer]
            now += transfer.encode_ms
            begin = max(now, free.get(transfer.link, 0.0))
            free[transfer.link] = begin + transfer.ms
            spans[placement.transfer] = (now, begin, begin + transfer.ms)
        for placement in waits:
            issued, begin, end = spans[placement.transfer]
            exposed = max(0.0, end - now)
            timings[placement.transfer] = Timing(issued, begin, end, now, exposed)
            now += exposed + problem.transfers[placement.transfer].decode_ms
        if gap < problem.num_steps:
            begins.append(now)
            now += problem.compute_ms[gap]
    return Timeline(now, timings, tuple(begins))


def total_ms(problem: Problem, schedule: Schedule) -> float:
    """Return ``simulate(...).total_ms`` without the details: searches call this often."""
    events = sorted(
        [(p.issue, 0, i, p.transfer) for i, p in enumerate(schedule)]
        + [(p.wait, 1, i, p.transfer) for i, p in enumerate(schedule)]
    )
    starts = problem.step_starts_ms
    stalled = 0.0
    free: dict[str, float] = {}
    ends: dict[int, float] = {}
    for gap, is_wait, _, index in events:
        transfer = problem.transfers[index]
        now = starts[gap] + stalled
        if is_wait:
            stalled += max(0.0, ends[index] - now) + transfer.decode_ms
        else:
            stalled += transfer.encode_ms
            ends[index] = max(now + transfer.encode_ms, free.get(transfer.link, 0.0)) + transfer.ms
            free[transfer.link] = ends[index]
    return starts[-1] + stalled


def live_bytes(problem: Problem, schedule: Schedule) -> list[int]:
    """Return the bytes alive during each step of a schedule."""
    change = [0] * (problem.num_steps + 1)
    for placement in schedule:
        transfer = problem.transfers[placement.transfer]
        begin, end = (
            (placement.issue, transfer.need)
            if transfer.is_gather
            else (transfer.ready, placement.wait)
        )
        change[begin] += transfer.held_bytes
        change[end] -= transfer.held_bytes
    extra = list(accumulate(change))
    return [base + more for base, more in zip(problem.base_bytes, extra, strict=False)]


def peak_bytes(problem: Problem, schedule: Schedule) -> int:
    """Return the maximum of ``live_bytes``; 0 for a graph without steps."""
    return max(live_bytes(problem, schedule), default=0)


def unscheduled(problem: Problem) -> Schedule:
    """Issue every gather where it is needed, wait for every reduction at once."""
    return tuple(
        Placement(i, t.need, t.need) if t.is_gather else Placement(i, t.ready, t.ready)
        for i, t in enumerate(problem.transfers)
    )


def lower_bound_ms(problem: Problem) -> float:
    """Return a time that no schedule beats: compute and what surrounds it, or the busiest link.

    Encoding and decoding may overlap with the first or the last transfer.
    """
    compute = sum(problem.compute_ms)
    coding = sum(transfer.encode_ms + transfer.decode_ms for transfer in problem.transfers)
    first = min((t.ms for t in problem.transfers if t.is_gather and t.need == 0), default=0.0)
    last = min(
        (t.ms for t in problem.transfers if not t.is_gather and t.ready == problem.num_steps),
        default=0.0,
    )
    busy: dict[str, float] = {}
    for transfer in problem.transfers:
        busy[transfer.link] = busy.get(transfer.link, 0.0) + transfer.ms
    return max(compute + max(first + last, coding), max(busy.values(), default=0.0))


# -- limits ----------------------------------------------------------------------------------------
# Limits of a schedule: memory, and the number of collectives in flight.


class BudgetError(ValueError):
    """A memory budget that not even the unscheduled graph keeps."""


def too_small(least_bytes: int, budget_bytes: int | None, where: str = "") -> str:
    """Return the message of a ``BudgetError``."""
    return (
        f"memory_budget_bytes: expected at least {least_bytes:,} for this graph{where}, got "
        f"{budget_bytes or 0:,}. Raise the budget, wrap smaller units, or checkpoint activations."
    )


@dataclass(frozen=True)
class Limits:
    """Bounds of a schedule.

    Attributes:
        memory_budget_bytes: most bytes alive during any step. ``None``: the unscheduled graph's
            peak, plus the largest unsharded buffer, plus the larger of that buffer and the largest
            unsharded gradient: a unit is gathered ahead while the gradient of another is being
            reduced.
        max_in_flight: most gathers issued ahead of their use, and most reductions not yet waited
            for; 1 or more.
        margin: factor on a gather's modelled duration when its place is chosen, so that a model
            that is somewhat wrong still hides it.

    Raises:
        ValueError: a number outside those bounds.
    """

    memory_budget_bytes: int | None = None
    max_in_flight: int = 3
    margin: float = 1.5

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected 1 or more, got {self.max_in_flight!r}")
        if self.margin < 1:
            raise ValueError(f"margin: expected 1 or more, got {self.margin!r}")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes <= 0:
            raise ValueError(
                f"memory_budget_bytes: expected more than 0, got {self.memory_budget_bytes!r}"
            )

    def resolved(self, problem: Problem) -> Limits:
        """Return limits with the budget of a problem filled in.

        Raises:
            BudgetError: the unscheduled graph does not keep the budget.
        """
        least = peak_bytes(problem, unscheduled(problem))
        if self.memory_budget_bytes is None:
            gathers = [t.held_bytes for t in problem.transfers if t.is_gather]
            gradients = [t.payload_bytes for t in problem.transfers if not t.is_gather]
            ahead = max(gathers, default=0)
            on_its_way = max([ahead, *gradients]) if gathers else 0
            return replace(self, memory_budget_bytes=max(1, least + ahead + on_its_way))
        if self.memory_budget_bytes < least:
            step = live_bytes(problem, unscheduled(problem)).index(least)
            where = f" without any prefetch (its peak is in unit '{problem.units[step]}')"
            raise BudgetError(too_small(least, self.memory_budget_bytes, where))
        return self


def is_within(problem: Problem, schedule: Schedule, limits: Limits) -> bool:
    """Whether a schedule keeps resolved limits."""
    budget = limits.memory_budget_bytes
    if budget is not None and peak_bytes(problem, schedule) > budget:
        return False
    return max(_in_flight(problem, schedule), default=0) <= limits.max_in_flight


def _in_flight(problem: Problem, schedule: Schedule) -> list[int]:
    """Return for each step the larger of the numbers of gathers and reductions in flight."""
    counts = {True: [0] * (problem.num_steps + 1), False: [0] * (problem.num_steps + 1)}
    for placement in schedule:
        of_kind = counts[problem.transfers[placement.transfer].is_gather]
        of_kind[placement.issue] += 1
        of_kind[placement.wait] -= 1
    gathers = reductions = 0
    result = []
    for more_gathers, more_reductions in zip(counts[True], counts[False], strict=True):
        gathers += more_gathers
        reductions += more_reductions
        result.append(max(gathers, reductions))
    return result


class Room:
    """Memory and places in flight left at each step while gathers are being placed."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        budget = limits.memory_budget_bytes
        assert budget is not None  # resolved
        self._free = [budget - base for base in problem.base_bytes]
        self._places = [limits.max_in_flight] * problem.num_steps

    def earliest(self, transfer: Transfer, wanted: int) -> int:
        """Return the first gap, from ``wanted`` on, from which the transfer fits until its need."""
        for step in range(transfer.need - 1, wanted - 1, -1):
            if self._free[step] < transfer.held_bytes or self._places[step] < 1:
                return step + 1
        return wanted

    def take(self, transfer: Transfer, gap: int) -> None:
        """Reserve what the transfer holds from a gap to its need."""
        for step in range(gap, transfer.need):
            self._free[step] -= transfer.held_bytes
            self._places[step] -= 1


__all__ = ["BudgetError", "Limits"]
