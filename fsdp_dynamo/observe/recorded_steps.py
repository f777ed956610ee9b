"""The steps of a recording: what ran in each, on a clock that stands still while code is compiled.

A step is an outermost forward with its backward (``steps.Step``). Page, explanation, trace and
picture all show what ``steps_in`` finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_dynamo.dynamo.artifacts import Compilation
from fsdp_dynamo.events import COLLECTIVE_KINDS, COMPUTE_KINDS, Event
from fsdp_dynamo.observe.explanation import Cut, MeasuredEvent
from fsdp_dynamo.steps import Model, Step
from graph_passes.report import GraphReport, report_of
from graph_passes.scheduling.planner import Planned

_MIN_DISTANCE = 0.02
"""Cuts that are closer, as a fraction of the step, are shown as one."""


@dataclass(frozen=True)
class RecordedStep:
    """Events and compilations of a step.

    Attributes:
        events: its collectives and compute, in order of issue.
        compilations: what was compiled between its first and its last moment, without overlap.
    """

    events: Sequence[Event]
    compilations: Sequence[Compilation]

    @property
    def is_graph_mode(self) -> bool:
        """Whether a compiled graph issued one of its collectives."""
        return any(event.source == "graph" for event in self.events)

    @property
    def has_backward(self) -> bool:
        """Whether a backward has begun."""
        return any(event.phase == "backward" for event in self.events)

    @property
    def units(self) -> list[str]:
        """FQNs of the units that ran, in order."""
        return [*dict.fromkeys(event.unit for event in self.events)]

    @property
    def graphs(self) -> Counter[str]:
        """By digest of the planned graphs that ran, in order, the number of their collectives."""
        return Counter(e.graph for e in self.events if e.graph and e.kind in COLLECTIVE_KINDS)

    def measured(self) -> tuple[MeasuredEvent, ...]:
        """Its events, timed without compilation."""
        return tuple(self._measured(event) for event in self.events)

    def cuts(self) -> tuple[Cut, ...]:
        """Where compilation was taken out."""
        total_ms = self._ms(_end_of(self.events))
        found: list[Cut] = []
        for one in self.compilations:
            cut = Cut(self._ms(one.begin_ns), (one.end_ns - one.begin_ns) / 1e6)
            if found and cut.at_ms - found[-1].at_ms <= _MIN_DISTANCE * total_ms:
                found[-1] = Cut(found[-1].at_ms, found[-1].ms + cut.ms)
            else:
                found.append(cut)
        return tuple(found)

    def _ms(self, moment_ns: int) -> float:
        """Milliseconds from the start of the step, without compilation before."""
        compiled = sum(
            min(one.end_ns, moment_ns) - one.begin_ns
            for one in self.compilations
            if one.begin_ns < moment_ns
        )
        return (moment_ns - compiled - _begin_of(self.events)) / 1e6

    def _measured(self, event: Event) -> MeasuredEvent:
        return MeasuredEvent(
            unit=event.unit,
            kind=event.kind if event.kind in COLLECTIVE_KINDS else "compute",
            phase=event.phase,
            num_bytes=event.num_bytes,
            issued_ms=self._ms(event.issued_ns),
            done_ms=self._ms(_end_of([event])),
            exposed_ms=event.exposed_ns / 1e6,
            message_bytes=event.message_bytes,
            is_planned=event.source == "graph",
        )


def recorded_step(log: Iterable[Event], compilations: Iterable[Compilation]) -> RecordedStep:
    """All events of a recording as one step.

    Args:
        log: the recorded events.
        compilations: those of the same time.
    """
    events = [e for e in log if e.kind in COLLECTIVE_KINDS or e.kind in COMPUTE_KINDS]
    begin, end = _begin_of(events), _end_of(events)
    clipped = (Compilation(max(c.begin_ns, begin), min(c.end_ns, end)) for c in compilations)
    return RecordedStep(events, [one for one in clipped if one.begin_ns < one.end_ns])


def steps_in(
    log: Iterable[Event], compilations: Sequence[Compilation]
) -> dict[Model, list[RecordedStep]]:
    """The steps of each model in a recording, in the order in which they began.

    Args:
        log: the recorded events; those outside of steps are left out.
        compilations: those of the same time.
    """
    by_step: dict[Step, list[Event]] = {}
    for event in log:
        if event.step is not None:
            by_step.setdefault(event.step, []).append(event)
    found: dict[Model, list[RecordedStep]] = {}
    for step, events in by_step.items():
        recorded = recorded_step(events, compilations)
        if recorded.events:
            found.setdefault(step.model, []).append(recorded)
    return found


def reports_of(plans: Iterable[Planned], step: RecordedStep) -> tuple[GraphReport, ...]:
    """Reports of the plans of the graphs that ran in a step, once a run, in order of first runs."""
    by_digest = {planned.plan.short_digest: planned for planned in plans}
    found: list[GraphReport] = []
    for digest, num_events in step.graphs.items():
        if digest in by_digest:
            report = report_of(by_digest[digest])
            found += [report] * max(1, num_events // max(1, len(report.transfers)))
    return tuple(found)


def _begin_of(events: Sequence[Event]) -> int:
    return min((event.issued_ns for event in events), default=0)


def _end_of(events: Sequence[Event]) -> int:
    """When the last of them ended; those in flight, when they began."""
    return max((max(event.waited_ns, event.issued_ns) for event in events), default=0)
