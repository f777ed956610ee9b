"""Step time while a checkpoint is written in the background, against steps without, in one run.

Each round, for each row: some steps; then a save begins and steps go on until it is complete on all
ranks. A step's time is that of the slowest rank. ``during`` is the mean of the steps from the call
on, the call included, over the median of the steps before; ``call`` is what the call itself takes,
in such steps; ``blocking`` what the same save takes where training waits for it.

    python benchmarks/saving.py [--decoder 29m] [--world_size 2] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input
from benchmarks.measure.ranks import become_ranks, process_group
from benchmarks.measure.report import record, table, write
from benchmarks.peers import Setting, Trainee, named
from benchmarks.workloads.catalogue import DECODER_SIZES, decoder
from benchmarks.workloads.decoder import DecoderSizes
from fsdp_dynamo import checkpoint

BEFORE, WARMUP = 6, 3


class Saver(Protocol):
    """How one row saves."""

    def begin(self, trainee: Trainee, step: int) -> None:
        """Begin to save, in the background."""

    def is_done(self) -> bool:
        """Whether this rank has saved."""

    def finish(self) -> None:
        """Wait for it; raises what it has met."""

    def blocking(self, trainee: Trainee, step: int) -> None:
        """Save, and wait."""


class Ours:
    """``fsdp_dynamo.checkpoint``: checksums, read back, made current atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saving: checkpoint.Saving | None = None

    def begin(self, trainee: Trainee, step: int) -> None:
        self._saving = checkpoint.async_save(
            self.folder, trainee.model, trainee.optimizer, step=step, keep_last=1
        )

    def is_done(self) -> bool:
        return self._saving is None or self._saving.is_done()

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def blocking(self, trainee: Trainee, step: int) -> None:
        checkpoint.save(self.folder, trainee.model, trainee.optimizer, step=step, keep_last=1)


class Dcp:
    """``torch.distributed.checkpoint.async_save`` of FSDP2's states, in a thread; overwrites."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = dist.new_group(backend="gloo")
        self._future: Any = None

    def _state(self, trainee: Trainee) -> dict[str, Any]:
        model, optimizer = get_state_dict(trainee.model, trainee.optimizer)
        return {"model": model, "optim": optimizer}

    def begin(self, trainee: Trainee, step: int) -> None:
        self._future = dcp.async_save(
            self._state(trainee), checkpoint_id=self.folder, process_group=self.group
        )

    def is_done(self) -> bool:
        return self._future is None or self._future.done()

    def finish(self) -> None:
        if self._future is not None:
            self._future.result()

    def blocking(self, trainee: Trainee, step: int) -> None:
        dcp.save(self._state(trainee), checkpoint_id=self.folder, process_group=self.group)


ROWS: dict[str, Callable[[Path], Saver]] = {"ours": Ours, "fsdp2": Dcp}
TITLES = {"ours": "fsdp_dynamo, checkpoint.async_save", "fsdp2": "FSDP2, dcp.async_save"}


def slowest_ms(seconds: float) -> float:
    """The largest of all ranks, in ms."""
    value = torch.tensor([seconds * 1e3])
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def timed(act: Callable[[], object]) -> float:
    """Milliseconds, of the slowest rank."""
    began = time.perf_counter()
    act()
    return slowest_ms(time.perf_counter() - began)


class Row:
    """One way of saving, with its model."""

    def __init__(self, key: str, setting: Setting, folder: Path) -> None:
        self.trainee = named([key])[0].train(setting)
        self.saver = ROWS[key](folder / key)
        self.setting = setting
        self.step = 0

    def train(self) -> None:
        """One step."""
        batch = self.setting.workload.batch_of(dist.get_rank(), self.step, self.setting.device)
        self.trainee.backward(self.trainee.forward(batch))
        self.trainee.update()
        self.step += 1

    def begin_and_train(self) -> float:
        """The call and one step; returns what the call took, in ms, on this rank."""
        began = time.perf_counter()
        self.saver.begin(self.trainee, self.step)
        called = time.perf_counter() - began
        self.train()
        return called * 1e3

    def round(self) -> dict[str, float]:
        """Ratios of one round."""
        before = statistics.median(timed(self.train) for _ in range(BEFORE))
        calls: list[float] = []
        during = [timed(lambda: calls.append(self.begin_and_train()))]
        while slowest_ms(not self.saver.is_done()) > 0:
            during.append(timed(self.train))
        self.saver.finish()
        blocking = timed(lambda: self.saver.blocking(self.trainee, self.step))
        return {
            "step_ms": before,
            "during": statistics.fmean(during) / before,
            "steps": float(len(during)),
            "call": slowest_ms(calls[0] / 1e3) / before,
            "blocking": blocking / before,
        }


def measure(setting: Setting, rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """Each row's rounds, one row after the other in every round."""
    rows = {key: Row(key, setting, folder) for key in ROWS}
    for row in rows.values():
        for _ in range(WARMUP):
            row.train()
        row.round()
    found: dict[str, list[dict[str, float]]] = {key: [] for key in rows}
    for _ in range(rounds):
        for key, row in rows.items():
            found[key].append(row.round())
    return found


def report(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the spread of what matters."""
    body = []
    for key, rounds in found.items():
        columns = {name: [one[name] for one in rounds] for name in rounds[0]}
        medians = {name: statistics.median(values) for name, values in columns.items()}
        spread = f"{min(columns['during']):.2f} to {max(columns['during']):.2f}"
        shown = [f"{medians[name]:.2f}" for name in ("during", "call", "blocking")]
        body.append((TITLES[key], f"{medians['step_ms']:.0f}", shown[0], spread, *shown[1:]))
    return table(("saving", "step ms", "during", "spread", "call", "blocking"), body)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default="29m")
    parser.add_argument("--world_size", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    become_ranks(options.world_size)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    sizes: DecoderSizes = DECODER_SIZES[options.decoder]
    with one_line_on_bad_input(), process_group("cpu") as device:
        shared: list[str | None] = [None]
        with tempfile.TemporaryDirectory() as own:
            shared[0] = own
            dist.broadcast_object_list(shared)
            setting = Setting(decoder(options.decoder), device)
            found = measure(setting, options.rounds, Path(str(shared[0])))
            dist.barrier()
        if dist.get_rank() == 0:
            print(f"decoder {options.decoder} ({sizes.num_blocks} blocks), gloo")
            print(report(found))
            if options.json is not None:
                facts = {"decoder": options.decoder, "world_size": options.world_size}
                write(options.json, record("saving", **facts, rows=found, titles=TITLES))


if __name__ == "__main__":
    main()
