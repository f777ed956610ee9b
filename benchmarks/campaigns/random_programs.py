"""Random programs of users' calls in all three modes, compared with one process.

A program is a random model with units in random places, and ten or more calls: steps,
accumulation, evaluation, clipping, freezing, summoning, state dicts, checkpoints, copies, other
batch sizes, and exceptions that are caught (``tests/support/programs.py``). One in three has equal
units whose results depend on numbers and flags that change between steps, set by the user or by the
root, units that fill lists and dicts, and batch norms, with Inductor in hooks mode
(``tests/support/unit_kinds.py``). Of the others two in three have a theme: outputs that are views
and change in place, losses on stored tensors, detached inputs, containers, values and
``requires_grad`` that change between forwards and backwards, teachers. Every output, gradient, norm
and value is compared with those of one process that sees all ranks' batches, under SGD. A themed
program may also end with an error of this package's own that comes before values or gradients
change; how often each kind of behaviour ran, and was refused, is counted. A program that differs
runs again in float64, to 1e-8 instead of 1e-4: what is the same there was rounding (a gradient that
cancels, outputs that a rounding of the weights changes as much), and the record lists it apart. A
program ends where the reference's outputs or gradients grow so large that its own rounding would
show.

    python benchmarks/campaigns/random_programs.py [--programs 2000] [--minutes 60] [--json FILE]
    python benchmarks/campaigns/random_programs.py --programs 1 --first SEED --shrink 100
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
from programs import KINDS, Program, Result, draw, run_program, shrink

from benchmarks.campaigns.support import forget_synced, rank_pool
from benchmarks.command_line import at_least, output_file
from benchmarks.measure.report import record, write

WORLD_SIZE = 2
TIMEOUT_S = 300.0
ENOUGH = 500
"""Programs after which every kind must have run."""


def result_of(pool: RankPool, program: Program) -> Result:
    """What is wrong with a program on any rank; perhaps a traceback."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = pool.run(run_program, WORLD_SIZE, program, folder, timeout=TIMEOUT_S)
        except RankFailedError as error:
            pool.stop()
            return Result([str(error)], crashed=True)
        finally:
            forget_synced()
    wrong = dict.fromkeys(text for of_rank in found for text in of_rank.wrong)
    return found[0]._replace(wrong=list(wrong))


def run(first: int, number: int, minutes: float, tries: int = 0) -> dict[str, Any]:
    """Run programs by their seeds, at most so long, and print those that fail.

    Args:
        first: seed of the first program.
        number: how many programs run.
        minutes: after which no program starts.
        tries: how many smaller programs are tried for each that fails.

    Returns:
        How many ran, by mode; how many ended early, as outputs or gradients grew too large; how
        many programs exercised each kind, by mode and outcome; kinds that none exercised; which
        were refused; which failed, and how; which differed in float32 only; seconds that it took.
    """
    began = time.monotonic()
    modes: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    lists: dict[str, list[dict[str, Any]]] = {"refused": [], "failed": [], "rounded": []}
    ended_early = 0
    with rank_pool() as pool:

        def fails(program: Program) -> bool:
            """Whether it is wrong, and not by rounding."""
            result = result_of(pool, program)
            if result.crashed or not result.wrong:
                return result.crashed
            return bool(result_of(pool, replace(program, in_float64=True)).wrong)

        for seed in range(first, first + number):
            if time.monotonic() - began > 60 * minutes:
                break
            program = draw(seed)
            modes[program.mode] += 1
            result = result_of(pool, program)
            ended_early += result.has_left_range
            for kind in result.ran:
                kinds[kind][f"{program.mode}, refused" if result.refused else program.mode] += 1
            if result.refused:
                lists["refused"].append({"seed": seed, "error": result.refused})
            if result.wrong:
                outcome = "failed" if fails(program) else "rounded"
                smaller = shrink(program, fails, tries if outcome == "failed" else 0)
                found = {"seed": seed, "program": repr(smaller), "wrong": result.wrong}
                lists[outcome].append(found)
                print(f"seed {seed} {outcome}: {smaller}", *result.wrong, sep="\n", flush=True)
    return {
        "first": first,
        "programs": modes.total(),
        "by_mode": dict(modes),
        "ended_early": ended_early,
        "kinds": {kind: dict(count) for kind, count in kinds.items()},
        "not_exercised": [kind for kind, count in kinds.items() if not count],
        **lists,
        "seconds": round(time.monotonic() - began),
    }


def main() -> None:
    """Run the campaign; exit code 1 if a program failed, or many never exercised a kind."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=at_least(1), default=2000)
    parser.add_argument("--first", type=at_least(0), default=0, help="seed of the first one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most")
    parser.add_argument(
        "--shrink", type=at_least(0), default=0, help="smaller programs to try for one that fails"
    )
    parser.add_argument("--json", type=output_file)
    arguments = parser.parse_args()
    results = run(arguments.first, arguments.programs, arguments.minutes, arguments.shrink)
    for kind, count in results["kinds"].items():
        print(f"{kind}: {', '.join(f'{how} {n}' for how, n in sorted(count.items())) or 'never'}")
    print(
        f"{results['programs']} programs, {len(results['failed'])} failed, "
        f"{len(results['refused'])} were refused, "
        f"{len(results['rounded'])} differed in float32 only, {results['seconds']} s"
    )
    for error, number in Counter(one["error"] for one in results["refused"]).most_common():
        print(f"refused {number}: {error}")
    if arguments.json is not None:
        write(arguments.json, record("random programs", **results))
    never = results["programs"] >= ENOUGH and results["not_exercised"]
    sys.exit(bool(results["failed"] or never))


if __name__ == "__main__":
    main()
