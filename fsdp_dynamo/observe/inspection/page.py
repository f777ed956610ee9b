"""One HTML page with everything in it, to be opened from a disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from fsdp_dynamo.observe.explanation import Findings
from fsdp_dynamo.observe.explanation_views import lanes_of, measured_bars, simulated_bars
from fsdp_dynamo.observe.inspection.listings import PHASES, Listing
from fsdp_dynamo.observe.inspection.recorded import Cut
from fsdp_dynamo.observe.inspection.stages import MEANING_OF_PHASES, is_change, telling
from graph_passes.text.listing import ROOT

WHOLE = "whole step"


@dataclass(frozen=True)
class Recorded:
    """What the timeline draws.

    Attributes:
        findings: what was planned and measured.
        note: what is to be said of the measurement.
        cuts: what is cut out of the measured step.
    """

    findings: Findings
    note: str = ""
    cuts: tuple[Cut, ...] = ()


def page_of(
    listings: Sequence[Listing], recorded: Recorded, facts: str, meanings: Mapping[str, str]
) -> str:
    """The page.

    Args:
        listings: what was compiled.
        recorded: what was planned and measured.
        facts: a line for its head.
        meanings: one line about each stage.
    """
    owners = _by_owner(listings)
    findings = recorded.findings
    data = {
        "facts": facts,
        "owners": [_owner(*key, phases) for key, phases in owners.items()],
        "start": _start(owners),
        "phases": MEANING_OF_PHASES,
        "stages": dict(meanings),
        "without_code": _without_code(listings, findings),
        "root": ROOT,
        "units": [unit.unit for unit in findings.units],
        "timeline": _timeline(recorded),
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # in a <script>
    page = _read("page.html")
    for mark, content in (
        ("__STYLE__", _read("page.css")),
        ("__SCRIPT__", _read("page.timeline.js") + _read("page.js")),
        ("__DATA__", text),
    ):
        page = page.replace(mark, content, 1)
    return page


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_Owner = tuple[str | None, int]
_Phases = dict[str, list[Listing]]


def _by_owner(listings: Sequence[Listing]) -> dict[_Owner, _Phases]:
    """What can be chosen: each graph with its phases, each of those with its stages."""
    owners: dict[_Owner, _Phases] = {}
    for listing in listings:
        phases = owners.setdefault((listing.unit, listing.graph), {})
        phases.setdefault(listing.phase, []).append(listing)
    return owners


def _owner(unit: str | None, graph: int, phases: _Phases) -> dict[str, Any]:
    found = [_phase(name, phases[name]) for name in PHASES if name in phases]
    return {"name": _name(unit, graph), "unit": unit, "phases": found}


def _start(owners: Mapping[_Owner, _Phases]) -> dict[str, Any]:
    """Where the page opens: what the planner did to a unit, if it did something."""
    return next(
        ({"owner": place, "phase": phase} for place, phase in _places(owners)),
        {"owner": 0, "phase": None},
    )


def _places(owners: Mapping[_Owner, _Phases]) -> Iterator[tuple[int, str]]:
    """The most telling first."""
    is_unit = [bool(unit) for unit, _ in owners]
    for wants_change, wants_unit in ((True, True), (True, False), (False, True)):
        for phase in reversed(PHASES):
            for place, phases in enumerate(owners.values()):
                listings = phases.get(phase)
                if not listings or is_unit[place] != wants_unit:
                    continue
                if not wants_change or is_change(listings, telling(listings)):
                    yield place, phase


def _name(unit: str | None, graph: int) -> str:
    name = WHOLE if unit is None else unit or ROOT
    return f"{name}, graph {graph}" if graph else name


def _phase(name: str, listings: Sequence[Listing]) -> dict[str, Any]:
    stages = [{"name": x.stage, "file": x.file_name, "text": x.text.rstrip()} for x in listings]
    return {"name": name, "stages": stages, "telling": telling(listings)}


def _without_code(listings: Sequence[Listing], findings: Findings) -> list[str]:
    """Units that ran, and for which nothing was compiled: an equal unit's code was used."""
    compiled = {listing.unit for listing in listings}
    return [unit.unit for unit in findings.units if unit.unit not in compiled]


def _timeline(recorded: Recorded) -> list[dict[str, Any]]:
    findings = recorded.findings
    sides = (
        ("measured", measured_bars(findings), recorded.note, recorded.cuts),
        ("simulated", simulated_bars(findings), "As the plan was made.", ()),
    )
    return [
        {
            "title": title,
            "note": text,
            "lanes": lanes_of(bars),
            "bars": [asdict(bar) for bar in bars],
            "cuts": [asdict(cut) for cut in cuts],
        }
        for title, bars, text, cuts in sides
        if bars
    ]
