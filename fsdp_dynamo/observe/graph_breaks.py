"""Where Dynamo broke a graph, and why it compiled one again: read from its artifacts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_dynamo.dynamo.artifacts import Artifact

_WHERE = re.compile(r"Graph break in user code at (.+):(\d+)$", re.MULTILINE)
_CODE = re.compile(r"in the following user code:\n(?:.*\n)*?\s*File \"(.+)\", line (\d+)")
_AGAIN = "Failed to handle graph break gracefully"
_REASON = re.compile(r"^Graph Break Reason: (.+(?:\n\n?.+)?)", re.MULTILINE)


@dataclass(frozen=True)
class GraphBreak:
    """One place at which graphs end.

    Attributes:
        file: of the user's code; empty where Dynamo names none.
        line: in it, from 1.
        code: what stands there.
        reason: Dynamo's, in a line.
        unit: FQN of the unit whose body was traced, on the hooks path; ``""`` for the root.
        count: how often.
    """

    file: str
    line: int
    code: str
    reason: str
    unit: str
    count: int


@dataclass(frozen=True)
class Recompile:
    """A graph that was compiled once more.

    Attributes:
        unit: as of ``GraphBreak``.
        guard: the check that failed: ``"tensor 'x' size mismatch at index 0. expected 3, ..."``.
        count: how often.
    """

    unit: str
    guard: str
    count: int


def graph_breaks_in(artifacts: Iterable[Artifact]) -> tuple[GraphBreak, ...]:
    """Each place once, the most frequent first."""
    texts = [(a.text, a.unit) for a in artifacts if a.name == "dynamo_graph_break_reason"]
    found = Counter(_one_break(text, unit) for text, unit in texts)
    first = {place[:2] for place in found if not place[3].startswith(_AGAIN)}
    told = {p: n for p, n in found.items() if not p[3].startswith(_AGAIN) or p[:2] not in first}
    ordered = sorted(told.items(), key=lambda item: -item[1])
    return tuple(GraphBreak(*place, count) for place, count in ordered)


def _one_break(text: str, unit: str) -> tuple[str, int, str, str, str]:
    where, reason = _WHERE.search(text) or _CODE.search(text), _REASON.search(text)
    file, line = (where[1], int(where[2])) if where else ("", 0)
    lines = reason[1].strip().splitlines() if reason else [text.strip().partition("\n")[0]]
    code = re.search(rf'File "{re.escape(file)}", line {line}, in .*\n\s*(.+)', text)
    return file, line, code[1].strip() if code and file else "", lines[-1].strip(), unit


def recompiles_in(artifacts: Iterable[Artifact]) -> tuple[Recompile, ...]:
    """Each failing guard once, the most frequent first."""
    found = Counter(
        (a.unit, _first_guard(a.text)) for a in artifacts if a.name == "recompile_reasons"
    )
    return tuple(Recompile(unit, guard, n) for (unit, guard), n in found.most_common())


def _first_guard(text: str) -> str:
    """Of the newest compiled graph, without Dynamo's number of it."""
    reasons: Sequence[str] = [text]
    if text.lstrip().startswith("["):
        reasons = json.loads(text)
    return re.sub(r"^\d+/\d+: ", "", reasons[0].strip()) if reasons else ""


__all__ = ["GraphBreak", "Recompile"]
