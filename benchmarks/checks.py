"""Cost of the checks for divergence: steps with and without them, alternating in one run.

With them, every collective is logged, its messages carry a tag of their own, and the watchdog is
told of each wait. All are disabled in every second step, on all ranks. ``step`` is the ratio of
paired steps of the slowest rank; ``direct`` is the time of the checks of a step's collectives in a
loop of their own, relative to the step: far more exact where the cost is small.

    python benchmarks/checks.py [--decoder small] [--world_size 2] [--rounds 9] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input
from benchmarks.measure.ranks import become_ranks, process_group
from benchmarks.measure.report import record, table, write
from benchmarks.peers import Setting, Trainee, named
from benchmarks.workloads.catalogue import DECODER_SIZES, decoder
from fsdp_dynamo.comm import collective_log, watchdog

KEYS = ("ours", "ours_graph_aot_eager")
WARMUP, PAIRS, LOOPS = 3, 10, 20_000
_ENTRIES = {
    kind: collective_log.Entry(0, 0, kind, "", 0, "forward")
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
}


def _record_nothing(group: object, kind: str, *rest: object) -> collective_log.Entry:
    return _ENTRIES[kind]


def _one_tag(kind: str, *rest: object) -> int:
    return int(kind == "all_gather")


@contextmanager
def without_checks() -> Iterator[None]:
    """No log and no watchdog; all messages of a kind have the same tag."""
    no_groups: WeakKeyDictionary[object, object] = WeakKeyDictionary()
    with (
        mock.patch.object(collective_log, "record", _record_nothing),
        mock.patch.object(collective_log, "message_tag", _one_tag),
        mock.patch.object(watchdog, "_notice_checks", no_groups),
    ):
        yield


class Row:
    """One mode, with its model."""

    def __init__(self, key: str, setting: Setting) -> None:
        self.trainee: Trainee = named([key])[0].train(setting)
        self.setting = setting
        self.title = named([key])[0].title
        self.step = 0

    def train(self) -> float:
        """One step; its milliseconds, of the slowest rank."""
        batch = self.setting.workload.batch_of(dist.get_rank(), self.step, self.setting.device)
        self.step += 1
        dist.barrier()
        began = time.perf_counter()
        self.trainee.backward(self.trainee.forward(batch))
        self.trainee.update()
        took = torch.tensor([(time.perf_counter() - began) * 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item()

    def collectives(self) -> int:
        """Of one step."""
        before = sum(count for _, count, _ in collective_log.recent_by_group())
        self.train()
        return sum(count for _, count, _ in collective_log.recent_by_group()) - before

    def round(self) -> dict[str, float]:
        """Pairs of steps, in turn."""
        checked, bare = [], []
        for _ in range(PAIRS):
            checked.append(self.train())
            with without_checks():
                bare.append(self.train())
        number = self.collectives()
        step = statistics.median(bare)
        direct = number * microseconds_of_a_check() / 1e3 / step
        ratio = statistics.median(checked) / step
        return {"step_ms": step, "ratio": ratio, "collectives": float(number), "direct": direct}


def microseconds_of_a_check() -> float:
    """To log a collective, make its tag, and begin and end its wait for the watchdog."""
    group = dist.group.WORLD
    assert group is not None
    began = time.perf_counter()
    for number in range(LOOPS):
        label = f"blocks.{number % 8}"
        collective_log.record(group, "all_gather", label, 4096)
        collective_log.message_tag("all_gather", label, 4096, "forward")
        watchdog._watchdog.begin(group)
        watchdog._watchdog.end()
    return (time.perf_counter() - began) / LOOPS * 1e6


def measure(setting: Setting, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Each row's rounds, one row after the other in every round."""
    rows = [Row(key, setting) for key in KEYS]
    for row in rows:
        for _ in range(WARMUP):
            row.train()
    found: dict[str, list[dict[str, float]]] = {row.title: [] for row in rows}
    for _ in range(rounds):
        for row in rows:
            found[row.title].append(row.round())
    return found


def report(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the spread of the ratio."""
    body = []
    for title, rounds in found.items():
        columns = {name: [one[name] for one in rounds] for name in rounds[0]}
        median = {name: statistics.median(values) for name, values in columns.items()}
        spread = f"{min(columns['ratio']):.3f} to {max(columns['ratio']):.3f}"
        direct = f"{median['direct'] * 100:.3f} %"
        numbers = (f"{median['step_ms']:.1f}", f"{median['collectives']:.0f}")
        body.append((title, *numbers, f"{median['ratio']:.3f}", spread, direct))
    return table(("mode", "step ms", "collectives", "step", "spread", "direct"), body)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default="small")
    parser.add_argument("--world_size", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    become_ranks(options.world_size)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with one_line_on_bad_input(), process_group("cpu") as device:
        found = measure(Setting(decoder(options.decoder), device), options.rounds)
        if dist.get_rank() == 0:
            print(f"decoder {options.decoder}, {options.world_size} ranks, gloo")
            print(report(found))
            if options.json is not None:
                facts = {"decoder": options.decoder, "world_size": options.world_size}
                write(options.json, record("checks", **facts, rows=found))


if __name__ == "__main__":
    main()
