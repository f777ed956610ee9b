"""Explanation of the flight records of a run that failed.

python -m fsdp_dynamo.flight FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from fsdp_dynamo.agreement.flight_report import explain_records


def main(arguments: Sequence[str]) -> int:
    """Explain the records of a folder; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m fsdp_dynamo.flight FOLDER", file=sys.stderr)
        return 2
    records = [
        json.loads(path.read_text()) for path in sorted(Path(arguments[0]).glob("rank-*.json"))
    ]
    if not records:
        print(
            f"expected rank-0.json and others in '{arguments[0]}', found none: call "
            "fsdp_dynamo.record_flight(folder) in every rank.",
            file=sys.stderr,
        )
        return 2
    print(explain_records(records))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
