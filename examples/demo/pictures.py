"""Pictures of a run: its loss, and one step as a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fsdp_dynamo import Event
from fsdp_dynamo.events import COMPUTE_KINDS

COLORS = {"forward": "#4c8bc4", "backward": "#8a6bb8"}
EXPOSED = "#d62728"
ROWS = ("compute", "all_gather", "reduce_scatter", "all_reduce")
HEIGHT = 0.75


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the ``window - 1`` before it, fewer at the beginning."""
    return [
        sum(values[max(0, end - window) : end]) / min(window, end)
        for end in range(1, len(values) + 1)
    ]


def draw_loss(path: Path, losses: Sequence[float], title: str) -> None:
    """Loss (nats a byte) over steps: every step, and a running mean of twenty."""
    steps = range(1, len(losses) + 1)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color=COLORS["forward"], alpha=0.35, linewidth=1, label="each step")
    mean = running_mean(losses, 20)
    axes.plot(steps, mean, color=COLORS["forward"], linewidth=2, label="mean of 20 steps")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_timeline(path: Path, events: Sequence[Event], title: str) -> None:
    """One step of one rank: compute by unit, collectives below it, exposed parts in red.

    What overlaps within a row is drawn one above the other.

    Args:
        events: what ``record_events`` yielded around the step.
    """
    timed = [event for event in events if event.waited_ns > event.issued_ns]
    begin_ns = min((event.issued_ns for event in timed), default=0)
    span_ns = max((event.waited_ns for event in timed), default=0) - begin_ns
    rows = {row: [event for event in timed if row_of(event) == row] for row in ROWS}
    rows = {row: members for row, members in rows.items() if members}
    figure, axes = plt.subplots(figsize=(14, 1.6 + 0.9 * len(rows)), layout="constrained")
    for position, members in enumerate(rows.values()):
        for group in overlapping(members):
            lanes = lanes_of(group)
            height = HEIGHT / (max(lanes) + 1)
            for event, lane in zip(group, lanes, strict=True):
                middle = position - HEIGHT / 2 + (lane + 0.5) * height
                _draw_event(axes, event, middle, height, begin_ns, span_ns)
    axes.set_yticks(range(len(rows)), [row.replace("_", "-") for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.margins(x=0.01)
    axes.set(xlabel="time since the step's first event (ms)", title=title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    legend = [Patch(color=color, label=phase) for phase, color in COLORS.items()]
    legend.append(Patch(color=EXPOSED, label="exposed: the rank waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def row_of(event: Event) -> str:
    """The row of the timeline that an event belongs to."""
    return "compute" if event.kind in COMPUTE_KINDS else event.kind


def overlapping(events: Sequence[Event]) -> list[list[Event]]:
    """Events by start, in groups: no event overlaps one of another group."""
    groups: list[list[Event]] = []
    end_ns = 0
    for event in sorted(events, key=lambda event: event.issued_ns):
        if not groups or event.issued_ns >= end_ns:
            groups.append([])
        groups[-1].append(event)
        end_ns = max(end_ns, event.waited_ns)
    return groups


def lanes_of(events: Sequence[Event]) -> list[int]:
    """The lowest free lane of each event; ``events`` are sorted by start."""
    free_at_ns: list[int] = []
    lanes: list[int] = []
    for event in events:
        free = [lane for lane, end_ns in enumerate(free_at_ns) if end_ns <= event.issued_ns]
        lane = free[0] if free else len(free_at_ns)
        free_at_ns[lane : lane + 1] = [event.waited_ns]
        lanes.append(lane)
    return lanes


def _draw_event(
    axes: Axes, event: Event, middle: float, height: float, begin_ns: int, span_ns: int
) -> None:
    """A bar from issue to completion; what the rank waited for, at its end, in red."""
    compute = event.kind in COMPUTE_KINDS
    start_ms = (event.issued_ns - begin_ns) / 1e6
    length_ms = (event.waited_ns - event.issued_ns) / 1e6
    exposed_ms = event.exposed_ns / 1e6
    axes.barh(
        middle,
        length_ms,
        left=start_ms,
        height=height,
        color=COLORS[event.phase],
        alpha=1.0 if compute else 0.5,
        edgecolor="white",
        linewidth=0.6,
    )
    if exposed_ms:
        left = start_ms + length_ms - exposed_ms
        axes.barh(middle, exposed_ms, left=left, height=height, color=EXPOSED)
    if event.waited_ns - event.issued_ns >= span_ns / 60:  # room for a name
        axes.text(
            start_ms + length_ms / 2,
            middle,
            event.unit.rsplit(".", 1)[-1] or "root",
            ha="center",
            va="center",
            color="white" if compute else "black",
            fontsize=8,
        )
