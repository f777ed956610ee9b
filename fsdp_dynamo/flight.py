"""Explain the flight records of a run that failed.

python -m fsdp_dynamo.flight FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_dynamo.health.flight_recorder import FIELDS, explain_records


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain the records of a folder; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo.flight", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="given to record_flight()")
    folder = parser.parse_args(arguments).folder
    paths = sorted(folder.glob("rank-*.json"))
    records = [record for path in paths if (record := _record_in(path)) is not None]
    if not records:
        found = "no readable one" if paths else "none"
        print(
            f"expected rank-0.json and others in '{folder}', found {found}: call "
            "fsdp_dynamo.record_flight(folder) in every rank.",
            file=sys.stderr,
        )
        return 2
    print(explain_records(records))
    return 0


def _record_in(path: Path) -> dict[str, Any] | None:
    """Flight record in a file; ``None``, and a line on standard error, if there is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(record, dict) and record.keys() >= FIELDS:
            return record
        problem = "other content"
    print(
        f"expected a flight record in '{path}', got {problem}. It is left out: its rank may have "
        "been killed while it wrote, or something else wrote the file.",
        file=sys.stderr,
    )
    return None


if __name__ == "__main__":
    raise SystemExit(main())
