"""Timelines of a step, simulated and measured, as a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdp_dynamo.observe.explanation import StepReport

COMPUTE = "compute"


@dataclass(frozen=True)
class Bar:
    """Interval on a lane; times are milliseconds since the start of the step.

    ``num_bytes`` counts what this rank sends in a simulated collective, but the messages of all
    ranks in a measured one; ``bytes_are`` says which.
    """

    lane: str
    unit: str
    name: str
    begin_ms: float
    end_ms: float
    exposed_ms: float = 0.0
    num_bytes: int = 0
    bytes_are: str = ""


def simulated_bars(report: StepReport) -> list[Bar]:
    """Return the bars of all graphs, one after the other: a lane for compute, one per link."""
    bars = []
    start = 0.0
    for graph in report.graphs:
        for span in graph.spans:
            name = f"{graph.phase} {span.unit}"
            bars.append(Bar(COMPUTE, span.unit, name, start + span.begin_ms, start + span.end_ms))
        for one in graph.transfers:
            name = f"{one.kind} {one.unit}"
            begin, end = start + one.begin_ms, start + one.end_ms
            lane = f"link {one.link}"
            sent = (one.exposed_ms, one.wire_bytes, "sent by this rank")
            bars.append(Bar(lane, one.unit, name, begin, end, *sent))
        start += graph.simulated_ms
    return bars


def measured_bars(report: StepReport) -> list[Bar]:
    """Return the bars of the recorded step; bars that overlap are on separate lanes."""
    bars = []
    free: dict[str, list[float]] = {COMPUTE: [], "collectives": []}
    for event in sorted(report.measured, key=lambda e: e.issued_ms):
        kind = "collectives" if event.is_collective else COMPUTE
        ends = free[kind]
        lane = next((i for i, end in enumerate(ends) if end <= event.issued_ms), len(ends))
        ends[lane : lane + 1] = [event.done_ms]
        verb = event.kind if event.is_collective else event.phase
        bars.append(
            Bar(
                f"{kind} {lane + 1}" if lane else kind,
                event.unit,
                f"{verb} {event.unit}",
                event.issued_ms,
                event.done_ms,
                event.exposed_ms,
                event.message_bytes,
                "in messages of all ranks",
            )
        )
    return bars


def lanes_of(bars: list[Bar]) -> list[str]:
    """Return the lanes' names: compute first, the rest in alphabetical order."""
    names = {bar.lane for bar in bars}
    return sorted(names, key=lambda name: (not name.startswith(COMPUTE), name))


def trace_events(report: StepReport) -> list[dict[str, Any]]:
    """Return events in Chrome's Trace Event Format, with times in microseconds."""
    sides = ((1, "simulated", simulated_bars(report)), (2, "measured", measured_bars(report)))
    events: list[dict[str, Any]] = []
    for pid, title, bars in sides:
        if not bars:
            continue
        lanes = lanes_of(bars)
        events.append(_name("process_name", pid, 0, title))
        events += [_name("thread_name", pid, tid, lane) for tid, lane in enumerate(lanes)]
        events += list(_complete(pid, lanes, bars))
    return events


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _complete(pid: int, lanes: list[str], bars: list[Bar]) -> Iterator[dict[str, Any]]:
    for bar in bars:
        yield {
            "ph": "X",
            "name": bar.name.strip(),
            "cat": bar.lane,
            "pid": pid,
            "tid": lanes.index(bar.lane),
            "ts": bar.begin_ms * 1e3,
            "dur": max(0.0, bar.end_ms - bar.begin_ms) * 1e3,
            "args": {"unit": bar.unit, "exposed_ms": bar.exposed_ms, "bytes": bar.num_bytes}
            | ({"bytes are": bar.bytes_are} if bar.num_bytes else {}),
        }
