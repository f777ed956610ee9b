"""Step time while a checkpoint is written in the background, relative to steps without.

In each round, each row runs some steps; then a save begins, and steps continue until it is
complete on all ranks. The time of a step is that of the slowest rank. The numbers are multiples of
the median step before the save: ``during`` is the mean of the steps from the call on, the call
included; ``call`` is the call alone; ``blocking`` is the same save while training waits for it.

    python benchmarks/saving.py [--decoder 29m] [--world_size 2] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

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
from benchmarks.measure.rounds import slowest
from benchmarks.peers import Setting, Trainee
from fsdp_dynamo import checkpoint

BEFORE, WARMUP = 6, 3


class Saver(Protocol):
    """Interface of a row's saver."""

    def begin(self, trainee: Trainee, step: int) -> None:
        """Begin to save in the background."""

    def is_done(self) -> bool:
        """Whether this rank has saved."""

    def finish(self) -> None:
        """Wait for the save; raises its error."""

    def blocking(self, trainee: Trainee, step: int) -> None:
        """Save, and wait."""


class Ours:
    """``fsdp_dynamo.checkpoint``: checksums, read back, made current atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._saving: Future[Path] | None = None

    def begin(self, trainee: Trainee, step: int) -> None:
        self._saving = checkpoint.async_save(
            self.folder, trainee.model, trainee.optimizer, step=step, keep_last=1
        )

    def is_done(self) -> bool:
        return self._saving is None or self._saving.done()

    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()

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


SAVERS: dict[str, Callable[[Path], Saver]] = {"ours": Ours, "fsdp2": Dcp}
TITLES = {"ours": "fsdp_dynamo, checkpoint.async_save", "fsdp2": "FSDP2, dcp.async_save"}


class Row(Training):
    """One way to save, with its model."""

    def __init__(self, key: str, setting: Setting, folder: Path) -> None:
        super().__init__(key, setting)
        self.saver = SAVERS[key](folder / key)

    def begin_and_train(self) -> float:
        """Begin to save and run one step; milliseconds of the call on this rank."""
        began = time.perf_counter()
        self.saver.begin(self.trainee, self.num_steps)
        called = time.perf_counter() - began
        self.train()
        return called * 1e3

    def round(self) -> Round:
        """Ratios of one round."""
        before = statistics.median(slowest_ms(self.train) for _ in range(BEFORE))
        calls: list[float] = []
        during = [slowest_ms(lambda: calls.append(self.begin_and_train()))]
        while slowest([float(not self.saver.is_done())])[0] > 0:
            during.append(slowest_ms(self.train))
        self.saver.finish()
        blocking = slowest_ms(lambda: self.saver.blocking(self.trainee, self.num_steps))
        return {
            "step_ms": before,
            "during": statistics.fmean(during) / before,
            "steps": float(len(during)),
            "call": slowest(calls)[0] / before,
            "blocking": blocking / before,
        }


def measure(setting: Setting, rounds: int, folder: Path) -> dict[str, list[Round]]:
    """Each row's rounds, the rows interleaved."""
    rows = {key: Row(key, setting, folder) for key in SAVERS}
    for row in rows.values():
        for _ in range(WARMUP):
            row.train()
        row.round()
    return interleaved({key: row.round for key, row in rows.items()}, rounds)


def measure_in_temporary_folder(setting: Setting, rounds: int) -> dict[str, list[Round]]:
    """The same in a folder of rank 0 that is removed at the end."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        rows = measure(setting, rounds, Path(shared[0]))
        dist.barrier()
    return rows


def report(rows: dict[str, list[Round]]) -> str:
    """Medians, and the spread of the steps during a save."""
    body = []
    for key, rounds in rows.items():
        columns = spreads(rounds)
        during = columns["during"]
        body.append(
            (
                TITLES[key],
                f"{columns['step_ms']['median']:.0f}",
                f"{during['median']:.2f}",
                f"{during['min']:.2f} to {during['max']:.2f}",
                f"{columns['call']['median']:.2f}",
                f"{columns['blocking']['median']:.2f}",
            )
        )
    return table(("saving", "step ms", "during", "spread", "call", "blocking"), body)


def main() -> None:
    """The command line."""
    run_script(
        "saving",
        __doc__ or "",
        measure_in_temporary_folder,
        report,
        decoder_size="29m",
        rounds=5,
        titles=TITLES,
    )


if __name__ == "__main__":
    main()
