"""Random faults in random modes, the training in which they happen, and judgement of both.

A ``Trial`` is data. Ranks train and save after every step; one of them has a fault.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from loops import clip
from models import Transformer, batch, loss_of, make_transformer, wrap
from modes import in_mode
from namespaces import join_host, set_link
from pool import RankFailedError, RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import link
from fsdp_dynamo import CheckpointError, checkpoint
from fsdp_dynamo.checkpoint import storage

# -- a place in the step, and what happens there once ---------------------------------------------

PLACES = ("data", "trace", "forward", "backward", "hook", "optimizer", "save")
"""``trace``: while the first graph is made; ``save``: while a rank writes its part."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank.

    Attributes:
        kind: "raise", "kill", "stop" (SIGSTOP, and SIGCONT after ``seconds``), or one that no place
            knows.
        place: one of ``PLACES``.
        seconds: how long it lasts.
    """

    kind: str
    place: str
    seconds: float = 0.0


_armed: tuple[Fault, Path] | None = None


def arm(fault: Fault | None, folder: Path | None = None) -> None:
    """Let a fault happen when this rank next comes to its place; ``None``: none.

    Args:
        folder: where a file "fault" is made right before.
    """
    global _armed
    _armed = None if fault is None or folder is None else (fault, folder)


def happened_at(folder: Path) -> float | None:
    """When, by the clock of ``time.monotonic``, which is the same in all processes."""
    path = folder / "fault"
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None


def place(name: str) -> None:
    """This rank is at a place."""
    if _armed is None or _armed[0].place != name:
        return
    fault, folder = _armed
    arm(None)
    draft = folder / "fault.part"
    draft.write_text(str(time.monotonic()))
    draft.rename(folder / "fault")
    if fault.kind == "raise":
        raise ValueError(f"as asked in {name}")
    if fault.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == "stop":
        wake = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)


@torch.library.custom_op("faults::anywhere", mutates_args=())
def _anywhere(x: torch.Tensor) -> torch.Tensor:
    place("forward")
    return x.clone()


@torch.library.custom_op("faults::anywhere_in_backward", mutates_args=())
def _in_backward(grad: torch.Tensor) -> torch.Tensor:
    place("backward")
    return grad.clone()


@_anywhere.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    place("trace")
    return torch.empty_like(x)


_in_backward.register_fake(torch.empty_like)
_anywhere.register_autograd(lambda ctx, grad: _in_backward(grad))


class FaultyTransformer(Transformer):
    """A transformer that passes the places of its forward and backward after each block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = _anywhere(block(x))
        return self.head(self.norm(x)) * self.scale


# -- trials --------------------------------------------------------------------------------------

STEPS = 6
_LINK_TIMEOUT_S = 5.0
LIMIT_S = 15.0
TOLERANCE = 1e-5
_ANSWER_S = 150.0
_DISK_BYTES = 4 << 20
_ROOM_BYTES = 5000  # left on a full disk


