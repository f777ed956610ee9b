"""Operations through the store while a rank is late, counted with simulated ranks over TCP.

Each simulated rank has a connection of its own to one TCP store. The number is the most that one
of the waiting ranks makes; it does not depend on how many they are.

    python benchmarks/campaigns/store_traffic.py [--ranks 8,64,512] [--minutes 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from simulated_ranks import operations_of_waiting_ranks, simulated_ranks

from benchmarks.command_line import numbers, output_file
from benchmarks.measure.report import record, table, write


def count(size: int, minutes: int, runs_ahead: bool) -> dict[str, Any]:
    """Operations between so many ranks of which one is late."""
    with simulated_ranks(size, over_tcp=True) as ranks:
        most = operations_of_waiting_ranks(ranks, 60 * minutes, runs_ahead)
    return {
        "waits": "devices" if runs_ahead else "hosts",
        "ranks": size,
        "operations": most,
        "operations a minute": round(most / minutes, 1),
    }


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=numbers, default=[8, 64, 512])
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # of the late rank
    rows = [
        count(size, arguments.minutes, runs_ahead)
        for runs_ahead in (False, True)
        for size in arguments.ranks
    ]
    print(table(list(rows[0]), [list(map(str, row.values())) for row in rows]))
    if arguments.json is not None:
        write(arguments.json, record("store traffic", rows=rows))


if __name__ == "__main__":
    main()
