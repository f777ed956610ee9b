"""Pictures of records: step time by peer, scaling, compile time, memory.

    python benchmarks/pictures.py FOLDER

draws every record (``*.json`` with a ``kind``) of a folder beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import BadInputError, one_line_on_bad_input

OURS, THEIRS, FLOOR, BOUND = "#c44536", "#7d98a1", "#d8dbdc", "#1c2321"
MEMORY_COLOURS = ("#1c2321", "#7d98a1", "#c44536", "#e8a87c", "#d8dbdc")

Record = dict[str, Any]


def _colour(row: Record) -> str:
    if row["ours"]:
        return OURS
    return THEIRS if row["communicates"] else FLOOR


def _horizontal(ax: Axes, titles: list[str]) -> None:
    ax.set_yticks(range(len(titles)), titles)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


def draw_comparison(data: Record, path: Path) -> None:
    """Forward + backward by peer: median, spread, and the lower bound as a line."""
    rows = [row for row in data["rows"] if row["reason"] is None]
    fig, ax = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.4), layout="constrained")
    for index, row in enumerate(rows):
        times = row["forward_backward_ms"]
        median = times["median"]
        spread = [[median - times["min"]], [times["max"] - median]]
        ax.barh(index, median, xerr=spread, color=_colour(row), ecolor="#444", capsize=3)
        if "bound_ms" in row:
            bound = row["bound_ms"]["total_ms"]
            label = "lower bound" if ax.get_legend_handles_labels()[1] == [] else None
            ax.plot([bound, bound], [index - 0.45, index + 0.45], color=BOUND, lw=2, label=label)
    _horizontal(ax, [row["title"] for row in rows])
    rate = data.get("link_bytes_per_s")
    where = f"a link of {rate * 8 / 1e9:g} Gbit/s" if rate else "the loopback"
    ax.set_xlabel("forward + backward, ms (median, least and most)")
    ax.set_title(f"{data['workload']}; {data['world_size']} ranks over {where}", fontsize=10)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(frameon=False, loc="lower right")
    fig.savefig(path, dpi=130)
    plt.close(fig)


def draw_memory(data: Record, path: Path) -> None:
    """Peak bytes by peer, stacked by category."""
    rows = [row for row in data["rows"] if row.get("peak_bytes")]
    kinds = list(rows[0]["peak_bytes"])
    fig, ax = plt.subplots(figsize=(9, 0.42 * len(rows) + 1.4), layout="constrained")
    left = [0.0] * len(rows)
    for kind, colour in zip(kinds, MEMORY_COLOURS, strict=True):
        widths = [row["peak_bytes"][kind] / 1e6 for row in rows]
        ax.barh(range(len(rows)), widths, left=left, color=colour, label=kind)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    _horizontal(ax, [row["title"] for row in rows])
    ax.set_xlabel("peak MB of one rank in one step")
    ax.legend(frameon=False, ncols=len(kinds), loc="lower center", bbox_to_anchor=(0.4, 1.0))
    fig.savefig(path, dpi=130)
    plt.close(fig)


def draw_compile_time(data: Record, path: Path) -> None:
    """First step by number of blocks, a line a peer."""
    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for key, by_depth in data["rows"].items():
        points = [
            (int(depth), result["first_step_s"])
            for depth, result in by_depth.items()
            if "first_step_s" in result
        ]
        style = {"lw": 2.4} if key.startswith("ours") else {"lw": 1.4, "ls": "--"}
        ax.plot(*zip(*points, strict=True), marker="o", label=data["titles"][key], **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(data["depths"], [str(depth) for depth in data["depths"]])
    ax.set_xlabel("blocks")
    ax.set_ylabel("first step, s (empty cache)")
    ax.set_ylim(bottom=0)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def draw_scaling(data: Record, path: Path) -> None:
    """Strong scaling over N ranks of the simulated cluster, a line a peer and the bound."""
    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in data["rows"]:
        ran = [p for p in row["points"] if p["reason"] is None]
        points = [(p["world_size"], p["step_ms"]["median"]) for p in ran]
        style = {"lw": 2.4} if row["ours"] else {"lw": 1.4, "ls": "--"}
        ax.plot(*zip(*points, strict=True), marker="o", label=row["title"], **style)
        bounds = [(p["world_size"], p["bound_ms"]) for p in ran if p.get("bound_ms")]
        if row["key"] == "ours":
            ax.plot(*zip(*bounds, strict=True), color=BOUND, ls=":", label="lower bound of ours")
    ax.set_xscale("log", base=2)
    ax.set_xticks(data["sizes"], [str(size) for size in data["sizes"]])
    ax.set_yscale("log")
    ax.set_xlabel(f"ranks of the simulated cluster ({data['cluster']})")
    ax.set_ylabel("forward + backward, ms")
    ax.set_title(data["workload"], fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def draw_final_loss(data: Record, path: Path) -> None:
    """Final loss by format: a point for each seed; the spread of no format as a band."""
    losses = data["losses"]
    fig, ax = plt.subplots(figsize=(9, 0.42 * len(losses) + 1.4), layout="constrained")
    for index, (name, found) in enumerate(losses.items()):
        colour = THEIRS if name == "none" else OURS
        ax.plot(found, [index] * len(found), "o", color=colour, alpha=0.8)
    if "none" in losses:
        spread = min(losses["none"]), max(losses["none"])
        ax.axvspan(*spread, color=FLOOR, zorder=0, label="spread without a format")
        ax.legend(frameon=False)
    _horizontal(ax, [name.replace("_", " ") for name in losses])
    ax.set_xlabel(f"final loss after {data['steps']} steps, nats a byte; one point a seed")
    fig.savefig(path, dpi=130)
    plt.close(fig)


DRAWERS: dict[str, tuple[tuple[str, Callable[[Record, Path], None]], ...]] = {
    "comparison": (("", draw_comparison), ("_memory", draw_memory)),
    "compile_time": (("", draw_compile_time),),
    "final_loss": (("", draw_final_loss),),
    "scaling": (("", draw_scaling),),
}
"""By a record's kind: endings of the pictures' names and what draws them."""


def draw_all(folder: Path) -> list[Path]:
    """Draw every record of a folder.

    Returns:
        The pictures written.
    """
    written = []
    for source in sorted(folder.glob("*.json")):
        data = json.loads(source.read_text())
        for ending, draw in DRAWERS.get(data.get("kind", ""), ()):
            target = source.with_name(f"{source.stem}{ending}.png")
            draw(data, target)
            written.append(target)
    return written


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    with one_line_on_bad_input():
        if not options.folder.is_dir():
            raise BadInputError(f"expected a folder of records, got {str(options.folder)!r}")
        for path in draw_all(options.folder):
            print(path)


if __name__ == "__main__":
    main()
