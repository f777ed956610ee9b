"""Simulation of a schedule: one pass over its steps on a clock.

A link carries one transfer after the other, in order of issue (which is how NCCL's
streams and a pair of sockets behave, and what sharing the bandwidth comes to for the last of them).
Issues cost nothing, a wait blocks until its transfer has arrived. Where a transfer has a format,
what computes encodes it before the issue, and decodes it after the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from graph_passes.scheduling.problem import Problem


@dataclass(frozen=True)
class Placement:
    """Where a transfer goes.

    Attributes:
        transfer: index into ``Problem.transfers``.
        issue: gap of the issue.
        wait: gap of the wait.
    """

    transfer: int
    issue: int
    wait: int


Schedule = tuple[Placement, ...]
"""One placement a transfer. Within a gap, issues follow this order and come before waits."""


@dataclass(frozen=True)
class Timing:
    """Times at which one transfer was under way, in milliseconds from the start of the graph."""

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


def by_gap(gaps: Sequence[tuple[int, Placement]], num_gaps: int) -> list[list[Placement]]:
    """Placements listed by gap, in their order."""
    listed: list[list[Placement]] = [[] for _ in range(num_gaps)]
    for gap, placement in gaps:
        listed[gap].append(placement)
    return listed


def simulate(problem: Problem, schedule: Schedule) -> Timeline:
    """Run a schedule on the clock."""
    issues = by_gap([(p.issue, p) for p in schedule], problem.num_steps + 1)
    waits = by_gap([(p.wait, p) for p in schedule], problem.num_steps + 1)
    now = 0.0
    free: dict[str, float] = {}
    spans: dict[int, tuple[float, float, float]] = {}
    timings: dict[int, Timing] = {}
    begins = []
    for gap in range(problem.num_steps + 1):
        for placement in issues[gap]:
            transfer = problem.transfers[placement.transfer]
            now += transfer.encode_ms
            begin = max(now, free.get(transfer.link, 0.0))
            free[transfer.link] = begin + transfer.ms
            spans[placement.transfer] = (now, begin, begin + transfer.ms)
        for placement in waits[gap]:
            issued, begin, end = spans[placement.transfer]
            exposed = max(0.0, end - now)
            timings[placement.transfer] = Timing(issued, begin, end, now, exposed)
            now += exposed + problem.transfers[placement.transfer].decode_ms
        if gap < problem.num_steps:
            begins.append(now)
            now += problem.compute_ms[gap]
    return Timeline(now, timings, tuple(begins))


def total_ms(problem: Problem, schedule: Schedule) -> float:
    """``simulate(...).total_ms``, without the details: what a search calls often."""
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
    """Bytes alive during each step of a schedule."""
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
    """The most of ``live_bytes``; 0 for a graph without steps."""
    return max(live_bytes(problem, schedule), default=0)


def unscheduled(problem: Problem) -> Schedule:
    """Every gather where it is needed, every reduction waited for at once."""
    return tuple(
        Placement(i, t.need, t.need) if t.is_gather else Placement(i, t.ready, t.ready)
        for i, t in enumerate(problem.transfers)
    )


def lower_bound_ms(problem: Problem) -> float:
    """Time that no schedule beats: compute and what surrounds it, or the busiest link.

    (Encoding and decoding may run beside the first or the last transfer.)
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
