"""One HTML page with everything in it, to be opened from a disk."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from fsdp_dynamo.explain_views import lanes_of, measured_bars, simulated_bars
from fsdp_dynamo.findings import Findings
from fsdp_dynamo.inspection.listings import PHASES, Listing
from graph_passes.listing import ROOT

WHOLE = "whole step"


def page_of(listings: Sequence[Listing], findings: Findings, facts: str, note: str) -> str:
    """The page.

    Args:
        listings: what was compiled.
        findings: what was planned and measured, for the timeline.
        facts: a line for its head.
        note: what is to be said of the measurement.
    """
    data = {
        "facts": facts,
        "owners": _owners(listings),
        "without_code": _without_code(listings, findings),
        "units": [unit.unit for unit in findings.units],
        "timeline": _timeline(findings, note),
    }
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")  # in a <script>
    page = _read("page.html")
    for mark, content in (
        ("__STYLE__", _read("page.css")),
        ("__SCRIPT__", _read("page.js")),
        ("__DATA__", text),
    ):
        page = page.replace(mark, content, 1)
    return page


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _owners(listings: Sequence[Listing]) -> list[dict[str, Any]]:
    """What can be chosen: each graph with its phases, each of those with its stages."""
    owners: dict[tuple[str | None, int], dict[str, list[Listing]]] = {}
    for listing in listings:
        phases = owners.setdefault((listing.unit, listing.graph), {})
        phases.setdefault(listing.phase, []).append(listing)
    return [
        {
            "name": _name(unit, graph),
            "unit": unit,
            "phases": [_phase(name, phases[name]) for name in PHASES if name in phases],
        }
        for (unit, graph), phases in owners.items()
    ]


def _name(unit: str | None, graph: int) -> str:
    name = WHOLE if unit is None else unit or ROOT
    return f"{name}, graph {graph}" if graph else name


def _phase(name: str, listings: Sequence[Listing]) -> dict[str, Any]:
    stages = [{"name": x.stage, "file": x.file_name, "text": x.text.rstrip()} for x in listings]
    return {"name": name, "stages": stages}


def _without_code(listings: Sequence[Listing], findings: Findings) -> list[str]:
    """Units that ran, and for which nothing was compiled: an equal unit's code was used."""
    compiled = {listing.unit for listing in listings}
    return [unit.unit or ROOT for unit in findings.units if unit.unit not in compiled]


def _timeline(findings: Findings, note: str) -> list[dict[str, Any]]:
    sides = (
        ("measured", measured_bars(findings), note),
        ("simulated", simulated_bars(findings), "As the plan was made."),
    )
    return [
        {"title": title, "note": text, "lanes": lanes_of(bars), "bars": [asdict(b) for b in bars]}
        for title, bars, text in sides
        if bars
    ]
