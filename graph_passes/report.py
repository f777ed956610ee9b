"""Report on one graph's schedule: times by collective and by unit, with reasons.

All times are simulated milliseconds from the start of the graph (see ``simulate``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graph_passes.scheduling.binding_constraints import ConstraintFinder, Reason, with_launches
from graph_passes.scheduling.planner import Planned
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import (
    BudgetError,
    Limits,
    Placement,
    Timeline,
    lower_bound_ms,
    total_ms,
    unscheduled,
)


@dataclass(frozen=True)
class TransferReport:
    """Times, move and reason of one collective.

    Attributes:
        unit, kind, ordinal: from its mark.
        group: name of its process group.
        link: name of the link, which carries one collective at a time.
        launch: collectives with the same number are launched together.
        wire_bytes: bytes that this rank sends.
        tensor_bytes: bytes that it would send without a format.
        wire: format in which it travels, as text; ``""`` for none.
        coding_ms: compute time of encoding and decoding.
        exposed_without_ms: exposed time in the schedule without formats, where the planner chose
            whether it has one; else ``None``.
        ms: duration when it has the link to itself.
        issued_ms, begin_ms, end_ms: times of issue, and of start and end on its link.
        wait_ms: time of the wait for its result.
        exposed_ms: time in which nothing is computed because of it.
        moved_steps: steps of compute between its place and its unscheduled place.
        moved_across: units of these steps.
        reason: constraint that kept it from moving further (see
            ``binding_constraints.Constraint``).
        bytes_short: excess over the budget, if that is the reason; else 0.
        behind: unit of the collective ahead on the link, where that matters.
        saves_ms: time that another move would save, if it is not planned; else 0.
    """

    unit: str
    kind: str
    ordinal: int
    group: str
    link: str
    launch: int
    wire_bytes: int
    ms: float
    issued_ms: float
    begin_ms: float
    end_ms: float
    wait_ms: float
    exposed_ms: float
    moved_steps: int
    moved_across: tuple[str, ...]
    reason: Reason
    bytes_short: int = 0
    behind: str | None = None
    saves_ms: float = 0.0
    tensor_bytes: int = 0
    wire: str = ""
    coding_ms: float = 0.0
    exposed_without_ms: float | None = None


@dataclass(frozen=True)
class UnitReport:
    """Sums over a unit's compute and collectives in one graph.

    Attributes:
        unit: FQN, ``""`` for the root.
        compute_ms: time of its steps of compute.
        communication_ms: time of its collectives, each with the link to itself.
        exposed_ms: exposed time of its collectives.
        wire_bytes: bytes that this rank sends for it.
    """

    unit: str
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    wire_bytes: int


@dataclass(frozen=True)
class ComputeSpan:
    """Span in which one unit computes without interruption.

    Attributes:
        unit: FQN, ``""`` for the root.
        begin_ms, end_ms: start and end, from the start of the graph.
    """

    unit: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class GraphReport:
    """Times, memory and collectives of one graph.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        compute_ms, communication_ms, exposed_ms: sums over the units.
        bound_ms: no schedule is faster.
        simulated_ms: time of the schedule.
        unscheduled_ms: time of the unscheduled graph, with every gather issued where it is needed
            and every reduction waited for at once.
        peak_bytes: predicted peak of the graph as it runs, on top of what outlives a step (shards,
            optimizer state); ``None`` without a prediction.
        budget_bytes: the planner's memory limit, if any.
        max_in_flight: limit on the number of collectives in flight.
        transfers: in order of issue.
        units: in order of their compute.
        spans: compute, in order.
    """

    phase: str
    compute_ms: float
    communication_ms: float
    exposed_ms: float
    bound_ms: float
    simulated_ms: float
    unscheduled_ms: float
    peak_bytes: int | None
    budget_bytes: int | None
    max_in_flight: int
    transfers: tuple[TransferReport, ...]
    units: tuple[UnitReport, ...]
    spans: tuple[ComputeSpan, ...]


def report_of(planned: Planned) -> GraphReport:
    """Return the report on the schedule of one graph."""
    schedule = planned.schedule
    launches = {
        placement.transfer: transfer.launch
        for placement, transfer in zip(schedule, planned.plan.transfers, strict=True)
    }
    problem = with_launches(planned.problem, schedule, launches)
    limits = _resolved(planned)
    finder = ConstraintFinder(problem, schedule, launches, limits)
    timeline = finder.timeline
    ordered = sorted(schedule, key=lambda p: p.issue)
    transfers = tuple(
        _transfer(finder, placement, planned.exposed_without_ms) for placement in ordered
    )
    has_profile = any(problem.base_bytes)
    return GraphReport(
        phase=planned.plan.phase,
        compute_ms=sum(problem.compute_ms),
        communication_ms=sum(t.ms for t in problem.transfers),
        exposed_ms=timeline.exposed_ms,
        bound_ms=lower_bound_ms(problem),
        simulated_ms=timeline.total_ms,
        unscheduled_ms=total_ms(planned.problem, unscheduled(planned.problem)),
        peak_bytes=planned.peak_bytes,
        budget_bytes=limits.memory_budget_bytes if has_profile else None,
        max_in_flight=limits.max_in_flight,
        transfers=transfers,
        units=_units(problem, transfers),
        spans=_spans(problem, timeline),
    )


def _resolved(planned: Planned) -> Limits:
    """Return the limits in force; a given plan need not keep the budget."""
    try:
        return planned.options.limits.resolved(planned.problem)
    except BudgetError:
        return planned.options.limits


def _transfer(
    finder: ConstraintFinder, placement: Placement, exposed_without_ms: Sequence[float]
) -> TransferReport:
    transfer = finder.problem.transfers[placement.transfer]
    timing = finder.timeline.timings[placement.transfer]
    constraint = finder.constraint_of(placement.transfer)
    steps = _moved(transfer, placement)
    may_choose = bool(exposed_without_ms) and transfer.mark.has_optional_format
    return TransferReport(
        unit=transfer.mark.unit,
        kind=transfer.mark.kind,
        ordinal=transfer.mark.ordinal,
        group=transfer.group,
        link=transfer.link,
        launch=finder.launches[placement.transfer],
        wire_bytes=transfer.wire_bytes,
        ms=transfer.ms,
        issued_ms=timing.issued_ms,
        begin_ms=timing.begin_ms,
        end_ms=timing.end_ms,
        wait_ms=timing.wait_ms,
        exposed_ms=timing.exposed_ms,
        moved_steps=len(steps),
        moved_across=tuple(dict.fromkeys(finder.problem.units[step] for step in steps)),
        reason=constraint.reason,
        bytes_short=constraint.bytes_short,
        behind=constraint.behind,
        saves_ms=constraint.saves_ms,
        tensor_bytes=transfer.tensor_bytes or transfer.wire_bytes,
        wire=transfer.wire,
        coding_ms=transfer.encode_ms + transfer.decode_ms,
        exposed_without_ms=exposed_without_ms[placement.transfer] if may_choose else None,
    )


def _moved(transfer: Transfer, placement: Placement) -> range:
    """Return the steps between a placement and the unscheduled place of its transfer."""
    if transfer.is_gather:
        return range(placement.issue, transfer.need)
    return range(transfer.ready, placement.wait)


def _units(problem: Problem, transfers: tuple[TransferReport, ...]) -> tuple[UnitReport, ...]:
    names = dict.fromkeys([*problem.units, *(t.unit for t in transfers)])
    reports = []
    for name in names:
        compute = sum(
            ms for ms, unit in zip(problem.compute_ms, problem.units, strict=True) if unit == name
        )
        own = [t for t in transfers if t.unit == name]
        communication = sum(t.ms for t in own)
        exposed = sum(t.exposed_ms for t in own)
        sent = sum(t.wire_bytes for t in own)
        reports.append(UnitReport(name, compute, communication, exposed, sent))
    return tuple(reports)


def _spans(problem: Problem, timeline: Timeline) -> tuple[ComputeSpan, ...]:
    """Return spans of compute; steps of one unit without a wait in between are merged."""
    spans: list[ComputeSpan] = []
    for unit, begin, ms in zip(
        problem.units, timeline.step_begin_ms, problem.compute_ms, strict=True
    ):
        last = spans[-1] if spans else None
        if last is not None and last.unit == unit and begin - last.end_ms < 1e-9:
            spans[-1] = ComputeSpan(unit, last.begin_ms, begin + ms)
        elif ms > 0:
            spans.append(ComputeSpan(unit, begin, begin + ms))
    return tuple(spans)


__all__ = ["ComputeSpan", "GraphReport", "TransferReport", "UnitReport", "report_of"]
