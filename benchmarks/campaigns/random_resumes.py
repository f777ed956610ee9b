"""Random runs that are saved and resumed by every form of state dict, compared with each other.

A program saves a run whose optimizer has empty, reordered or added groups, states of several
dtypes, or parameters that were frozen since they were trained, and resumes it, perhaps under
another sharding and with gradients in the model (``tests/support/resume_programs.py``). States,
settings and parameters two steps later must be those of the run that was saved, or the error that
is due must come before the optimizer has changed.

    python benchmarks/campaigns/random_resumes.py [--programs 300] [--first 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from resume_programs import draw, run_all

from benchmarks.campaigns.support import forget_synced, rank_pool
from benchmarks.command_line import at_least, output_file
from benchmarks.measure.report import record, write

WORLD_SIZE = 2
AT_ONCE = 20


def run(first: int, number: int) -> dict[str, Any]:
    """Run programs by their seeds, and print those that fail.

    Returns:
        How many ran, by the way of resuming; for how many an error was due; which failed, and how;
        seconds that it took.
    """
    began = time.monotonic()
    programs = {seed: draw(seed) for seed in range(first, first + number)}
    failed: dict[int, list[str]] = {}
    with rank_pool() as pool:
        for begin in range(first, first + number, AT_ONCE):
            seeds = range(begin, min(begin + AT_ONCE, first + number))
            with tempfile.TemporaryDirectory() as folder:
                for found in pool.run(run_all, WORLD_SIZE, seeds, folder, timeout=600.0):
                    failed.update(found)
            forget_synced()
            for seed in sorted(failed.keys() & set(seeds)):
                print(f"seed {seed}: {programs[seed]}", *failed[seed], sep="\n", flush=True)
    return {
        "first": first,
        "programs": number,
        "by_way": dict(Counter(program.way for program in programs.values())),
        "errors_due": sum(bool(program.errors) for program in programs.values()),
        "failed": [{"seed": seed, "wrong": wrong} for seed, wrong in sorted(failed.items())],
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run the campaign; exit code 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=at_least(1), default=300)
    parser.add_argument("--first", type=at_least(0), default=0, help="seed of the first one")
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    results = run(arguments.first, arguments.programs)
    print(
        f"{results['programs']} programs, {results['errors_due']} with an error due, "
        f"{len(results['failed'])} failed, {results['seconds']} s"
    )
    if arguments.json is not None:
        write(arguments.json, record("random resumes", **results))
    sys.exit(bool(results["failed"]))


if __name__ == "__main__":
    main()
