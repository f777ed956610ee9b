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

COLORS = {"forward": "#4c8bc4", "backward": "#8a6bb8"}
EXPOSED = "#d62728"
ROWS = ("compute", "all_gather", "reduce_scatter", "all_reduce")


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

    Args:
        events: what ``record_events`` yielded around the step.
    """
    kinds = {event.kind for event in events}
    rows = [row for row in ROWS if row == "compute" or row in kinds]
    begin = min(event.issued_ns for event in events)
    figure, axes = plt.subplots(figsize=(14, 1.6 + 0.9 * len(rows)), layout="constrained")
    for event in events:
        row = "compute" if event.kind in COLORS else event.kind
        if row in rows:
            _draw_event(axes, event, rows.index(row), begin)
    _label_units(axes, events, begin)
    axes.set_yticks(range(len(rows)), [row.replace("_", "-") for row in rows])
    axes.set_ylim(len(rows) - 0.45, -0.75)
    axes.set(xlabel="time since the step's first event (ms)", title=title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    legend = [Patch(color=color, label=phase) for phase, color in COLORS.items()]
    legend.append(Patch(color=EXPOSED, label="exposed: the rank waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_event(axes: Axes, event: Event, row: int, begin_ns: int) -> None:
    """A bar from issue to wait, and in red the part at its end in which the rank waited."""
    start_ms = (event.issued_ns - begin_ns) / 1e6
    length_ms = (event.waited_ns - event.issued_ns) / 1e6
    compute = event.kind in COLORS
    axes.barh(
        row,
        length_ms,
        left=start_ms,
        height=0.7 if compute else 0.55,
        color=COLORS[event.phase],
        alpha=1.0 if compute else 0.55,
        edgecolor="white",
        linewidth=0.8,
    )
    if event.exposed_ns:
        exposed_ms = event.exposed_ns / 1e6
        left = start_ms + length_ms - exposed_ms
        axes.barh(row, exposed_ms, left=left, height=0.55, color=EXPOSED)


def _label_units(axes: Axes, events: Sequence[Event], begin_ns: int) -> None:
    """Names of units above their compute, where there is room for them."""
    compute = [event for event in events if event.kind in COLORS]
    span_ns = max(event.waited_ns for event in events) - begin_ns
    for event in compute:
        length_ns = event.waited_ns - event.issued_ns
        if length_ns < span_ns / 60:
            continue
        middle_ms = (event.issued_ns + length_ns / 2 - begin_ns) / 1e6
        name = event.unit.rsplit(".", 1)[-1] or "root"
        axes.text(middle_ms, 0, name, ha="center", va="center", color="white", fontsize=9)
