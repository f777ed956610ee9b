"""Judgement of random faults: what ranks said and computed, and the run that comes after."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import faults
from faults import Fault
from namespaces import set_link
from pool import RankFailedError, RankPool
from random_faults import STEPS, End, Trial, reference, train, train_over_link

from benchmarks import link
from fsdp_dynamo import checkpoint

LIMIT_S = 15.0
TOLERANCE = 1e-5
_ANSWER_S = 150.0
_DISK_BYTES = 4 << 20


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
    wrong: list[str] | None = None

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
        verdict = Verdict(trial, wrong=[])
        assert verdict.wrong is not None
        with tempfile.TemporaryDirectory() as name, _disk(Path(name), trial):
            folder = Path(name)
            expected = self._expected(trial.num_ranks)
            try:
                ends = self._ends(trial, folder)
                self._judge(verdict, ends, expected, faults.happened_at(folder))
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
        assert wrong is not None
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
        assert wrong is not None
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
    while faults.happened_at(folder) is None and time.monotonic() < end:
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
