"""Graph breaks and recompiles in a user's code, read from Dynamo's artifacts."""

from __future__ import annotations

import json
import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fsdp_dynamo.dynamo.artifacts import Artifact, Frame
from fsdp_dynamo.observe import training_step

_PLACE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in .*\n\s*(.+)', re.MULTILINE)
_TRACEBACK = re.compile(r"^(?:User code traceback|.*in the following user code):\n", re.MULTILINE)
_REASON = re.compile(r"^Graph Break Reason: (.+(?:\n\n?.+)?)", re.MULTILINE)
_HOOKED = "_fsdp_run_hooked("  # the call that no graph holds
_OF_UNIT = "a unit that is called here is no part of the graph, as it changes Python objects, say"
_LIBRARIES = str(Path(torch.__file__).parent) + os.sep, sysconfig.get_path("stdlib") + os.sep
_OURS = tuple(
    str(Path(__file__).parents[2] / name) + os.sep for name in ("fsdp_dynamo", "graph_passes")
)


@dataclass(frozen=True)
class GraphBreak:
    """A place in the user's code where graphs end.

    Attributes:
        file: of the user's code; empty if Dynamo names none.
        line: number in it, from 1.
        code: on that line.
        reason: Dynamo's, in one line.
        unit: FQN of the first unit in whose body it was met, in hooks mode; ``""`` for the root.
    """

    file: str
    line: int
    code: str
    reason: str
    unit: str


@dataclass(frozen=True)
class Recompile:
    """A graph that was compiled again.

    Attributes:
        unit: as in ``GraphBreak``.
        guard: the check that failed: ``"tensor 'x' size mismatch at index 0. expected 3, ..."``.
    """

    unit: str
    guard: str


def graph_breaks_in(artifacts: Iterable[Artifact]) -> tuple[GraphBreak, ...]:
    """Places where graphs end, once each, in the order in which Dynamo met them.

    Of those in this package the user sees the calls of units that are no part of the graph around
    them. (Where a graph has ended in a module, the functions around it are compiled one by one.)
    """
    found: dict[tuple[str, int, str], GraphBreak] = {}
    for artifact in artifacts:
        one = _break(artifact) if artifact.name == "dynamo_graph_break_reason" else None
        if one is not None:
            place = (one.file, one.line, "" if one.file else one.reason)
            found.setdefault(place, one)
    return tuple(found.values())


def _break(artifact: Artifact) -> GraphBreak | None:
    """The graph break that an artifact describes; ``None`` if it is in this package."""
    text = artifact.text
    reason = _REASON.search(text)
    lines = reason[1].strip().splitlines() if reason else [text.strip().partition("\n")[0]]
    why, place = lines[-1].strip(), _PLACE.search(text)
    stack = _stack_in(text) or ([(place[1], place[2], "")] if place else [])
    file, line, code = stack[-1] if stack else ("", "0", "")
    if file.startswith(_OURS):
        callers = [frame for frame in stack if not frame[0].startswith(_OURS)]
        if _HOOKED not in code or not callers:
            return None
        (file, line, code), why = callers[-1], _OF_UNIT
    return GraphBreak(file, int(line), code.strip(), why, artifact.unit)


def _stack_in(text: str) -> list[tuple[str, str, str]]:
    """File, line and code of frames that are the user's or this package's, outermost first."""
    header = _TRACEBACK.search(text)
    if header is None:
        return []
    frames = _FRAME.findall(text[header.end() :].partition("\n\n")[0])
    ours = [i for i, (file, *_) in enumerate(frames) if file == training_step.__file__]
    return [f for f in frames[ours[-1] + 1 if ours else 0 :] if not _is_library(f[0])]


def _is_library(file: str) -> bool:
    """Whether a file is torch's or the standard library's, where nobody looks for a break."""
    return file.startswith(_LIBRARIES) and "site-packages" not in file.removeprefix(_LIBRARIES[0])


def recompiles_in(artifacts: Sequence[Artifact]) -> tuple[Recompile, ...]:
    """Units and guards of the recompiles, each once, in the order in which they came.

    Args:
        artifacts: of one backend. That other backends have compiled the same code is no recompile.
    """
    compiled: set[Frame] = set()
    found: dict[Recompile, None] = {}
    for artifact in artifacts:
        if artifact.name == "recompile_reasons":
            guard = _failed_guard(artifact.text, compiled)
            if guard:
                found[Recompile(artifact.unit, guard)] = None
        compiled.add(artifact.frame)
    return tuple(found)


def _failed_guard(text: str, compiled: set[Frame]) -> str:
    """The guard that failed in the newest of the compiled graphs, without the stack behind it."""
    reasons: Sequence[str] = json.loads(text) if text.lstrip().startswith("[") else [text]
    for reason in reasons:
        number = re.match(r"(\d+)/(\d+): ", reason)
        if number is None or Frame(int(number[1]), int(number[2])) not in compiled:
            continue
        guard, _, stack = reason[number.end() :].strip().partition("\n")
        frames = _FRAME.findall(stack)
        if frames and frames[-1][0].startswith(_OURS):
            return ""
        check, _, comment = guard.partition("  #")
        code = comment.rpartition("  #")[0].strip()
        return f"{check.strip()}  # {code}" if code else check.strip()
    return ""


__all__ = ["GraphBreak", "Recompile"]
