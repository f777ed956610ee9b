"""Record of the campaign: one JSON file, replaced as a whole after each cell."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.measure.models.cell import Cell, Outcome, Result
from benchmarks.measure.report import machine, version


class Record:
    """Results by cell, kept in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data: dict[str, Any] = {"kind": "models", "machine": machine(), "cells": {}}
        if path.exists():
            self._data |= json.loads(path.read_text())

    @property
    def cells(self) -> Mapping[str, dict[str, Any]]:
        """What is recorded, by the cell's key."""
        cells: dict[str, dict[str, Any]] = self._data["cells"]
        return cells

    def result(self, cell: Cell) -> Result | None:
        """The result of a cell, if it has been recorded."""
        found = self.cells.get(cell.key)
        return None if found is None else Result.from_dict(found)

    def add(self, cell: Cell, result: Result, seconds: float, packages: tuple[str, ...]) -> None:
        """Record a cell and write the file, with what another run has added meanwhile."""
        if self._path.exists():
            self._data["cells"] |= json.loads(self._path.read_text())["cells"]
        self._data["cells"][cell.key] = {
            **result.as_dict(),
            "seconds": round(seconds, 1),
            "versions": {name: version(name) for name in ("torch", *packages)},
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(f".{os.getpid()}.new")
        new.write_text(_text(self._data))
        new.replace(self._path)


def _text(data: dict[str, Any]) -> str:
    """JSON with one line per cell."""
    cells = data["cells"]
    lines = [f"  {json.dumps(key)}: {json.dumps(cells[key])}" for key in sorted(cells)]
    head = json.dumps({name: value for name, value in data.items() if name != "cells"})
    return f'{head[:-1]},\n "cells": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def counts(results: Mapping[Cell, Result]) -> dict[str, dict[Outcome, int]]:
    """Number of cells by mode and outcome."""
    found: dict[str, dict[Outcome, int]] = {}
    for cell, result in results.items():
        by_outcome = found.setdefault(cell.mode, dict.fromkeys(Outcome, 0))
        by_outcome[result.outcome] += 1
    return found
