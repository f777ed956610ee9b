"""``explain``: where the time of a training step goes, and what to change."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import preserve_state
from fsdp_dynamo.dynamo.artifacts import record_artifacts
from fsdp_dynamo.events import (
    COLLECTIVE_KINDS,
    COMPUTE_KINDS,
    Event,
    record_events,
    unrecorded,
)
from fsdp_dynamo.graph_mode.planning import record_plans
from fsdp_dynamo.observe import timeline
from fsdp_dynamo.observe.explanation import (
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
    """Result of ``explain``: a ``StepReport`` as text and trace."""

    def text(self, details: bool = False) -> str:
        """Format totals, collectives with their reasons, and what to change first.

        Args:
            details: list every unit and every collective, however many there are.
        """
        return format_report(self, details)

    def __str__(self) -> str:
        return self.text()

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
    optimizer update; the last one is reported. Each rank gets its own report. Gradients, buffers
    and random number generators are restored, Python objects that the forward changes are not.
    Compiled code is kept, except functions with graph breaks, which the next step compiles again.
    Open recordings do not see the five steps.

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
            with record_events() as log:
                run_step(target, inputs, kwargs, loss_fn)
    own = [event for event in log if event.step is not None and event.step.model in models]
    first = target.units[0]
    return Explanation(
        mode="graph" if target.is_graph_mode else "hooks",
        backend=backend.compiler_name,
        device=str(first.device or "cpu"),
        world_size=first.config.groups.shard.size(),
        units=tuple(_unit_summary(unit) for unit in target.units),
        num_graphs=len(backend.ran),
        graph_breaks=graph_breaks_in(artifacts),
        graphs=reports_of(plans, own),
        measured=measured_events(own),
        recompiles=recompiles_in(artifacts),
        compiled_alone=plans.compiled_alone,
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


def measured_events(log: Iterable[Event]) -> tuple[MeasuredEvent, ...]:
    """Return collectives and compute of a step, with milliseconds since the first of them."""
    kinds = COLLECTIVE_KINDS | COMPUTE_KINDS
    events = [event for event in log if event.kind in kinds]
    begin_ns = min((event.issued_ns for event in events), default=0)
    return tuple(
        MeasuredEvent(
            unit=event.unit,
            kind=event.kind if event.kind in COLLECTIVE_KINDS else "compute",
            phase=event.phase,
            num_bytes=event.num_bytes,
            issued_ms=(event.issued_ns - begin_ns) / 1e6,
            # A collective in flight counts with its begin.
            done_ms=(max(event.waited_ns, event.issued_ns) - begin_ns) / 1e6,
            exposed_ms=event.exposed_ns / 1e6,
            message_bytes=event.message_bytes,
            is_planned=event.source == "graph",
        )
        for event in events
    )


def reports_of(plans: Iterable[Planned], log: Iterable[Event]) -> tuple[GraphReport, ...]:
    """Return the plans' reports of the graphs that ran in a step, in order of their first runs.

    A graph that ran several times, for equal units, has as many reports.
    """
    by_digest = {planned.plan.short_digest: planned for planned in plans}
    ran = Counter(event.graph for event in log if event.kind in COLLECTIVE_KINDS)
    found: list[GraphReport] = []
    for digest, num_events in ran.items():
        if digest in by_digest:
            report = report_of(by_digest[digest])
            found += [report] * max(1, num_events // max(1, len(report.transfers)))
    return tuple(found)


__all__ = ["Explanation", "explain"]
