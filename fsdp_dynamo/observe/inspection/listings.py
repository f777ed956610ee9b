"""From artifacts of compilation to listings: whose graph, which phase, which stage."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_dynamo.dynamo.artifacts import DECOMPILED, PREFIX, Artifact, Frame
from graph_passes.text.listing import Line, of_unit, units_in

PHASES = ("dynamo", "joint", "forward", "backward")

_OF_TORCH = {
    "dynamo_output_graph": ("dynamo", "captured"),
    "aot_joint_graph": ("joint", "traced"),
    "aot_forward_graph": ("forward", "partition"),
    "aot_inference_graph": ("forward", "partition"),
    "aot_backward_graph": ("backward", "partition"),
}
"""torch's own artifacts that are graphs: phase and stage."""

_CODE = "inductor_output_code"
_AOT_ID = re.compile(r"AOT ID: \['(\d+)_(forward|backward|inference)'\]")
_AWKWARD = re.compile(r"[^\w.-]")
"""What may stand in an FQN, but should not in a file's name."""
_NOT_LISTINGS = ("captured", "decompiled", "inductor")


@dataclass(frozen=True)
class Listing:
    """A graph, or code made of one, at one stage.

    Attributes:
        unit: FQN, ``""`` for the root; ``None`` for the graph of a whole step.
        graph: which of the unit's graphs, in order of compilation.
        phase: ``"dynamo"``, ``"joint"``, ``"forward"`` or ``"backward"``.
        stage: ``"partition"``, ``"after_planner"``, ``"inductor"`` and so on.
        text: the code.
        variant: more than 0 where a listing before has the same file name, but for case.
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
        name = _AWKWARD.sub("_", f"{owner}{number}.{self.phase}.{self.stage}")
        return f"{name}~{self.variant + 1}.py" if self.variant else f"{name}.py"


def listings_of(artifacts: Iterable[Artifact]) -> list[Listing]:
    """All graphs of some compilations, in order; a whole step's also unit by unit.

    Args:
        artifacts: as ``record_artifacts`` kept them.
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
        found += [part for listing in mine if unit is None for part in _parts(listing)]
    return list(_apart(found))


def _apart(listings: Iterable[Listing]) -> Iterator[Listing]:
    """No two with one file name, also where case does not count."""
    taken: Counter[str] = Counter()
    for listing in listings:
        name = listing.file_name.lower()
        yield replace(listing, variant=taken[name])
        taken[name] += 1


def _of_frame(artifacts: Sequence[Artifact]) -> Iterator[Listing]:
    """Of one compilation; its graphs, where it has several, counted from 0."""
    ours = any(a.name.startswith(PREFIX) and a.name != DECOMPILED for a in artifacts)
    unit = None if ours else artifacts[0].unit
    counts: dict[tuple[str, str], int] = {}
    ids: dict[str, int] = {}
    for artifact in artifacts:
        placed = _own_place(artifact.name) if ours else _place_in_torch(artifact)
        if artifact.name == DECOMPILED or artifact.name == "dynamo_output_graph":
            placed = _OF_TORCH.get(artifact.name, ("dynamo", "decompiled"))
        if placed is None:
            continue
        graph = counts.get(placed, 0)
        counts[placed] = graph + 1
        aot = _AOT_ID.search(artifact.text) if artifact.name == _CODE else None
        if aot is not None:  # segments are numbered forward, and compiled backward as they run
            graph = ids.setdefault(aot[1], len(ids))
        yield Listing(unit, graph, *placed, artifact.text)


def _own_place(name: str) -> tuple[str, str] | None:
    phase, bar, stage = name.removeprefix(PREFIX).partition(".")
    return (phase, stage) if bar and name.startswith(PREFIX) else None


def _place_in_torch(artifact: Artifact) -> tuple[str, str] | None:
    if artifact.name != _CODE:
        return _OF_TORCH.get(artifact.name)
    aot = _AOT_ID.search(artifact.text)
    is_backward = aot is not None and aot[2] == "backward"
    return ("backward" if is_backward else "forward", "inductor")


def _parts(whole: Listing) -> Iterator[Listing]:
    """What of a whole step's graph is each unit's."""
    if whole.stage in _NOT_LISTINGS:
        return
    lines = [Line.parse(line) for line in whole.text.splitlines()]
    for unit in units_in(lines):
        text = "\n".join(map(str, of_unit(lines, unit))) + "\n"
        yield replace(whole, unit=unit, text=text)