@dataclass(frozen=True)
class Trial:
    """A run with a fault.

    Attributes:
        seed: that it was drawn from.
        mode: of running the model.
        num_ranks: 2 to 4.
        victim: the rank with the fault.
        fault: what happens; beside the kinds of places, "disk" (full while it saves), "clock"
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
    places = [one for one in PLACES if one != "trace" or mode != "eager"]
    where = _PLACES.get(kind) or rng.choice(places)
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
        Fault(kind, where, seconds.get(kind, 0.0)),
        0 if where == "trace" else rng.randrange(1, STEPS - 1),
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
    optimizer.register_step_pre_hook(lambda *_: place("optimizer"))
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
                sys.excepthook(type(error), error, error.__traceback__)  # as if it were not caught
        finally:
            arm(None)
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
    place("data")
    loss = loss_of(run, tokens)
    loss.register_hook(lambda _: place("hook"))
    optimizer.zero_grad()
    loss.backward()
    clip(model, 1.0)
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
        place("save")
        return write(self, plan, planner)

    with mock.patch.object(storage.Writer, "write_data", write_data):
        yield


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _environment(fault: Fault, folder: Path) -> Iterator[None]:
    """One step with the fault."""
    arm(fault, folder)
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
    model = DistributedDataParallel(make_transformer(num_blocks=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return [_step(model, model, optimizer, batch(rank, step)) for step in range(STEPS)]


# -- in the process that tests -------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a trial.

    Attributes:
        trial: the trial.
        outcome: "goes on", "ends", or "not reached".
        seconds: until the last of the other ranks had its error; ``None`` where none had.
        names_rank: whether each of their messages names the rank with the fault.
        names_cause: whether one of them has the error that was raised there.
        wrong: what must not be; empty: nothing.
    """

    trial: Trial
    outcome: str = ""
    seconds: float | None = None
    names_rank: bool | None = None
    names_cause: bool | None = None
    wrong: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Judge:
    """Runs trials, and compares what ranks say with what is right."""

    def __init__(self, ranks: RankPool) -> None:
        self._ranks = ranks
        self._references: dict[int, list[list[float]]] = {}

    def run(self, trial: Trial) -> Verdict:
        """Run a trial, and the run after it."""
        verdict = Verdict(trial)
        with tempfile.TemporaryDirectory() as name, _disk(Path(name), trial):
            folder = Path(name)
            expected = self._expected(trial.num_ranks)
            try:
                ends = self._ends(trial, folder)
                self._judge(verdict, ends, expected, happened_at(folder))
                self._go_on(verdict, folder, ends, expected)
            except RankFailedError as error:  # a hang, or a rank that has died
                verdict.wrong.append(str(error))
            finally:
                self._ranks.stop()
        return verdict

    def _expected(self, num_ranks: int) -> list[list[float]]:
        if num_ranks not in self._references:
            self._references[num_ranks] = self._ranks.run(reference, num_ranks)
        return self._references[num_ranks]

    def _ends(self, trial: Trial, folder: Path) -> dict[int, End]:
        """Of the ranks that live."""
        run = partial(self._ranks.run_and_kill, timeout=_ANSWER_S)
        size, arguments = trial.num_ranks, (trial, str(folder))
        if trial.fault.kind == "cut":
            with link.two_hosts(link.Shape()) as hosts:
                cut = partial(_cut, hosts[0], trial.fault.seconds, folder)
                answers = run(train_over_link, size, *arguments, hosts, victims=[], when=cut)
        elif trial.fault.kind == "kill":
            when = partial(_wait_for_fault, folder)
            answers = run(train, size, *arguments, victims=[trial.victim], when=when)
        else:
            answers = run(train, size, *arguments, victims=[], when=lambda: None)
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in answers.items() if not ok]
        if failed:
            raise RankFailedError("\n".join(failed))
        return {rank: end for rank, (_, end) in answers.items()}

    def _judge(
        self,
        verdict: Verdict,
        ends: dict[int, End],
        expected: list[list[float]],
        began: float | None,
    ) -> None:
        trial, wrong = verdict.trial, verdict.wrong
        for rank, end in ends.items():
            wrong += _wrong_losses(rank, end.losses, expected[rank])
        if began is None:
            verdict.outcome = "not reached"
            wrong.append("the fault did not happen")
            return
        others = {rank: end for rank, end in ends.items() if rank != trial.victim}
        ended = [rank for rank, end in ends.items() if end.error]
        verdict.outcome = "ends" if ended else "goes on"
        said = [end.error or "\n".join(end.unsaved) for end in others.values()]
        if any(said):
            named = rf"\brank(\(s\)|s)? ([\d, ]+, )?{trial.victim}\b"
            verdict.names_rank = all(re.search(named, one) for one in said)
            verdict.names_cause = all("as asked" in one or "No space" in one for one in said)
        if ended and sorted(ended) != sorted(ends):
            wrong.append(f"of ranks {sorted(ends)}, only {ended} ended")
        may_end, may_go_on = _allowed(trial.fault)
        if ended and not may_end:
            wrong += [end.error for end in ends.values()]
        if not ended and not may_go_on:
            wrong.append("no rank had an error")
        if ended:
            verdict.seconds = round(max(end.at - began for end in others.values()), 2)
            if verdict.seconds > LIMIT_S + trial.fault.seconds:
                wrong.append(f"told after {verdict.seconds} s")
            if not verdict.names_rank and trial.fault.kind != "cut":  # each names the other
                wrong += [f"does not name rank {trial.victim}: {one}" for one in said]
            if trial.fault.kind == "raise" and not verdict.names_cause:
                wrong += [f"does not name the cause: {one}" for one in said]

    def _go_on(
        self, verdict: Verdict, folder: Path, ends: dict[int, End], expected: list[list[float]]
    ) -> None:
        """No checkpoint was lost, each can be loaded, and a new run goes on from the newest."""
        wrong = verdict.wrong
        self._ranks.stop()
        there = [step for step, _ in checkpoint.complete(folder / "saved")]
        lost = {step for end in ends.values() for step in end.saved} - set(there)
        wrong += [f"the checkpoint of step {step} is lost" for step in sorted(lost)]
        trial = verdict.trial
        again = Trial(trial.seed, "eager", trial.num_ranks, -1, Fault("", ""), 0, False)
        for rank, end in enumerate(
            self._ranks.run(train, trial.num_ranks, again, str(folder), timeout=_ANSWER_S)
        ):
            wrong += _wrong_losses(rank, end.losses, expected[rank])
            wrong += [one for one in (end.error, *end.unsaved) if one]
            first = there[-1] if there else 0
            if sorted(end.losses) != list(range(first, STEPS)):
                wrong.append(f"rank {rank} went on with steps {sorted(end.losses)}, not {first}")


def _wrong_losses(rank: int, found: dict[int, float], expected: list[float]) -> list[str]:
    return [
        f"rank {rank}, step {step}: loss {loss}, expected {expected[step]}"
        for step, loss in found.items()
        if not abs(loss - expected[step]) <= TOLERANCE
    ]


def _allowed(fault: Fault) -> tuple[bool, bool]:
    """Whether a run may end with a fault, and whether it may go on."""
    goes_on = fault.kind in ("disk", "clock") or (fault.kind == "cut" and fault.seconds > 0)
    goes_on |= fault.kind == "raise" and fault.place == "save"
    return not goes_on, goes_on or fault.kind == "stop"


def _wait_for_fault(folder: Path) -> None:
    end = time.monotonic() + _ANSWER_S / 2
    while happened_at(folder) is None and time.monotonic() < end:
        time.sleep(0.01)


def _cut(host: link.Host, seconds: float, folder: Path) -> None:
    """Cut the link once a rank says so, for a time or for good."""
    _wait_for_fault(folder)
    set_link(host, "down")
    if seconds:
        time.sleep(seconds)
        set_link(host, "up")


@contextmanager
def _disk(folder: Path, trial: Trial) -> Iterator[None]:
    """Checkpoints on a small disk of their own, where it is to be full."""
    if trial.fault.kind != "disk":
        yield
        return
    saved = folder / "saved"
    saved.mkdir()
    options = f"size={_DISK_BYTES}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(saved)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(saved)], check=True)
