"""Cost of the checks for divergence: steps with and without them, alternating in one run.

The checks log every collective, tag its messages, and watch waits from a thread. All of that is
switched off for every second step, on all ranks alike. ``step`` is the ratio of paired steps on the
slowest rank; ``direct`` is the time of a step's checks in a separate loop, divided by the step,
which is far more exact for small costs.

    python benchmarks/checks.py [--decoder small] [--world_size 2] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure.rank_script import (
    Round,
    Training,
    interleaved,
    run_script,
    slowest_ms,
    spreads,
)
from benchmarks.measure.report import table
from benchmarks.peers import Setting
from fsdp_dynamo.comm import collective_log, watchdog

KEYS = ("ours", "ours_graph_aot_eager")
WARMUP, PAIRS, LOOPS = 3, 10, 20_000
_ENTRIES = {
    kind: collective_log.Entry(0, 0, kind, "", 0, "forward")
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


def _record_nothing(
    group: object, kind: str, *rest: object, **named: object
) -> collective_log.Entry:
    return _ENTRIES[kind]


def _one_tag(kind: str, *rest: object) -> int:
    return int(kind == "all_gather")


@contextmanager
def without_checks() -> Iterator[None]:
    """Log nothing, give all messages of a kind one tag, and watch no waits."""
    with (
        mock.patch.object(collective_log, "record", _record_nothing),
        mock.patch.object(collective_log, "message_tag", _one_tag),
        mock.patch.object(watchdog._watchdog, "monitor", None),
    ):
        yield


class Row(Training):
    """One mode, with its model."""

    def step_ms(self) -> float:
        """Run one step that all ranks begin together; its milliseconds on the slowest rank."""
        dist.barrier()
        return slowest_ms(self.train)

    def num_collectives(self) -> int:
        """Number of collectives of one step."""
        before = sum(count for _, count, _ in collective_log.recent_by_group())
        self.train()
        return sum(count for _, count, _ in collective_log.recent_by_group()) - before

    def round(self) -> Round:
        """Measure pairs of steps, alternately with and without checks."""
        checked, bare = [], []
        for _ in range(PAIRS):
            checked.append(self.step_ms())
            with without_checks():
                bare.append(self.step_ms())
        number = self.num_collectives()
        step = statistics.median(bare)
        direct = number * microseconds_of_a_check() / 1e3 / step
        ratio = statistics.median(checked) / step
        return {"step_ms": step, "ratio": ratio, "collectives": float(number), "direct": direct}


def microseconds_of_a_check() -> float:
    """Microseconds to log a collective, make its tag, and begin and end watching its wait."""
    group = dist.group.WORLD
    assert group is not None
    began = time.perf_counter()
    for number in range(LOOPS):
        label = f"blocks.{number % 8}"
        collective_log.record(group, "all_gather", label, 4096)
        collective_log.message_tag("all_gather", label, 4096, "forward")
        watchdog._watchdog.begin(watchdog._Wait(group, group))
        watchdog._watchdog.end()
    return (time.perf_counter() - began) / LOOPS * 1e6


def measure(setting: Setting, rounds: int) -> dict[str, list[Round]]:
    """Each row's rounds, the rows interleaved."""
    rows = [Row(key, setting) for key in KEYS]
    for row in rows:
        for _ in range(WARMUP):
            row.train()
    return interleaved({row.title: row.round for row in rows}, rounds)


def report(rows: dict[str, list[Round]]) -> str:
    """Medians, and the spread of the ratio."""
    body = []
    for title, rounds in rows.items():
        columns = spreads(rounds)
        ratio = columns["ratio"]
        body.append(
            (
                title,
                f"{columns['step_ms']['median']:.1f}",
                f"{columns['collectives']['median']:.0f}",
                f"{ratio['median']:.3f}",
                f"{ratio['min']:.3f} to {ratio['max']:.3f}",
                f"{columns['direct']['median']:.3%}",
            )
        )
    return table(("mode", "step ms", "collectives", "step", "spread", "direct"), body)


def main() -> None:
    """The command line."""
    run_script("checks", __doc__ or "", measure, report, decoder_size="small", rounds=9)


if __name__ == "__main__":
    main()
