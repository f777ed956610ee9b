"""Report of one training step: data that can be saved, and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from fsdp_dynamo.observe.command_line import format_bytes, format_table
from fsdp_dynamo.observe.training_step import GraphBreak, Recompile
from graph_passes.report import GraphReport, TransferReport

VERSION = 9

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class UnitSummary:
    """Sizes of one unit.

    Attributes:
        unit: FQN, ``""`` for the root.
        strategy: name of the sharding strategy.
        num_parameters: number of original parameters.
        unsharded_bytes: size of the unsharded buffers.
        sharded_bytes: size of this rank's shards.
        padding_bytes: padding, as part of ``unsharded_bytes``.
    """

    unit: str
    strategy: str
    num_parameters: int
    unsharded_bytes: int
    sharded_bytes: int
    padding_bytes: int


@dataclass(frozen=True)
class MeasuredEvent:
    """Recorded event; times are milliseconds since the first event.

    Attributes:
        unit: FQN, ``""`` for the root.
        kind: ``"compute"``, or the kind of the collective.
        phase: ``"forward"`` or ``"backward"``.
        num_bytes: size of the unsharded tensor; 0 for compute.
        issued_ms: when it was issued, or compute started.
        done_ms: when it was known to be complete.
        exposed_ms: how long the rank was blocked on it.
        message_bytes: size of all ranks' messages; less than ``num_bytes`` with a wire format.
        is_planned: whether a graph issued it. Gathers of secondary shards precede the graph and are
            in no plan.
    """

    unit: str
    kind: str
    phase: str
    num_bytes: int
    issued_ms: float
    done_ms: float
    exposed_ms: float
    message_bytes: int = 0
    is_planned: bool = True

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective rather than compute."""
        return self.kind in COLLECTIVES


