"""Listings of graphs by unit, phase and stage, made from the artifacts of compilation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import dedent
from types import CodeType, ModuleType

import torch

from fsdp_dynamo.dynamo.artifacts import DECOMPILED, PREFIX, Artifact, Frame, emit
from graph_passes.text.listing import Line, of_unit, units_in

_DYNAMO_STAGES = {
    "dynamo_output_graph": ("dynamo", "captured"),
    DECOMPILED: ("dynamo", "decompiled"),
}
_AOT_STAGES = {
    "aot_joint_graph": ("joint", "traced"),
    "aot_forward_graph": ("forward", "partition"),
    "aot_inference_graph": ("forward", "partition"),
    "aot_backward_graph": ("backward", "partition"),
}
"""Phases and stages of artifacts that are graphs."""

_CODE = "inductor_output_code"
_AOT_ID = re.compile(r"AOT ID: \['(\d+)_(forward|backward|inference)'\]")
_UNSAFE = re.compile(r"[^\w.-]")
"""Characters that an FQN may contain and a file name should not."""
_WITHOUT_UNITS = ("captured", "decompiled", "inductor")
"""Stages whose lines do not name units."""


@dataclass(frozen=True)
class Listing:
    """Text of a graph, or of the code generated from it, at one stage.

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
        """File name such as ``layers.3.backward.after_planner.py``; later graphs have a number."""
        owner = "_whole" if self.unit is None else self.unit or "_root"
        number = f".graph{self.graph}" if self.graph else ""
        name = _UNSAFE.sub("_", f"{owner}{number}.{self.phase}.{self.stage}")
        return f"{name}~{self.variant + 1}.py" if self.variant else f"{name}.py"


def listings_of(artifacts: Iterable[Artifact]) -> list[Listing]:
    """Return the listings of all graphs in order; a whole step's graph also unit by unit."""
    frames: dict[Frame, list[Artifact]] = {}
    for artifact in artifacts:
        frames.setdefault(artifact.frame, []).append(artifact)
    graphs: dict[str | None, int] = {}
    found: list[Listing] = []
    for members in frames.values():
        mine = list(_of_frame(members))
        if all(listing.phase == "dynamo" for listing in mine):
            continue  # a frame without a graph of its own, which only calls other frames
        unit = mine[0].unit
        begin = graphs.get(unit, 0)
        mine = [replace(listing, graph=begin + listing.graph) for listing in mine]
        graphs[unit] = max(listing.graph for listing in mine) + 1
        found += mine
        found += [part for listing in mine if unit is None for part in _listings_by_unit(listing)]
    return list(_with_unique_names(found))


def _with_unique_names(listings: Iterable[Listing]) -> Iterator[Listing]:
    """Number listings of the same file name; some file systems ignore case."""
    taken: Counter[str] = Counter()
    for listing in listings:
        name = listing.file_name.lower()
        yield replace(listing, variant=taken[name])
        taken[name] += 1


def _of_frame(artifacts: Sequence[Artifact]) -> Iterator[Listing]:
    """Yield the listings of one compiled frame, its graphs numbered from 0."""
    # In graph mode a frame is a whole step, and artifacts of ours show more than those of torch.
    is_whole_step = any(a.name.startswith(PREFIX) and a.name != DECOMPILED for a in artifacts)
    unit = None if is_whole_step else artifacts[0].unit
    placed: tuple[str, str] | None  # phase and stage
    counts: dict[tuple[str, str], int] = {}
    ids: dict[str, int] = {}
    for artifact in artifacts:
        aot = _AOT_ID.search(artifact.text) if artifact.name == _CODE else None
        if artifact.name in _DYNAMO_STAGES:
            placed = _DYNAMO_STAGES[artifact.name]
        elif is_whole_step:
            phase, _, stage = artifact.name.removeprefix(PREFIX).partition(".")
            placed = (phase, stage) if stage and artifact.name.startswith(PREFIX) else None
        elif artifact.name == _CODE:
            is_backward = aot is not None and aot[2] == "backward"
            placed = ("backward" if is_backward else "forward", "inductor")
        else:
            placed = _AOT_STAGES.get(artifact.name)
        if placed is None:
            continue
        graph = counts.get(placed, 0)
        counts[placed] = graph + 1
        # Inductor's segments are compiled in the order in which they run, so a backward's come in
        # reverse: the AOT id gives both phases of a segment the same number.
        if aot is not None:
            graph = ids.setdefault(aot[1], len(ids))
        text = artifact.text.replace("class <lambda>(", "class Graph(")  # to be valid Python
        yield Listing(unit, graph, *placed, text)


def _listings_by_unit(whole: Listing) -> Iterator[Listing]:
    """Yield the part of each unit in the graph of a whole step."""
    if whole.stage in _WITHOUT_UNITS:
        return
    lines = [Line.parse(line) for line in whole.text.splitlines()]
    for unit in units_in(lines):
        text = dedent("\n".join(map(str, of_unit(lines, unit))) + "\n")
        yield replace(whole, unit=unit, text=text)


# -- decompiled ------------------------------------------------------------------------------------
# Dynamo's bytecode, decompiled to Python by depyf.


def find_depyf() -> ModuleType | None:
    """Return the decompiler if it is installed."""
    try:
        import depyf
    except ImportError:
        return None
    return depyf  # type: ignore[no-any-return]


@contextmanager
def emit_decompiled(depyf: ModuleType | None) -> Iterator[None]:
    """Emit the decompiled code of every frame that Dynamo compiles inside; nothing without depyf.

    Dynamo's own bytecode runs, so a bug of the decompiler changes no result.
    """
    if depyf is None:
        yield
        return

    def hook(code: CodeType, new_code: CodeType) -> None:
        emit(DECOMPILED, lambda: _decompile(depyf, code, new_code))

    # Undocumented, but the only access to the bytecode that Dynamo generates.
    handle = torch._dynamo.convert_frame.register_bytecode_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _decompile(depyf: ModuleType, code: CodeType, new_code: CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 has co_qualname
    where = f"# {name}, {code.co_filename}:{code.co_firstlineno}\n"
    try:
        return where + str(depyf.decompile(new_code))
    except Exception as error:  # depyf raises errors of many kinds; none may stop the user's step
        return f"{where}# depyf could not decompile it: {type(error).__name__}: {error}\n"
