"""Random faults in random modes on 2 to 4 ranks: who is told what, when, and whether it is right.

A rank raises (in the loader, while compiling, in forward, backward, a hook, the optimizer, while
saving), is killed or stopped at such a place, its disk is full, its clock jumps, or the link is cut
(``tests/support/random_faults.py``). Each of the other ranks ends within 15 s with an error that
names it, or goes on; losses are those of DistributedDataParallel, before and after; a new run goes
on from the newest checkpoint, and none is lost.

    python benchmarks/campaigns/random_faults.py [--trials 200] [--minutes 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from namespaces import why_there_is_no_link
from random_faults import Judge, Verdict, draw

from benchmarks.campaigns.support import forget_synced, rank_pool
from benchmarks.command_line import at_least, output_file
from benchmarks.measure.report import record, write


def impossible_kinds() -> frozenset[str]:
    """Kinds of faults that cannot be made on this machine: they need root."""
    kinds = set()
    if why_there_is_no_link() is not None:
        kinds.add("cut")
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            kinds.add("disk")
        else:
            subprocess.run(["umount", folder], check=True)
    return frozenset(kinds)


def run(first: int, number: int, minutes: float) -> dict[str, Any]:
    """Run trials by their seeds, at most so long, and print each.

    Returns:
        Counts, times, and every verdict.
    """
    began, without = time.monotonic(), impossible_kinds()
    verdicts: list[Verdict] = []
    with rank_pool() as pool:
        judge = Judge(pool)
        for seed in range(first, first + number):
            if time.monotonic() - began > 60 * minutes:
                break
            verdicts.append(judge.run(draw(seed, without)))
            print(verdicts[-1], flush=True)
            forget_synced()
    return summary(verdicts) | {
        "first": first,
        "without": sorted(without),
        "seconds": round(time.monotonic() - began),
        "verdicts": [one.record() for one in verdicts],
    }


def summary(verdicts: list[Verdict]) -> dict[str, Any]:
    """Counts by kind and outcome, and how long it took until all other ranks were told."""
    told = [one.seconds for one in verdicts if one.seconds is not None]
    return {
        "trials": len(verdicts),
        "wrong": sum(bool(one.wrong) for one in verdicts),
        "outcomes": dict(Counter(f"{v.trial.fault.kind}: {v.outcome}" for v in verdicts)),
        "told_seconds": {
            "median": statistics.median(told) if told else None,
            "most": max(told, default=None),
        },
        "named_the_rank": sum(one.names_rank is True for one in verdicts),
        "had_a_message": sum(one.names_rank is not None for one in verdicts),
    }


def main() -> None:
    """Run the campaign; exit code 1 if something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=at_least(1), default=200)
    parser.add_argument("--first", type=at_least(0), default=0, help="seed of the first one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most")
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    results = run(arguments.first, arguments.trials, arguments.minutes)
    print({key: value for key, value in results.items() if key != "verdicts"})
    if arguments.json is not None:
        write(arguments.json, record("random faults", **results))
    sys.exit(bool(results["wrong"]))


if __name__ == "__main__":
    main()
