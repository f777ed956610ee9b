"""``explain``: why a step takes as long as it does, and what to change about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters  # graph breaks have no public reader

from fsdp_dynamo import events
from fsdp_dynamo.core.restoring import nothing_changes
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.artifacts import Artifact, record_artifacts
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.events import EventLog, record_events
from fsdp_dynamo.graph_path.planning import PlanLog, record_plans
from fsdp_dynamo.observe import explanation_views
from fsdp_dynamo.observe.explanation import Findings, UnitFacts, measured_of
from fsdp_dynamo.observe.explanation_text import text_of
from fsdp_dynamo.observe.graph_breaks import graph_breaks_in, recompiles_in
from fsdp_dynamo.observe.training_step import Loss, Target, run_step, target_of
from graph_passes.report import report_of


class Explanation(Findings):
    """What ``explain`` returns: ``Findings``, with views of them. ``str()`` of it is ``text()``."""

    def text(self, details: bool = False) -> str:
        """Totals, collectives with their reasons, and what to change first.

        Args:
            details: with a row for every unit, and for every collective of a deep model.
        """
        return text_of(self, details)

    def __str__(self) -> str:
        return self.text()

    def save_picture(self, path: str | Path) -> None:
        """Draw the step as lanes, simulated above measured.

        Args:
            path: of the file; the format follows its suffix.

        Raises:
            FSDPError: matplotlib is not installed.
        """
        explanation_views.save_picture(self, path)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace (Chrome's JSON) for ``ui.perfetto.dev``.

        Args:
            path: of the file; simulated and measured are two processes in it.
        """
        trace = {"traceEvents": explanation_views.trace_events(self), "displayTimeUnit": "ms"}
        Path(path).write_text(json.dumps(trace))


def explain(
    model_or_compiled: object,
    *inputs: Any,
    loss_fn: Loss = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Compile a model anew, run two steps without an update, and say where the time goes.

    All ranks must call it, with the same model and options; each gets its own explanation. A
    compiled model is compiled again with its own backend and options; what was compiled before
    stays as it is. Gradients, buffers and random-number generators are put back.

    Args:
        model_or_compiled: a wrapped model, which is compiled by ``"fsdp_dynamo_aot_eager"``, or
            ``torch.compile`` of one. On the hooks path nothing is planned; what is measured is
            there.
        inputs: of the model.
        loss_fn: from the model's output to a scalar; the sum of all floating-point outputs if
            not given.
        options: of the graph path, in place of the compiled model's own.
        kwargs: of the model.

    Returns:
        What was planned and measured; times in milliseconds, sizes in bytes.

    Raises:
        FSDPTypeError: not a module; options on the hooks path.
        FSDPValueError: no unit in the model; no loss.
        FSDPStateError: no process group; a ``record_events()`` is open.
    """
    target = target_of(model_or_compiled, options)
    if events.recorder is not None:
        raise FSDPStateError(
            expected="no recording under way",
            got="an open record_events()",
            where="explain()",
            fix="Leave it first.",
        )
    breaks, graphs = dict(counters["graph_break"]), counters["stats"]["unique_graphs"]
    with nothing_changes(target.module, target.units, (inputs, kwargs)), record_artifacts() as made:
        with record_plans() as plans:
            run_step(target, inputs, kwargs, loss_fn)
        new_breaks = {r: n - breaks.get(r, 0) for r, n in counters["graph_break"].items()}
        num_graphs = counters["stats"]["unique_graphs"] - graphs
        for parameter in target.module.parameters():
            parameter.grad = None
        with record_events() as log:
            run_step(target, inputs, kwargs, loss_fn)
    counted = {reason: count for reason, count in new_breaks.items() if count}
    return _explanation(target, plans, log, counted, num_graphs, made)


def _explanation(
    target: Target,
    plans: PlanLog,
    log: EventLog,
    breaks: dict[str, int],
    num_graphs: int,
    made: Sequence[Artifact],
) -> Explanation:
    first = target.units[0]
    return Explanation(
        path="graph" if target.is_graph_path else "hooks",
        backend=target.backend,
        device=str(first.device or "cpu"),
        world_size=first.config.groups.shard.size(),
        units=tuple(_facts(unit) for unit in target.units),
        num_graphs=num_graphs,
        graph_breaks=breaks,
        graphs=tuple(report_of(planned) for planned in plans),
        measured=measured_of(log),
        breaks=graph_breaks_in(made),
        recompiles=recompiles_in(made),
    )


def _facts(unit: Unit) -> UnitFacts:
    return UnitFacts(
        unit=unit.fqn,
        strategy=unit.config.strategy.name,
        num_parameters=len(unit.originals()),
        unsharded_bytes=sum(flat.unsharded_bytes for flat in unit.flats),
        sharded_bytes=sum(f.sharded.numel() * f.sharded.element_size() for f in unit.flats),
    )


__all__ = ["Explanation", "explain"]
