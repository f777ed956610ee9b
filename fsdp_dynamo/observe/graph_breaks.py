"""Graph breaks and recompiles, read from Dynamo's artifacts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_dynamo.dynamo.artifacts import Artifact

_LOCATION = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_LOCATION_BELOW = re.compile(r"in the following user code:\n(?:.*\n)*?\s*File \"(.+)\", line (\d+)")
_REPEATED = "Failed to handle graph break gracefully"
_REASON = re.compile(r"^Graph Break Reason: (.+(?:\n\n?.+)?)", re.MULTILINE)


@dataclass(frozen=True)
class GraphBreak:
    """One place where a graph ended.

    Attributes:
        file: file of the user's code; empty if Dynamo names none.
        line: line number in it, from 1.
        code: the code on that line.
        reason: Dynamo's reason, in one line.
        unit: FQN of the unit whose body was traced, in hooks mode; ``""`` for the root.
        count: number of occurrences.
    """

    file: str
    line: int
    code: str
    reason: str
    unit: str
    count: int


@dataclass(frozen=True)
class Recompile:
    """A graph that was compiled again.

    Attributes:
        unit: as in ``GraphBreak``.
        guard: the check that failed: ``"tensor 'x' size mismatch at index 0. expected 3, ..."``.
        count: number of occurrences.
    """

    unit: str
    guard: str
    count: int


def graph_breaks_in(artifacts: Iterable[Artifact]) -> tuple[GraphBreak, ...]:
    """Graph breaks by place, the most frequent first."""
    texts = [(a.text, a.unit) for a in artifacts if a.name == "dynamo_graph_break_reason"]
    found = Counter(_one_break(text, unit) for text, unit in texts)
    explained = {place[:2] for place in found if not place[3].startswith(_REPEATED)}
    ordered = [
        (place, count)
        for place, count in found.most_common()
        if not place[3].startswith(_REPEATED) or place[:2] not in explained
    ]
    return tuple(GraphBreak(*place, count) for place, count in ordered)


def _one_break(text: str, unit: str) -> tuple[str, int, str, str, str]:
    where, reason = _LOCATION.search(text) or _LOCATION_BELOW.search(text), _REASON.search(text)
    file, line = (where[1], int(where[2])) if where else ("", 0)
    lines = reason[1].strip().splitlines() if reason else [text.strip().partition("\n")[0]]
    code = re.search(rf'File "{re.escape(file)}", line {line}, in .*\n\s*(.+)', text)
    return file, line, code[1].strip() if code and file else "", lines[-1].strip(), unit


def recompiles_in(artifacts: Iterable[Artifact]) -> tuple[Recompile, ...]:
    """Recompiles by failed guard, the most frequent first."""
    found = Counter(
        (a.unit, _first_guard(a.text)) for a in artifacts if a.name == "recompile_reasons"
    )
    return tuple(Recompile(unit, guard, n) for (unit, guard), n in found.most_common())


def _first_guard(text: str) -> str:
    """The failed guard of the newest compiled graph, without Dynamo's number for it."""
    reasons: Sequence[str] = [text]
    if text.lstrip().startswith("["):
        reasons = json.loads(text)
    return re.sub(r"^\d+/\d+: ", "", reasons[0].strip()) if reasons else ""


__all__ = ["GraphBreak", "Recompile"]
