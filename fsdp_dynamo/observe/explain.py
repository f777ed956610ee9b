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
    """Result of ``explain``: a ``StepReport`` with views of it. ``str()`` is ``text()``."""

    def text(self, details: bool = False) -> str:
        """Format totals, collectives with their reasons, and the first things to change.

        Args:
            details: add a row for every unit, and for every collective of a deep model.
        """
        return format_report(self, details)

    def __str__(self) -> str:
        return self.text()

    def save_picture(self, path: str | Path) -> None:
        """Draw the step as lanes, simulated above measured.

        Args:
            path: the file; its suffix selects the format.

        Raises:
            FSDPError: matplotlib is not installed.
        """
        timeline.save_picture(self, path)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace (Chrome's JSON) for ``ui.perfetto.dev``.

        Args:
            path: the file; the simulated and the measured step are two processes in it.
        """
        trace = {"traceEvents": timeline.trace_events(self), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))


def explain(
    model_or_compiled: object,
    *inputs: Any,
    loss_fn: Loss = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile a model again, run steps without an update, and report where the time of one goes.

    All ranks must call it, with the same model and options; each gets its own explanation. A
    compiled model is compiled again with its own backend and options; existing compiled code is
    kept, but for functions in which a graph breaks: the next step compiles them again. Gradients,
    buffers and random-number generators are restored; Python objects that a forward changes are
    not. What is reported is the fifth step, without the time in which something is still compiled
    in it; recordings that are open leave out all five.

    Args:
        model_or_compiled: a wrapped model, which is compiled with ``"fsdp_dynamo_aot_eager"``, or
            ``torch.compile`` of one. In hooks mode there is no plan, only measurements.
        inputs: positional arguments of the model.
        loss_fn: maps the model's output to a scalar; default: the sum of all floating-point
            outputs.
        options: options of graph mode that replace the compiled model's own.
        kwargs: keyword arguments of the model.

    Returns:
        The plan and the measurements; times in milliseconds, sizes in bytes.

    Raises:
        FSDPTypeError: not a module, or options in hooks mode.
        FSDPValueError: no unit in the model, or no loss.
        FSDPStateError: no process group, or within ``torch.inference_mode()``.
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
        for remaining in reversed(range(_STEPS)):  # as many on all ranks
            for parameter in target.module.parameters():
                parameter.grad = None
            backend.ran.clear()
            if remaining == 1:  # ranks that collect for longer are waited for before the last step
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
"""Numbers that change from step to step are symbols after two or three of them."""


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
# The steps of a recording: what ran in each, on a clock that stands still while code is compiled.
#
# A step is an outermost forward with its backward (``steps.Step``). Page, explanation, trace and
# picture all show what ``steps_in`` finds.


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


__all__ = ["Explanation", "explain"]
