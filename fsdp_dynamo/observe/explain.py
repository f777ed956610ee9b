"""``explain``: where the time of a training step goes, and what to change."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_dynamo.core.preserve_state import preserve_state
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.artifacts import record_artifacts, record_compilations
from fsdp_dynamo.events import record_events, unrecorded
from fsdp_dynamo.graph_path.planning import record_plans
from fsdp_dynamo.observe import timeline
from fsdp_dynamo.observe.explanation import StepReport, UnitSummary
from fsdp_dynamo.observe.explanation_text import format_report
from fsdp_dynamo.observe.graph_breaks import graph_breaks_in, recompiles_in
from fsdp_dynamo.observe.recorded_steps import recorded_step, reports_of
from fsdp_dynamo.observe.training_step import Loss, run_step, target_of


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
        strategy=unit.config.strategy.name,
        num_parameters=len(unit.originals()),
        unsharded_bytes=sum(flat.unsharded_bytes for flat in unit.flats),
        sharded_bytes=sum(f.sharded.numel() * f.sharded.element_size() for f in unit.flats),
        padding_bytes=sum(f.layout.padding_numel * f.param_dtype.itemsize for f in unit.flats),
    )


__all__ = ["Explanation", "explain"]
