"""An explanation as text for a terminal: totals, units, and what to change first."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_dynamo.observe.explanation import Findings, Measured, most_exposed
from graph_passes.report import GraphReport, TransferReport

_MAX_ROWS = 24


def text_of(findings: Findings, details: bool = False) -> str:
    """All of it, a hundred columns wide where names are not too long.

    Args:
        findings: what there is to say.
        details: with a row for every unit, and for collectives that expose little.
    """
    parts = [_head(findings)]
    if findings.graphs:
        parts += [_totals(findings), _collectives(findings, details)]
        parts += [_units_of_plan(findings)] if details else []
        parts += [_advice(findings)]
    else:
        parts += [_why_no_plan(findings), _units_measured(findings)]
    if findings.graph_breaks or findings.breaks:
        parts.append(_breaks(findings))
    if findings.recompiles:
        parts.append(_recompiles(findings))
    return "\n\n".join(part for part in parts if part)


def reason_of(graph: GraphReport, transfer: TransferReport) -> str:
    """Why a collective did not move further, as a sentence."""
    gather = transfer.kind == "all_gather"
    if transfer.reason == "hidden":
        return "hidden: nothing of it is exposed"
    if transfer.reason == "dependency":
        there = "its input is ready only there" if gather else "its result is used there"
        return f"dependency: {there}" + _at_the_edge(graph, transfer)
    if transfer.reason == "memory":
        where = "earlier" if gather else "later"
        return f"memory: one unit {where} exceeds the budget by {_bytes(transfer.bytes_short)}"
    if transfer.reason == "in flight":
        return f"in flight: max_in_flight={graph.max_in_flight} are under way already"
    behind = "" if transfer.behind is None else f" with {name_of(transfer.behind)}"
    if transfer.reason == "order":
        other = "another" if transfer.behind is None else f"that of {name_of(transfer.behind)}"
        return f"order: it would overtake {other} on the link, which gains nothing"
    if transfer.reason == "bandwidth":
        return f"bandwidth: the link is busy{behind}; moving it gains nothing"
    return f"not planned: moving it by one unit would save {transfer.saves_ms:.3f} ms"


def _at_the_edge(graph: GraphReport, transfer: TransferReport) -> str:
    """Says so where nothing is left to compute on that side."""
    if transfer.kind == "all_gather":
        return " (the graph begins)" if transfer.issued_ms == 0 else ""
    end = max((span.end_ms for span in graph.spans), default=0.0)
    return " (the graph ends)" if transfer.wait_ms >= end else ""


def suggestion_for(graph: GraphReport, transfer: TransferReport) -> str:
    """What a user can change about an exposed collective."""
    if transfer.reason == "memory":
        assert graph.budget_bytes is not None
        budget = graph.budget_bytes + transfer.bytes_short
        return f"memory_budget_bytes={budget}, smaller units, or checkpointed activations"
    if transfer.reason == "in flight":
        return f"max_in_flight={graph.max_in_flight + 1}"
    if transfer.reason == "order":
        return "units of more even size, so that none is stuck behind a large one"
    if transfer.reason == "bandwidth":
        return "fewer bytes (mixed precision, SHARD_GRAD_OP) or more compute a step (larger batch)"
    if transfer.reason == "not planned":
        return "prefetch=True and sink_waits=True, or a new plan if one was given"
    return f"make {name_of(transfer.unit)} smaller: wrap its parts as units of their own"


def name_of(unit: str) -> str:
    """How a unit is called in the text."""
    return unit or "(root)"


def _head(findings: Findings) -> str:
    whole = sum(unit.unsharded_bytes for unit in findings.units)
    part = sum(unit.sharded_bytes for unit in findings.units)
    breaks = sum(findings.graph_breaks.values())
    return (
        f"{findings.path} mode, {findings.backend}, {findings.device}, "
        f"{_count(findings.world_size, 'rank')}: {_count(len(findings.units), 'unit')}, "
        f"{_count(findings.num_graphs, 'graph')}, {_count(breaks, 'graph break')}\n"
        f"flat parameters {_bytes(whole)} unsharded, {_bytes(part)} a rank"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _totals(findings: Findings) -> str:
    rows = [_TOTALS]
    for phase in dict.fromkeys(graph.phase for graph in findings.graphs):
        graphs = [graph for graph in findings.graphs if graph.phase == phase]
        rows.append([phase, *_sums(graphs, _of_phase(findings.measured, phase))])
    rows.append(["step", *_sums(findings.graphs, findings.measured)])
    return "times in ms; exposed: nothing is computed; measured: one step\n" + _table(rows)


_TOTALS = [
    "graph",
    "compute",
    "comm",
    "bound",
    "sim.",
    "unsched.",
    "exposed",
    "measured",
    "exposed",
    "sent",
    "peak",
    "budget",
]


def _sums(graphs: Sequence[GraphReport], events: Sequence[Measured]) -> list[str]:
    times = ("compute_ms", "communication_ms", "bound_ms", "simulated_ms", "unscheduled_ms")
    cells = [f"{sum(getattr(graph, name) for graph in graphs):.2f}" for name in times]
    cells.append(f"{sum(graph.exposed_ms for graph in graphs):.2f}")
    cells += [f"{_span(events):.2f}", f"{_exposed(events):.2f}"]
    cells.append(_bytes(sum(t.wire_bytes for graph in graphs for t in graph.transfers)))
    peaks = [graph.peak_bytes for graph in graphs if graph.peak_bytes is not None]
    budgets = [graph.budget_bytes for graph in graphs if graph.budget_bytes is not None]
    return [*cells, _bytes(max(peaks)) if peaks else "-", _bytes(max(budgets)) if budgets else "-"]


def _of_phase(events: Sequence[Measured], phase: str) -> list[Measured]:
    return [event for event in events if event.phase == phase]


def _span(events: Sequence[Measured]) -> float:
    if not events:
        return 0.0
    return max(e.done_ms for e in events) - min(e.issued_ms for e in events)


def _exposed(events: Sequence[Measured]) -> float:
    return sum(event.exposed_ms for event in events if event.is_collective)


def _units_of_plan(findings: Findings) -> str:
    """A row for every unit of a phase."""
    rows = [["unit", "phase", "compute", "comm", "exposed", "measured", "exposed", "sent"]]
    for graph in findings.graphs:
        events = _of_phase(findings.measured, graph.phase)
        for unit in graph.units:
            own = [event for event in events if event.unit == unit.unit]
            compute = sum(e.done_ms - e.issued_ms for e in own if not e.is_collective)
            times = (unit.compute_ms, unit.communication_ms, unit.exposed_ms, compute)
            cells = [f"{ms:.3f}" for ms in (*times, _exposed(own))]
            rows.append([name_of(unit.unit), graph.phase, *cells, _bytes(unit.wire_bytes)])
    return _table(rows, left=(0, 1))


def _collectives(findings: Findings, details: bool) -> str:
    """A row for every collective, in order of issue."""
    rows = [["collective", "moved", "ms", "exposed", "measured", "sent", "reason"]]
    ends = []
    for graph, transfer, event in findings.pairs():
        rows.append(
            [
                f"{graph.phase} {transfer.kind} {name_of(transfer.unit)}",
                _moved(transfer),
                f"{transfer.ms:.3f}",
                f"{transfer.exposed_ms:.3f}",
                "-" if event is None else f"{event.exposed_ms:.3f}",
                _bytes(transfer.wire_bytes),
                transfer.reason,
            ]
        )
        ends.append(transfer.exposed_ms)
    left = 0 if details else len(ends) - _MAX_ROWS
    if left > 0:
        keep = sorted(sorted(range(len(ends)), key=lambda i: -ends[i])[:_MAX_ROWS])
        rows = [rows[0], *(rows[i + 1] for i in keep)]
    more = f"\n... and {left} that are less exposed" if left > 0 else ""
    return _table(rows, left=(0, 1, 6)) + more


def _moved(transfer: TransferReport) -> str:
    """Over how many steps, and whose."""
    names = [name_of(unit) for unit in transfer.moved_across]
    if not names:
        return "-"
    over = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    return f"{transfer.moved_steps} over {over}"


def _advice(findings: Findings) -> str:
    worst = most_exposed(findings)
    if not worst:
        return "nothing is exposed in the simulation"
    lines = ["most exposed, and what to change first:"]
    for rank, (graph, transfer) in enumerate(worst, 1):
        lines += [
            f"{rank}. {graph.phase} {transfer.kind} of {name_of(transfer.unit)}: "
            f"{transfer.exposed_ms:.3f} ms",
            f"   {reason_of(graph, transfer)}",
            f"   try: {suggestion_for(graph, transfer)}",
        ]
    return "\n".join(lines)


def _why_no_plan(findings: Findings) -> str:
    if findings.path == "graph":
        return "no collectives in the graph: nothing to plan"
    return (
        "hooks mode: collectives are issued by hooks between compiled regions, so there is no "
        "plan;\nwhat follows was measured. For a plan: "
        'torch.compile(model, fullgraph=True, backend="fsdp_dynamo")'
    )


def _units_measured(findings: Findings) -> str:
    rows = [["unit", "phase", "compute", "exposed", "collectives", "unsharded"]]
    keys = dict.fromkeys((event.phase, event.unit) for event in findings.measured)
    for phase, unit in keys:
        events = [e for e in findings.measured if (e.phase, e.unit) == (phase, unit)]
        own = [e for e in events if e.is_collective]
        compute = sum(e.done_ms - e.issued_ms for e in events if not e.is_collective)
        rows.append(
            [
                name_of(unit),
                phase,
                f"{compute:.3f}",
                f"{_exposed(own):.3f}",
                str(len(own)),
                _bytes(sum(e.num_bytes for e in own)),
            ]
        )
    note = "compute of a unit: with that of units inside it"
    total = f"measured {findings.measured_ms:.3f} ms, exposed {findings.measured_exposed_ms:.3f} ms"
    return f"{total}; {note}\n{_table(rows, left=(0, 1))}"


def _breaks(findings: Findings) -> str:
    """Each with the user's line; where Dynamo gave none, its reasons as it counts them."""
    lines = ["graph breaks:"]
    for one in findings.breaks:
        place = f"{one.file}:{one.line}" if one.file else "no line given"
        of = f" in {one.unit}" if one.unit else ""
        lines.append(f"{one.count:4d} x {place}{of}: {one.code or '-'}")
        lines.append(f"       {one.reason}")
    if not findings.breaks:
        for reason, count in findings.graph_breaks.items():
            first = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
            lines.append(f"{count:4d} x {first}")
    return "\n".join(lines)


def _recompiles(findings: Findings) -> str:
    lines = ["compiled again, because a guard failed:"]
    for one in findings.recompiles:
        of = f"{one.unit}: " if one.unit else ""
        lines.append(f"{one.count:4d} x {of}{one.guard}")
    return "\n".join(lines)


def _table(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0,)) -> str:
    """Columns with numbers flush right, those of ``left`` flush left."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _bytes(number: int) -> str:
    """With a unit, three digits or so."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} B"
