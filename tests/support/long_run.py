"""A long run in all three modes: what this process holds as it goes on, and every step's numbers.

Each round makes one step of a model per mode; every ``SAVE_EVERY`` rounds it evaluates, summons,
takes a state dict, and saves in the background.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import durability
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode

from fsdp_dynamo import FSDP, checkpoint
from fsdp_dynamo.core.dtensors import local_of

SAVE_EVERY = 20
_LATE_S = 2.5
_SAMPLE_S = 1.0


@dataclass(frozen=True)
class Sample:
    """What a process holds.

    Attributes:
        round: when.
        resident_kib: memory in RAM.
        descriptors: open files and sockets.
        threads: of the process.
        store_keys: in the store of the default group.
    """

    round: int
    resident_kib: int
    descriptors: int
    threads: int
    store_keys: int


Numbers = list[tuple[float, int]]
"""By mode: the loss of a round, and a checksum of this rank's parameters and states after it."""


@dataclass
class Record:
    """Of one rank.

    Attributes:
        samples: what it held, about once a second.
        numbers: by round.
    """

    samples: list[Sample]
    numbers: dict[int, Numbers]

    def held(self) -> list[dict[str, int]]:
        """The samples, as JSON."""
        return [asdict(one) for one in self.samples]


def run(
    rank: int, world_size: int, folder: str, seconds: float, until: int | None = None
) -> Record:
    """Go on from the newest checkpoints, for so many seconds or up to a round.

    Ends in the middle between two checkpoints, and with no save in progress. Each rank is late once
    at the beginning: whoever waits for a rank puts what it has issued into the store, under one key
    from then on, and would do so at any time on a busy machine.
    """
    trained = [_Trained(mode, Path(folder) / mode) for mode in MODES]
    first = trained[0].first
    record, began, sampled = Record([], {}), time.monotonic(), 0.0
    for number in _rounds(first, began + seconds, until):
        if number == first + 1 + rank:
            time.sleep(_LATE_S)
        record.numbers[number] = [one.step(rank, number) for one in trained]
        if number % SAVE_EVERY == 0 and number > first:
            for one in trained:
                one.look_and_save(rank, number)
            _forget_synced(rank)
        if time.monotonic() - sampled > _SAMPLE_S:
            sampled = time.monotonic()
            record.samples.append(_sample(number))
    return record


def _rounds(first: int, deadline: float, until: int | None) -> Iterator[int]:
    number = first
    while until is None or number <= until:
        number += 1
        yield number
        if until is None and number % SAVE_EVERY == SAVE_EVERY // 2:
            over = torch.tensor([time.monotonic() > deadline])
            dist.broadcast(over, 0)
            if over:
                return


class _Trained:
    def __init__(self, mode: str, folder: Path) -> None:
        self._folder = folder
        self._model = wrap(make_transformer(num_blocks=2))
        self._run = in_mode(self._model, mode)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)
        loaded = checkpoint.load(folder, self._model, self._optimizer, missing_ok=True)
        self.first = loaded.step if loaded else 0

    def step(self, rank: int, number: int) -> tuple[float, int]:
        loss = loss_of(self._run, batch(rank, number))
        self._optimizer.zero_grad()
        loss.backward()
        self._model.clip_grad_norm_(1.0)
        self._optimizer.step()
        return loss.item(), self._checksum()

    def look_and_save(self, rank: int, number: int) -> None:
        with torch.no_grad():
            self._run(batch(rank, number))
        with FSDP.summon_full_params(self._model, writeback=False):
            pass
        self._model.state_dict()
        arguments: dict[str, Any] = {"step": number, "keep_last": 2}
        checkpoint.async_save(self._folder, self._model, self._optimizer, **arguments).result()

    def _checksum(self) -> int:
        crc = 0
        for param in self._model.parameters():
            states = self._optimizer.state.get(param, {})
            for tensor in (param.detach(), *(states[name] for name in sorted(states))):
                crc = zlib.crc32(local_of(torch.as_tensor(tensor)).numpy().tobytes(), crc)
        return crc


def _forget_synced(rank: int) -> None:
    """The tests' own list of synced files would grow, and be read whenever a rank publishes."""
    if rank == 0:
        Path(os.environ[durability.LOG_VARIABLE]).unlink(missing_ok=True)
    dist.barrier()


def _sample(number: int) -> Sample:
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    return Sample(
        number,
        int(resident.split()[1]),
        len(os.listdir("/proc/self/fd")),  # noqa: PTH208  # its own descriptor counts each time
        len(os.listdir("/proc/self/task")),  # noqa: PTH208
        store.num_keys(),
    )
