"""A long run: nothing grows, and steps are bitwise those of a run that was restarted three times.

Two ranks train one model per mode (eager, hooks, graph), with evaluation, summoning, state dicts
and checkpoints in the background every 20 rounds (``tests/support/long_run.py``). Resident memory,
file descriptors, threads and keys in the store are sampled once a second: the median of the last
fifth is compared with that of the second fifth, as the first one compiles. Then a second run makes
the same rounds and is ended three times between two checkpoints, each time with new processes.

    python benchmarks/campaigns/soak.py [--minutes 30] [--json FILE]

``--minutes`` is the length of the first run; the second one takes about as long.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from long_run import SAVE_EVERY, Numbers, Record, run
from pool import RankPool

from benchmarks.campaigns.support import rank_pool
from benchmarks.command_line import output_file
from benchmarks.measure.report import record, write

WORLD_SIZE = 2
RESTARTS = 3
GROWTH = {"resident_kib": 1.01, "descriptors": 1.0, "threads": 1.0, "store_keys": 1.0}
"""Largest ratio of late to early that counts as flat."""

_SPARE_S = 600.0


def growth(of: Record) -> dict[str, dict[str, float]]:
    """Medians of the second and of the last fifth of the samples."""
    held, fifth = of.held(), len(of.samples) // 5
    parts = {"early": held[fifth : 2 * fifth], "late": held[-fifth:]}
    return {
        name: {when: statistics.median(one[name] for one in part) for when, part in parts.items()}
        for name in GROWTH
    }


def restarted(pool: RankPool, rounds: int, limit_s: float) -> list[dict[int, Numbers]]:
    """Numbers of a run over so many rounds with new processes after each quarter, by rank."""
    found: list[dict[int, Numbers]] = [{} for _ in range(WORLD_SIZE)]
    with tempfile.TemporaryDirectory() as folder:
        for part in range(1, RESTARTS + 2):
            until = rounds * part // (RESTARTS + 1)
            answers = pool.run(run, WORLD_SIZE, folder, 0.0, until, timeout=limit_s)
            for numbers, answer in zip(found, answers, strict=True):
                numbers.update(answer.numbers)
            pool.stop()
    return found


def main() -> None:
    """Run, print what each rank held, and compare; exit code 1 if something grew or differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    seconds, began = 60 * arguments.minutes, time.monotonic()
    with rank_pool() as pool, tempfile.TemporaryDirectory() as folder:
        straight = pool.run(run, WORLD_SIZE, folder, seconds, timeout=seconds + _SPARE_S)
        first_s = round(time.monotonic() - began)
        pool.stop()
        rounds = max(straight[0].numbers)
        again = restarted(pool, rounds, 2 * seconds + _SPARE_S)
    grown = [growth(one) for one in straight]
    differing = sorted(
        {
            n
            for one, two in zip(straight, again, strict=True)
            for n in one.numbers
            if one.numbers[n] != two.get(n)
        }
    )
    is_flat = all(
        of_rank[name]["late"] <= most * of_rank[name]["early"]
        for of_rank in grown
        for name, most in GROWTH.items()
    )
    results: dict[str, Any] = {
        "seconds": first_s,
        "seconds_restarted": round(time.monotonic() - began) - first_s,
        "rounds": rounds,
        "steps": 3 * rounds,
        "saved": 3 * (rounds // SAVE_EVERY),
        "restarts": RESTARTS,
        "differing_rounds": differing,
        "is_flat": is_flat,
        "held": grown,
    }
    print(results)
    if arguments.json is not None:
        samples = [one.held()[:: max(1, len(one.samples) // 100)] for one in straight]
        write(arguments.json, record("soak", **results, samples=samples))
    sys.exit(bool(differing) or not is_flat)


if __name__ == "__main__":
    main()
