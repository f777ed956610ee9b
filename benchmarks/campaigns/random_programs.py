"""Random programs of users' calls in all three modes, compared with one process.

A program is a random model with units in random places, and ten or more calls: steps,
accumulation, evaluation, clipping, freezing, summoning, state dicts, checkpoints, copies, other
batch sizes, and exceptions that are caught (``tests/support/programs.py``). Every output, gradient,
norm and value is compared with those of one process that sees all ranks' batches, under SGD. A
program that differs runs again in float64, to 1e-8 instead of 1e-4: what is the same there was
rounding (a gradient that cancels, outputs that a rounding of the weights changes as much), and the
record lists it apart.

    python benchmarks/campaigns/random_programs.py [--programs 2000] [--minutes 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from pool import RankFailedError, RankPool
from programs import Program, Result, draw, run_program

from benchmarks.campaigns.support import forget_synced, rank_pool
from benchmarks.command_line import at_least
from benchmarks.measure.report import record, write

WORLD_SIZE = 2
TIMEOUT_S = 300.0


def result_of(pool: RankPool, program: Program) -> Result:
    """What is wrong with a program on any rank; perhaps a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = pool.run(run_program, WORLD_SIZE, program, folder, timeout=TIMEOUT_S)
        except RankFailedError as error:
            pool.stop()
            return Result([str(error)], False)
        finally:
            forget_synced()
    wrong = dict.fromkeys(text for of_rank in found for text in of_rank.wrong)
    return Result(list(wrong), found[0].has_left_range)


def run(first: int, number: int, minutes: float) -> dict[str, Any]:
    """Run programs by their seeds, at most so long, and print those that fail.

    Returns:
        How many ran, by mode; how many ended early, as their outputs grew too large; which failed,
        and how; which differed in float32 only; seconds that it took.
    """
    began = time.monotonic()
    modes: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    rounded: list[dict[str, Any]] = []
    ended_early = 0
    with rank_pool() as pool:
        for seed in range(first, first + number):
            if time.monotonic() - began > 60 * minutes:
                break
            program = draw(seed)
            modes[program.mode] += 1
            result = result_of(pool, program)
            ended_early += result.has_left_range
            if result.wrong:
                again = result_of(pool, replace(program, in_float64=True))
                found = {"seed": seed, "program": repr(program), "wrong": result.wrong}
                (failed if again.wrong else rounded).append(found)
                how = "" if again.wrong else " in float32 only"
                print(f"seed {seed}{how}: {program}", *result.wrong, sep="\n", flush=True)
    return {
        "first": first,
        "programs": modes.total(),
        "by_mode": dict(modes),
        "ended_early": ended_early,
        "failed": failed,
        "rounded": rounded,
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run the campaign; exit code 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=at_least(1), default=2000)
    parser.add_argument("--first", type=at_least(0), default=0, help="seed of the first one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = run(arguments.first, arguments.programs, arguments.minutes)
    print(
        f"{results['programs']} programs, {len(results['failed'])} failed, "
        f"{len(results['rounded'])} differed in float32 only, {results['seconds']} s"
    )
    if arguments.json is not None:
        write(arguments.json, record("random programs", **results))
    sys.exit(bool(results["failed"]))


if __name__ == "__main__":
    main()