@dataclass(frozen=True)
class StepReport:
    """Report of one training step without its update: the plan and the measurements.

    Attributes:
        mode: ``"graph"`` or ``"hooks"``; in hooks mode ``graphs`` is empty.
        backend: name of torch.compile's backend.
        device: device of the first unit.
        world_size: number of ranks of the first unit's group.
        units: sizes of the units, outermost first.
        num_graphs: number of Dynamo's graphs that ran in the step.
        graph_breaks: places in the user's code where graphs ended.
        graphs: plans of the graphs that ran in the step, in order.
        measured: events of the step, in order of issue.
        recompiles: graphs that were compiled again, with the guard that failed.
        compiled_alone: by FQN of a unit, why it does not share the compiled code of equal units.
    """

    mode: Literal["graph", "hooks"]
    backend: str
    device: str
    world_size: int
    units: tuple[UnitSummary, ...]
    num_graphs: int
    graph_breaks: tuple[GraphBreak, ...]
    graphs: tuple[GraphReport, ...]
    measured: tuple[MeasuredEvent, ...]
    recompiles: tuple[Recompile, ...] = ()
    compiled_alone: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the report as JSON; equal reports give equal text."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1, sort_keys=True)

    def save(self, path: str | Path) -> None:
        """Write the report as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @property
    def measured_ms(self) -> float:
        """Milliseconds from the first event to the end of the last."""
        return max((event.done_ms for event in self.measured), default=0.0)

    @property
    def simulated_ms(self) -> float:
        """Simulated milliseconds of all graphs, one after the other."""
        return sum(graph.simulated_ms for graph in self.graphs)

    def pairs(self) -> Iterator[tuple[GraphReport, TransferReport, MeasuredEvent | None]]:
        """Yield each planned collective with its graph, and its event if one was recorded."""
        remaining: dict[tuple[str, str, str], list[MeasuredEvent]] = {}
        for event in self.measured:
            if event.is_planned:
                remaining.setdefault((event.phase, event.kind, event.unit), []).append(event)
        for graph in self.graphs:
            for transfer in graph.transfers:
                events = remaining.get((graph.phase, transfer.kind, transfer.unit))
                yield graph, transfer, events.pop(0) if events else None


# -- explanation text ------------------------------------------------------------------------------


_MAX_ROWS = 24
"""Number of collectives that are listed without ``details``: the most exposed ones."""

_HIDDEN_MS = 5e-4
"""Shorter exposed times are printed as 0, and count as hidden."""


def format_report(report: StepReport, details: bool = False) -> str:
    """Format a report, about a hundred columns wide; see ``Explanation.text``."""
    parts = [_header(report)]
    if report.graphs:
        parts += [_totals(report), _collectives(report, details)]
        parts += [_units_of_plan(report), _compiled_alone(report)] if details else []
        parts += [_advice(report)]
    else:
        parts += [_why_no_plan(report), _units_measured(report)]
    if report.graph_breaks:
        parts.append(_graph_breaks(report))
    if report.recompiles:
        parts.append(_recompiles(report))
    return "\n\n".join(part for part in parts if part)


def reason_of(graph: GraphReport, transfer: TransferReport) -> str:
    """Return why the planner did not move a collective further, as a sentence."""
    gather = transfer.kind == "all_gather"
    if transfer.reason == "hidden":
        return "hidden: nothing of it is exposed"
    if transfer.reason == "dependency":
        limit = "its input is not ready earlier" if gather else "its result is needed there"
        return f"dependency: {limit}" + _at_the_edge(graph, transfer)
    if transfer.reason == "memory":
        where, excess = "earlier" if gather else "later", format_bytes(transfer.bytes_short)
        return f"memory: one unit {where} would exceed the budget by {excess}"
    if transfer.reason == "in flight":
        return f"in flight: max_in_flight={graph.max_in_flight} collectives are already in flight"
    behind = "" if transfer.behind is None else f" with {display_name(transfer.behind)}"
    if transfer.reason == "order":
        other = "another" if transfer.behind is None else f"that of {display_name(transfer.behind)}"
        return f"order: it would overtake {other} on the link and gain nothing"
    if transfer.reason == "bandwidth":
        return f"bandwidth: the link is busy{behind}; moving it would gain nothing"
    return f"not planned: moving it by one unit would save {transfer.saves_ms:.3f} ms"


def _at_the_edge(graph: GraphReport, transfer: TransferReport) -> str:
    """Return a remark if the graph has no compute left in the direction of the move."""
    if transfer.kind == "all_gather":
        return " (start of the graph)" if transfer.issued_ms == 0 else ""
    end = max((span.end_ms for span in graph.spans), default=0.0)
    return " (end of the graph)" if transfer.wait_ms >= end else ""


def format_of(transfer: TransferReport) -> str:
    """Return the wire format of a collective, with the reason if the planner chose it."""
    name = transfer.wire.partition("/")[0]
    without = transfer.exposed_without_ms
    if without is None:
        return name or "-"
    if name:
        return f"{name}: {without:.3f} ms exposed without"
    return "none: hidden" if without <= _HIDDEN_MS else f"none: no gain, {without:.3f} ms exposed"


def suggestion_for(graph: GraphReport, transfer: TransferReport) -> str:
    """Return a change that would reduce the exposed time of a collective."""
    if transfer.reason == "memory":
        assert graph.budget_bytes is not None
        budget = graph.budget_bytes + transfer.bytes_short
        return f"memory_budget_bytes={budget}, smaller units, or checkpointed activations"
    if transfer.reason == "in flight":
        return f"max_in_flight={graph.max_in_flight + 1}"
    if transfer.reason == "order":
        return "units of similar size, so that none waits behind a large one"
    if transfer.reason == "bandwidth":
        return (
            "fewer bytes (collective_precision, mixed precision, SHARD_GRAD_OP) or more compute "
            "per step (larger batch)"
        )
    if transfer.reason == "not planned":
        return "prefetch=True and sink_waits=True, or a new plan if one was given"
    return f"split {display_name(transfer.unit)} into smaller units"


def display_name(unit: str) -> str:
    """Name of a unit in the report."""
    return unit or "(root)"


def _header(report: StepReport) -> str:
    unsharded = sum(unit.unsharded_bytes for unit in report.units)
    sharded = sum(unit.sharded_bytes for unit in report.units)
    padding = sum(unit.padding_bytes for unit in report.units)
    return (
        f"{report.mode} mode, {report.backend}, {report.device}, "
        f"{_count(report.world_size, 'rank')}: {_count(len(report.units), 'unit')}, "
        f"{_count(report.num_graphs, 'graph')}, "
        f"{_count(len(report.graph_breaks), 'graph break')}\n"
        f"flat parameters: {format_bytes(unsharded)} unsharded, {format_bytes(sharded)} per rank"
        + (f", {format_bytes(padding)} of padding" if padding else "")
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _totals(report: StepReport) -> str:
    simulated = ["compute", "comm", "bound", "sim.", "unsched.", "exposed"]
    rows = [["graph", *simulated, "measured", "exposed", "sent", "peak", "budget"]]
    for phase in dict.fromkeys(graph.phase for graph in report.graphs):
        graphs = [graph for graph in report.graphs if graph.phase == phase]
        rows.append([phase, *_sums(graphs, _of_phase(report.measured, phase))])
    rows.append(["step", *_sums(report.graphs, report.measured)])
    title = "times in ms; exposed: waiting for a collective, computing nothing; measured: one step"
    return f"{title}\n{format_table(rows)}"


def _sums(graphs: Sequence[GraphReport], events: Sequence[MeasuredEvent]) -> list[str]:
    times = [
        sum(graph.compute_ms for graph in graphs),
        sum(graph.communication_ms for graph in graphs),
        sum(graph.bound_ms for graph in graphs),
        sum(graph.simulated_ms for graph in graphs),
        sum(graph.unscheduled_ms for graph in graphs),
        sum(graph.exposed_ms for graph in graphs),
        _span(events),
        _exposed(events),
    ]
    sent = sum(t.wire_bytes for graph in graphs for t in graph.transfers)
    peak = max((g.peak_bytes for g in graphs if g.peak_bytes is not None), default=None)
    budget = max((g.budget_bytes for g in graphs if g.budget_bytes is not None), default=None)
    sizes = ["-" if size is None else format_bytes(size) for size in (sent, peak, budget)]
    return [*(f"{ms:.2f}" for ms in times), *sizes]


def _of_phase(events: Sequence[MeasuredEvent], phase: str) -> list[MeasuredEvent]:
    return [event for event in events if event.phase == phase]


def _span(events: Sequence[MeasuredEvent]) -> float:
    if not events:
        return 0.0
    return max(e.done_ms for e in events) - min(e.issued_ms for e in events)


def _exposed(events: Sequence[MeasuredEvent]) -> float:
    return sum(event.exposed_ms for event in events if event.is_collective)


def _units_of_plan(report: StepReport) -> str:
    """A row for each unit and phase."""
    rows = [["unit", "phase", "compute", "comm", "exposed", "measured", "exposed", "sent"]]
    for graph in report.graphs:
        events = _of_phase(report.measured, graph.phase)
        for unit in graph.units:
            own = [event for event in events if event.unit == unit.unit]
            compute = sum(e.done_ms - e.issued_ms for e in own if not e.is_collective)
            times = (unit.compute_ms, unit.communication_ms, unit.exposed_ms, compute)
            cells = [f"{ms:.3f}" for ms in (*times, _exposed(own))]
            rows.append(
                [display_name(unit.unit), graph.phase, *cells, format_bytes(unit.wire_bytes)]
            )
    return format_table(rows, left=(0, 1))


def _collectives(report: StepReport, details: bool) -> str:
    """List collectives in order of issue; without ``details``, only the most exposed ones."""
    pairs = list(report.pairs())
    has_formats = any(format_of(transfer) != "-" for _, transfer, _ in pairs)
    num_omitted = 0 if details else max(0, len(pairs) - _MAX_ROWS)
    by_exposure = sorted(range(len(pairs)), key=lambda i: -pairs[i][1].exposed_ms)
    shown = sorted(by_exposure[: len(pairs) - num_omitted])
    rows = [["collective", "moved", "ms", "exposed", "measured", "sent"]]
    rows[0] += ["of", "coding", "reason", "format"] if has_formats else ["reason"]
    for graph, transfer, event in (pairs[i] for i in shown):
        row = [
            f"{graph.phase} {transfer.kind} {display_name(transfer.unit)}",
            _moved(transfer),
            f"{transfer.ms:.3f}",
            f"{transfer.exposed_ms:.3f}",
            "-" if event is None else f"{event.exposed_ms:.3f}",
            format_bytes(transfer.wire_bytes),
        ]
        if has_formats:
            row += [format_bytes(transfer.tensor_bytes), f"{transfer.coding_ms:.3f}"]
        row.append(transfer.reason)
        if has_formats:
            row.append(format_of(transfer))
        rows.append(row)
    more = f"\n... and {num_omitted} that are less exposed" if num_omitted else ""
    return format_table(rows, left=(0, 1, 8, 9) if has_formats else (0, 1, 6)) + more


def _moved(transfer: TransferReport) -> str:
    """Format how many steps a collective was moved, and across which units."""
    names = [display_name(unit) for unit in transfer.moved_across]
    if not names:
        return "-"
    over = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    return f"{transfer.moved_steps} over {over}"


def _advice(report: StepReport) -> str:
    exposed = [
        (graph, one) for graph in report.graphs for one in graph.transfers if one.exposed_ms > 0
    ]
    if not exposed:
        return "nothing is exposed in the simulation"
    exposed.sort(key=lambda pair: -pair[1].exposed_ms)
    lines = ["most exposed, and what to change first:"]
    for rank, (graph, transfer) in enumerate(exposed[:3], 1):
        lines += [
            f"{rank}. {graph.phase} {transfer.kind} of {display_name(transfer.unit)}: "
            f"{transfer.exposed_ms:.3f} ms",
            f"   {reason_of(graph, transfer)}",
            f"   try: {suggestion_for(graph, transfer)}",
        ]
    return "\n".join(lines)


def _why_no_plan(report: StepReport) -> str:
    if report.mode == "graph":
        return "no collectives in the graph: nothing to plan"
    return (
        "hooks mode: hooks issue the collectives between compiled regions, so there is no plan;\n"
        "the numbers below were measured. For a plan: "
        'torch.compile(model, fullgraph=True, backend="fsdp_dynamo")'
    )


def _units_measured(report: StepReport) -> str:
    rows = [["unit", "phase", "compute", "exposed", "collectives", "unsharded", "messages"]]
    keys = dict.fromkeys((event.phase, event.unit) for event in report.measured)
    for phase, unit in keys:
        events = [e for e in report.measured if (e.phase, e.unit) == (phase, unit)]
        own = [e for e in events if e.is_collective]
        compute = sum(e.done_ms - e.issued_ms for e in events if not e.is_collective)
        rows.append(
            [
                display_name(unit),
                phase,
                f"{compute:.3f}",
                f"{_exposed(own):.3f}",
                str(len(own)),
                format_bytes(sum(e.num_bytes for e in own)),
                format_bytes(sum(e.message_bytes for e in own)),
            ]
        )
    total = f"measured {report.measured_ms:.3f} ms, exposed {_exposed(report.measured):.3f} ms"
    return f"{total}; compute of a unit includes the units inside it\n{format_table(rows, (0, 1))}"


def _compiled_alone(report: StepReport) -> str:
    """List the units that do not share compiled code, by reason."""
    by_reason: dict[str, list[str]] = {}
    for unit, reason in report.compiled_alone.items():
        by_reason.setdefault(reason, []).append(display_name(unit))
    lines = ["compiled by themselves, not as one of several equal units:"]
    lines += [f"  {', '.join(units)}: {reason}" for reason, units in by_reason.items()]
    return "\n".join(lines) if by_reason else ""


def _graph_breaks(report: StepReport) -> str:
    """List graph breaks with the line of the user's code."""
    lines = ["graph breaks:"]
    for one in report.graph_breaks:
        place = f"{one.file}:{one.line}" if one.file else "unknown line"
        of = f" in {one.unit}" if one.unit else ""
        lines.append(f"  {place}{of}: {one.code or '-'}")
        lines.append(f"    {one.reason}")
    return "\n".join(lines)


def _recompiles(report: StepReport) -> str:
    rows = (
        f"  {one.unit}: {one.guard}" if one.unit else f"  {one.guard}" for one in report.recompiles
    )
    return "\n".join(["recompiles, with the guard that failed:", *rows])


__all__ = ["MeasuredEvent", "StepReport", "UnitSummary"]
