"""``explain``: where the time of a training step goes, and what to change."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import preserve_state
from fsdp_dynamo.dynamo.artifacts import Compilation, record_artifacts, record_compilations
from fsdp_dynamo.events import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    Event,
    Model,
    Step,
    record_events,
    unrecorded,
)
from fsdp_dynamo.graph_mode.planning import record_plans
from fsdp_dynamo.observe import timeline
from fsdp_dynamo.observe.explanation import (
    Cut,
    MeasuredEvent,
    StepReport,
    UnitSummary,
    format_report,
)
from fsdp_dynamo.observe.training_step import (
    Loss,
    graph_breaks_in,
    recompiles_in,
    run_step,
    target_of,
)
from graph_passes.report import GraphReport, report_of
from graph_passes.scheduling.planner import Planned


class Explanation(StepReport):
    """Result of ``explain``: a ``StepReport`` as text, picture and trace."""

    def text(self, details: bool = False) -> str:
        """Format totals, collectives with their reasons, and what to change first.

        Args:
            details: list every unit and every collective, however many there are.
        """
        return format_report(self, details)

    def __str__(self) -> str:
        return self.text()

    def save_picture(self, path: str | Path) -> None:
        """Draw the simulated and the measured step; the suffix of ``path`` selects the format.

        Raises:
            FSDPError: matplotlib is not installed.
        """
        timeline.save_picture(self, path)

    def save_trace(self, path: str | Path) -> None:
        """Write a Chrome trace for ``ui.perfetto.dev``: one process simulated, one measured."""
        trace = {"traceEvents": timeline.trace_events(self), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))


def explain(
    model_or_compiled: object,
    *inputs: Any,
    loss_fn: Loss = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Report where the time of a training step goes; every rank must call it.

    The model is compiled again with its own backend and options, and runs five steps without an
    optimizer update; the last one is reported, without any compilation in it. Each rank gets its
    own report. Gradients, buffers and random number generators are restored, Python objects that
    the forward changes are not. Compiled code is kept, except functions with graph breaks, which
    the next step compiles again. Open recordings do not see the five steps.

    Args:
        model_or_compiled: ``torch.compile`` of a wrapped model, or a wrapped model, which is
            compiled with ``"fsdp_dynamo_aot_eager"``. In hooks mode there is no plan, only
            measurements.
        inputs: positional arguments of the model.
        loss_fn: maps the model's output to a scalar; default: the sum of all floating-point
            outputs.
        options: options of graph mode that replace the compiled model's own.
        kwargs: keyword arguments of the model.

    Raises:
        FSDPTypeError: not a module, or options in hooks mode.
        FSDPValueError: no unit in the model, or no loss.
        FSDPStateError: no process group, or inside ``torch.inference_mode()``.
    """
    target = target_of(model_or_compiled, options)
    backend = target.backend
    models = {f.grad_sum.accumulation.model for unit in target.units for f in unit.flats}
    with (
        preserve_state(target.module, target.units, (inputs, kwargs)),
        unrecorded(),
        backend.apart_from(target.module),
        record_artifacts() as artifacts,
        record_plans() as plans,
    ):
        for remaining in reversed(range(_STEPS)):
            for parameter in target.module.parameters():
                parameter.grad = None
            backend.ran.clear()
            # Collect garbage one step early: ranks that take longer for it would otherwise let the
            # other ranks wait in the step that is reported.
            if remaining == 1:
                gc.collect()
            with record_compilations() as compilations, record_events() as log:
                run_step(target, inputs, kwargs, loss_fn)
    own = [event for event in log if event.step is not None and event.step.model in models]
    step, first = recorded_step(own, compilations), target.units[0]
    return Explanation(
        mode="graph" if target.is_graph_mode else "hooks",
        backend=backend.compiler_name,
        device=str(first.device or "cpu"),
        world_size=first.config.groups.shard.size(),
        units=tuple(_unit_summary(unit) for unit in target.units),
        num_graphs=len(backend.ran),
        graph_breaks=graph_breaks_in(artifacts),
        graphs=reports_of(plans, step),
        measured=step.measured(),
        recompiles=recompiles_in(artifacts),
        compiled_alone=plans.compiled_alone,
        model=type(target.module).__name__,
        cuts=step.cuts(),
    )


_STEPS = 5
"""Enough for Dynamo to make numbers that change from step to step symbolic (two or three)."""


def _unit_summary(unit: Unit) -> UnitSummary:
    return UnitSummary(
        unit=unit.fqn,
        strategy=unit.config.sharding_strategy.name,
        num_parameters=len(unit.originals()),
        unsharded_bytes=sum(flat.unsharded_bytes for flat in unit.flats),
        sharded_bytes=sum(f.sharded.numel() * f.sharded.element_size() for f in unit.flats),
        padding_bytes=sum(f.layout.padding_numel * f.param_dtype.itemsize for f in unit.flats),
    )


# -- recorded steps --------------------------------------------------------------------------------
# Steps of a recording, on a clock that stops during compilation.
#
# A step is an outermost forward with its backward (``events.Step``). The explanation and the page
# of ``inspect_graphs`` both show a ``RecordedStep``.


_MIN_DISTANCE = 0.02
"""Cuts closer than this fraction of the step are merged."""


@dataclass(frozen=True)
class RecordedStep:
    """Events and compilations of one step.

    Attributes:
        events: collectives and compute, in order of issue.
        compilations: those during the step, without overlap.
    """

    events: Sequence[Event]
    compilations: Sequence[Compilation]

    @property
    def is_graph_mode(self) -> bool:
        """Whether a compiled graph issued any of the events."""
        return any(event.source == "graph" for event in self.events)

    @property
    def has_backward(self) -> bool:
        """Whether any event belongs to a backward."""
        return any(event.phase == "backward" for event in self.events)

    @property
    def units(self) -> list[str]:
        """FQNs of the units that ran, in order."""
        return [*dict.fromkeys(event.unit for event in self.events)]

    @property
    def graphs(self) -> Counter[str]:
        """Number of collectives of each planned graph that ran, by the digest of its plan."""
        return Counter(e.graph for e in self.events if e.graph and e.kind in COLLECTIVE_KINDS)

    def measured(self) -> tuple[MeasuredEvent, ...]:
        """Return the events with times that exclude compilation."""
        return tuple(self._measured(event) for event in self.events)

    def cuts(self) -> tuple[Cut, ...]:
        """Return the compilations that the times exclude; those close together are merged."""
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
        """Milliseconds from the start of the step to a moment, excluding compilation."""
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
    """Return a recording of one step as a ``RecordedStep``; compilations are clipped to it."""
    events = [e for e in log if e.kind in COLLECTIVE_KINDS or e.kind in COMPUTE_KINDS]
    begin, end = _begin_of(events), _end_of(events)
    clipped = (Compilation(max(c.begin_ns, begin), min(c.end_ns, end)) for c in compilations)
    return RecordedStep(events, [one for one in clipped if one.begin_ns < one.end_ns])


def steps_in(
    log: Iterable[Event], compilations: Sequence[Compilation]
) -> dict[Model, list[RecordedStep]]:
    """Return each model's steps in a recording, in order; events outside of steps are dropped."""
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
    """Return the plans' reports of the graphs that ran in a step, in order of their first runs.

    A graph that ran several times, for equal units, has as many reports.
    """
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
    """Return when the last event ended; a collective in flight counts with its begin."""
    return max((max(event.waited_ns, event.issued_ns) for event in events), default=0)


__all__ = ["Explanation", "explain"]
