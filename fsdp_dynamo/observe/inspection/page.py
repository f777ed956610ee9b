"""HTML page of ``inspect_graphs``: a single file that a browser opens from the disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

from fsdp_dynamo.observe.explanation import StepReport
from fsdp_dynamo.observe.inspection.listings import (
    PHASE_DESCRIPTIONS,
    PHASES,
    Listing,
    initial_stage,
    is_changed,
)
from fsdp_dynamo.observe.timeline import lanes_of, measured_bars, simulated_bars
from graph_passes.text.listing import ROOT

WHOLE = "whole step"


@dataclass(frozen=True)
class ShownStep:
    """Step that the page shows; ``name`` is that of the model if there are several."""

    report: StepReport
    name: str = ""
    note: str = ""


def render_page(
    listings: Sequence[Listing],
    steps: Sequence[ShownStep],
    subtitle: str,
    descriptions: Mapping[str, str],
) -> str:
    """Return the page's HTML, with the last step of each model and a line on each stage."""
    owners = _by_owner(listings)
    units = [*dict.fromkeys(unit.unit for step in steps for unit in step.report.units)]
    data = {
        "subtitle": subtitle,
        "owners": [_owner(*key, phases) for key, phases in owners.items()],
        "start": _initial_place(owners),
        "phases": PHASE_DESCRIPTIONS,
        "stages": dict(descriptions),
        "without_code": _without_code(listings, units),
        "root": ROOT,
        "units": units,
        "timeline": [side for step in steps for side in _timelines(step)],
    }
    # '</script' would end the page's script, and '<!--' or '<script' would change what ends it.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = _read("page.html")
    for placeholder, content in (
        ("__STYLE__", _read("page.css")),
        ("__SCRIPT__", _read("page.timeline.js") + _read("page.js")),
        ("__DATA__", text),
    ):
        page = page.replace(placeholder, content, 1)
    return page


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_Owner = tuple[str | None, int]
_Phases = dict[str, list[Listing]]


def _by_owner(listings: Sequence[Listing]) -> dict[_Owner, _Phases]:
    """Group listings by unit and graph, then by phase."""
    owners: dict[_Owner, _Phases] = {}
    for listing in listings:
        phases = owners.setdefault((listing.unit, listing.graph), {})
        phases.setdefault(listing.phase, []).append(listing)
    return owners


def _owner(unit: str | None, graph: int, phases: _Phases) -> dict[str, Any]:
    found = [_phase(name, phases[name]) for name in PHASES if name in phases]
    return {"name": _name(unit, graph), "unit": unit, "phases": found}


def _initial_place(owners: Mapping[_Owner, _Phases]) -> dict[str, Any]:
    """Return the graph and phase that the page opens at: the first of ``_candidates``."""
    return next(
        ({"owner": place, "phase": phase} for place, phase in _candidates(owners)),
        {"owner": 0, "phase": None},
    )


def _candidates(owners: Mapping[_Owner, _Phases]) -> Iterator[tuple[int, str]]:
    """Yield graphs and phases to open at: changed ones of units, other changed ones, of units."""
    is_unit = [bool(unit) for unit, _ in owners]
    for wants_change, wants_unit in ((True, True), (True, False), (False, True)):
        for phase in reversed(PHASES):
            for place, phases in enumerate(owners.values()):
                listings = phases.get(phase)
                if not listings or is_unit[place] != wants_unit:
                    continue
                if not wants_change or is_changed(listings, initial_stage(listings)):
                    yield place, phase


def _name(unit: str | None, graph: int) -> str:
    name = WHOLE if unit is None else unit or ROOT
    return f"{name}, graph {graph}" if graph else name


def _phase(name: str, listings: Sequence[Listing]) -> dict[str, Any]:
    stages = [{"name": x.stage, "file": x.file_name, "text": x.text.rstrip()} for x in listings]
    return {"name": name, "stages": stages, "initial": initial_stage(listings)}


def _without_code(listings: Sequence[Listing], units: Sequence[str]) -> list[str]:
    """Return the units without listings, which ran code that was compiled for an equal unit."""
    compiled = {listing.unit for listing in listings}
    return [unit for unit in units if unit not in compiled]


def _timelines(step: ShownStep) -> list[dict[str, Any]]:
    report = step.report
    sides = (
        ("measured", measured_bars(report), step.note, report.cuts),
        ("simulated", simulated_bars(report), "Simulated by the planner.", ()),
    )
    return [
        {
            "title": f"{step.name} {title}".strip(),
            "note": text,
            "lanes": lanes_of(bars),
            "bars": [asdict(bar) for bar in bars],
            "cuts": [asdict(cut) for cut in cuts],
        }
        for title, bars, text, cuts in sides
        if bars
    ]
