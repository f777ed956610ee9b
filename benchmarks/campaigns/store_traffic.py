"""Operations and bytes through the store, counted with simulated ranks.

Ranks are threads over one store that counts. Operations include the repeated ones of ranks that
wait, which depend on the machine: thousands of threads share one interpreter. ``looked_at`` is the
number of different keys that a rank reads, writes or asks for, summed over ranks.

    python benchmarks/campaigns/store_traffic.py [--ranks 8,64,512,4096] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from simulated_ranks import simulate
from store_protocols import PROTOCOLS

from benchmarks.command_line import numbers, output_file
from benchmarks.measure.report import record, table, write


def count(name: str, size: int) -> dict[str, Any]:
    """Traffic of one protocol between so many ranks."""
    began = time.monotonic()
    found, traffic = simulate(size, PROTOCOLS[name])
    messages = {str(one) for one in found if isinstance(one, Exception)}
    return {
        "protocol": name,
        "ranks": size,
        "errors": sorted(messages),
        "looked_at": traffic.looked_at,
        "operations": traffic.operations,
        "bytes": traffic.num_bytes,
        "seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=numbers, default=[8, 64, 512, 4096])
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    rows = []
    for name in PROTOCOLS:
        for size in arguments.ranks:
            rows.append(count(name, size))
            print(rows[-1], flush=True)
    header = [key for key in rows[0] if key != "errors"]
    print(table(header, [[str(row[key]) for key in header] for row in rows]))
    if arguments.json is not None:
        write(arguments.json, record("store traffic", rows=rows))


if __name__ == "__main__":
    main()
