"""Listings of graphs, made from artifacts of compilation: unit, phase and stage of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import dedent

from fsdp_dynamo.dynamo.artifacts import DECOMPILED, PREFIX, Artifact, Frame
from graph_passes.text.listing import Line, of_unit, units_in

PHASES = ("dynamo", "joint", "forward", "backward")

_TORCH_STAGES = {
    "dynamo_output_graph": ("dynamo", "captured"),
    "aot_joint_graph": ("joint", "traced"),
    "aot_forward_graph": ("forward", "partition"),
    "aot_inference_graph": ("forward", "partition"),
    "aot_backward_graph": ("backward", "partition"),
}
"""Phase and stage of torch's own artifacts that are graphs."""

_CODE = "inductor_output_code"
_AOT_ID = re.compile(r"AOT ID: \['(\d+)_(forward|backward|inference)'\]")
_UNSAFE = re.compile(r"[^\w.-]")
"""Characters that an FQN may hold and a file name should not."""
_WITHOUT_UNITS = ("captured", "decompiled", "inductor")


@dataclass(frozen=True)
class Listing:
    """A graph, or the code generated from it, at one stage.

    Attributes:
        unit: FQN, ``""`` for the root; ``None`` for the graph of a whole step.
        graph: index among the unit's graphs, in order of compilation.
        phase: ``"dynamo"``, ``"joint"``, ``"forward"`` or ``"backward"``.
        stage: ``"partition"``, ``"after_planner"``, ``"inductor"`` and so on.
        text: the code.
        variant: number of earlier listings with the same file name, ignoring case.
    """

    unit: str | None
    graph: int
    phase: str
    stage: str
    text: str
    variant: int = 0

    @property
    def file_name(self) -> str:
        """``layers.3.backward.after_planner.py``; a unit's further graphs are numbered."""
        owner = "_whole" if self.unit is None else self.unit or "_root"
        number = f".graph{self.graph}" if self.graph else ""
        name = _UNSAFE.sub("_", f"{owner}{number}.{self.phase}.{self.stage}")
        return f"{name}~{self.variant + 1}.py" if self.variant else f"{name}.py"


def listings_of(artifacts: Iterable[Artifact]) -> list[Listing]:
    """Listings of all graphs, in order; a whole step's graph also unit by unit.

    Args:
        artifacts: those that ``record_artifacts`` kept.
    """
    frames: dict[Frame, list[Artifact]] = {}
    for artifact in artifacts:
        frames.setdefault(artifact.frame, []).append(artifact)
    graphs: dict[str | None, int] = {}
    found: list[Listing] = []
    for members in frames.values():
        mine = list(_of_frame(members))
        if all(listing.phase == "dynamo" for listing in mine):
            continue  # a frame that only calls others
        unit = mine[0].unit
        begin = graphs.get(unit, 0)
        mine = [replace(listing, graph=begin + listing.graph) for listing in mine]
        graphs[unit] = max(listing.graph for listing in mine) + 1
        found += mine
        found += [part for listing in mine if unit is None for part in _listings_by_unit(listing)]
    return list(_with_unique_names(found))


def _with_unique_names(listings: Iterable[Listing]) -> Iterator[Listing]:
    """The listings with distinct file names, even if case is ignored."""
    taken: Counter[str] = Counter()
    for listing in listings:
        name = listing.file_name.lower()
        yield replace(listing, variant=taken[name])
        taken[name] += 1


def _of_frame(artifacts: Sequence[Artifact]) -> Iterator[Listing]:
    """Listings of one compilation, its graphs numbered from 0."""
    ours = any(a.name.startswith(PREFIX) and a.name != DECOMPILED for a in artifacts)
    unit = None if ours else artifacts[0].unit
    counts: dict[tuple[str, str], int] = {}
    ids: dict[str, int] = {}
    for artifact in artifacts:
        placed = _our_stage(artifact.name) if ours else _torch_stage(artifact)
        if artifact.name == DECOMPILED or artifact.name == "dynamo_output_graph":
            placed = _TORCH_STAGES.get(artifact.name, ("dynamo", "decompiled"))
        if placed is None:
            continue
        graph = counts.get(placed, 0)
        counts[placed] = graph + 1
        aot = _AOT_ID.search(artifact.text) if artifact.name == _CODE else None
        if aot is not None:  # segments are numbered forward, and compiled backward as they run
            graph = ids.setdefault(aot[1], len(ids))
        text = artifact.text.replace("class <lambda>(", "class Graph(")  # that it is Python
        yield Listing(unit, graph, *placed, text)


def _our_stage(name: str) -> tuple[str, str] | None:
    phase, bar, stage = name.removeprefix(PREFIX).partition(".")
    return (phase, stage) if bar and name.startswith(PREFIX) else None


def _torch_stage(artifact: Artifact) -> tuple[str, str] | None:
    if artifact.name != _CODE:
        return _TORCH_STAGES.get(artifact.name)
    aot = _AOT_ID.search(artifact.text)
    is_backward = aot is not None and aot[2] == "backward"
    return ("backward" if is_backward else "forward", "inductor")


def _listings_by_unit(whole: Listing) -> Iterator[Listing]:
    """The listings of each unit's part of a whole step's graph."""
    if whole.stage in _WITHOUT_UNITS:
        return
    lines = [Line.parse(line) for line in whole.text.splitlines()]
    for unit in units_in(lines):
        text = dedent("\n".join(map(str, of_unit(lines, unit))) + "\n")
        yield replace(whole, unit=unit, text=text)
