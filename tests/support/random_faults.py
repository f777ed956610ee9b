"""Random faults in random modes, and the training in which they happen.

A ``Trial`` is data. Ranks train and save after every step; one of them has a fault.
``fault_judge`` runs trials.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import faults
import torch
from faults import Fault, FaultyTransformer
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from namespaces import join_host
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import link
from fsdp_dynamo import CheckpointError, checkpoint
from fsdp_dynamo.checkpoint import storage

STEPS = 6
_LINK_TIMEOUT_S = 5.0
_ROOM_BYTES = 5000  # left on a full disk


@dataclass(frozen=True)
class Trial:
    """A run with a fault.

    Attributes:
        seed: that it was drawn from.
        mode: of running the model.
        num_ranks: 2 to 4.
        victim: the rank with the fault.
        fault: what happens; beside the kinds of ``faults``, "disk" (full while it saves), "clock"
            (``time.time`` jumps by ``seconds``) and "cut" (the link between two hosts, for
            ``seconds``; 0: for good).
        step: in which it happens.
        in_background: whether checkpoints are written while training goes on.
    """

    seed: int
    mode: str
    num_ranks: int
    victim: int
    fault: Fault
    step: int
    in_background: bool


_KINDS = ["raise"] * 4 + ["kill"] * 4 + ["stop"] * 2 + ["disk", "clock", "cut"]
_PLACES = {"disk": "save", "clock": "data", "cut": "data"}


def draw(seed: int, without: frozenset[str] = frozenset()) -> Trial:
    """The trial of a seed.

    Args:
        without: kinds of faults that cannot be made here: "cut", "disk".
    """
    rng = random.Random(f"fault {seed}")
    mode = rng.choice(["eager", "eager", "hooks", "graph"])
    num_ranks = rng.randint(2, 4)
    kind = rng.choice([kind for kind in _KINDS if kind not in without])
    num_ranks = 2 if kind == "cut" else num_ranks
    places = [one for one in faults.PLACES if one != "trace" or mode != "eager"]
    place = _PLACES.get(kind) or rng.choice(places)
    seconds = {
        "stop": rng.uniform(5, 30),
        "clock": rng.choice([-1e6, -60.0, 60.0, 1e6]),
        "cut": rng.choice([0.0, 1.0]),
    }
    return Trial(
        seed,
        mode,
        num_ranks,
        rng.randrange(num_ranks),
        Fault(kind, place, seconds.get(kind, 0.0)),
        0 if place == "trace" else rng.randrange(1, STEPS - 1),
        rng.random() < 0.3,
    )


# -- a rank ----------------------------------------------------------------------------------------


@dataclass
class End:
    """How a rank's run ended.

    Attributes:
        losses: by step.
        saved: steps whose checkpoints were complete before the run ended.
        unsaved: messages of saves that failed; the run went on.
        error: class and message of the error that ended it; empty: none.
        at: when, by the clock of ``time.monotonic``.
    """

    losses: dict[int, float]
    saved: list[int]
    unsaved: list[str]
    error: str = ""
    at: float = 0.0


def train(rank: int, world_size: int, trial: Trial, folder: str) -> End:
    """Train from the newest checkpoint to the last step; the fault happens if there is none yet."""
    out, end = Path(folder), End({}, [], [])
    model = wrap(_model())
    run = in_mode(model, trial.mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    optimizer.register_step_pre_hook(lambda *_: faults.place("optimizer"))
    loaded = checkpoint.load(out / "saved", model, optimizer, missing_ok=True)
    has_fault = rank == trial.victim and loaded is None
    with _places_of_saving():
        try:
            for step in range(loaded.step if loaded else 0, STEPS):
                at_fault = has_fault and step == trial.step
                with _environment(trial.fault, out) if at_fault else _nothing():
                    end.losses[step] = _step(model, run, optimizer, batch(rank, step))
                    _save(out / "saved", model, optimizer, step + 1, trial.in_background, end)
        except Exception as error:
            end.error, end.at = f"{type(error).__name__}: {error}", time.monotonic()
            if rank == trial.victim:
                faults.uncaught(error)
        finally:
            faults.arm(None)
    return end


def train_over_link(
    rank: int, world_size: int, trial: Trial, folder: str, hosts: Sequence[link.Host]
) -> End:
    """``train`` with each rank on a host of its own."""
    join_host(rank, world_size, hosts[rank], Path(folder) / "store", _LINK_TIMEOUT_S)
    return train(rank, world_size, trial, folder)


def _model() -> nn.Module:
    torch.manual_seed(7)
    return FaultyTransformer(num_blocks=2)


def _step(
    model: Any, run: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor
) -> float:
    faults.place("data")
    loss = loss_of(run, tokens)
    loss.register_hook(lambda _: faults.place("hook"))
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    return loss.item()


def _save(
    folder: Path, model: nn.Module, optimizer: Any, step: int, in_background: bool, end: End
) -> None:
    try:
        if in_background:
            checkpoint.async_save(folder, model, optimizer, step=step).result()
        else:
            checkpoint.save(folder, model, optimizer, step=step)
        end.saved.append(step)
    except CheckpointError as error:
        end.unsaved.append(str(error))


@contextmanager
def _places_of_saving() -> Iterator[None]:
    write = storage.Writer.write_data

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        faults.place("save")
        return write(self, plan, planner)

    with mock.patch.object(storage.Writer, "write_data", write_data):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _environment(fault: Fault, folder: Path) -> Iterator[None]:
    """One step with the fault."""
    faults.arm(fault, folder)
    if fault.kind == "clock":
        real = time.time
        with mock.patch.object(time, "time", side_effect=lambda: real() + fault.seconds):
            yield
    elif fault.kind == "disk":
        ballast = folder / "saved" / "ballast"
        free = _free_bytes(folder / "saved")
        ballast.write_bytes(bytes(max(0, free - _ROOM_BYTES)))
        try:
            yield
        finally:
            ballast.unlink()
    else:
        yield


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def reference(rank: int, world_size: int) -> list[float]:
    """This rank's losses with DistributedDataParallel."""
    model: Any = DistributedDataParallel(make_transformer(num_blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
