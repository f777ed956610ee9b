"""Coordination of the ranks that save or load a checkpoint.

The ranks exchange small messages in a gloo group of their own, which a background thread may use
while the model communicates. ``RankCoordinator`` runs actions on all ranks and raises a failure of
one rank on all of them.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.process_groups import new_group
from fsdp_dynamo.comm.watchdog import STORE_TIMEOUT_S, Interruptible, notice
from fsdp_dynamo.errors import (
    CheckpointError,
    DivergenceError,
    FSDPError,
    FSDPValueError,
    first_line,
)
from fsdp_dynamo.health.flight_recorder import listed
from fsdp_dynamo.health.notices import link_groups
from fsdp_dynamo.health.store import shared_store

T = TypeVar("T")


@dataclass
class _Channel:
    """Coordination group of some ranks, and the number of earlier groups that they gave up."""

    group: dist.ProcessGroup | None = None
    number: int = 0


@dataclass
class ProcessState:
    """State of checkpoints in this process that outlives a save or load.

    Attributes:
        arrival_timeout_s: value of ``set_arrival_timeout``.
        channels: coordination groups by the process group that saves or loads.
        pending_save: save of ``async_save`` that may still be in progress; never more than one.
        runs: texts by which this process has claimed folders, by folder.
        unremovable: folders that could not be removed, and of which the user was warned.
    """

    arrival_timeout_s: float = 300.0
    channels: WeakKeyDictionary[dist.ProcessGroup, _Channel] = field(
        default_factory=WeakKeyDictionary
    )
    pending_save: Future[Path] | None = None
    runs: dict[Path, str] = field(default_factory=dict)
    unremovable: set[Path] = field(default_factory=set)


STATE = ProcessState()


def _forget_parent() -> None:
    STATE.pending_save = None  # the thread that completes it is the parent's
    STATE.runs.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


def set_arrival_timeout(seconds: float) -> None:
    """Limit how long ranks wait for another rank to begin a save or load (default 300 s).

    After that they raise ``CheckpointError``, and so does the late rank when it begins. Their next
    save or load works again. The default leaves one rank time for an evaluation.

    Args:
        seconds: above 0; the same on all ranks.

    Raises:
        FSDPValueError: not a number above 0.
    """
    if not (isinstance(seconds, (int, float)) and seconds > 0):
        raise FSDPValueError(
            f"set_arrival_timeout(): expected a number of seconds above 0, got {seconds!r}. Pass "
            "how late a rank may begin to save or load."
        )
    STATE.arrival_timeout_s = float(seconds)


# -- groups ----------------------------------------------------------------------------------------
# When a wait in a gloo group times out, gloo closes its connections: the group is lost. A rank that
# gives up a group writes into the store which operation that was. A late rank looks there first:
# if it was this operation, it raises instead of waiting for ranks that have left; if the rank has
# left that operation out, it joins the next group.


def _group_of(ranks: dist.ProcessGroup, operation: str) -> dist.ProcessGroup:
    """Return the group for an operation; raise if the other ranks have given up the operation."""
    channel, store = STATE.channels.setdefault(ranks, _Channel()), shared_store(ranks)
    while store is not None and store.check([_given_up_key(channel)]):
        given_up = store.get(_given_up_key(channel)).decode()
        channel.group, channel.number = None, channel.number + 1
        if given_up == operation:
            raise CheckpointError(
                f"rank {ranks.rank()}: expected all {ranks.size()} ranks to begin within "
                f"{STATE.arrival_timeout_s:g} s, got this rank after the other ranks had given up. "
                "Let all ranks save and load at the same steps; if they are only late, call "
                "fsdp_dynamo.checkpoint.set_arrival_timeout(). Complete checkpoints are unchanged."
            )
    if channel.group is None:
        members = dist.get_process_group_ranks(ranks)
        channel.group = new_group([ranks], members, "checkpoints", backend="gloo")
        link_groups([channel.group])
    return channel.group


def _give_up(ranks: dist.ProcessGroup, group: dist.ProcessGroup, operation: str) -> None:
    """Stop using a group in which ``operation`` failed; the next operation creates a new one."""
    channel, store = STATE.channels[ranks], shared_store(ranks)
    if channel.group is not group:
        return  # an earlier failure of the same operation has given it up
    if store is not None:  # the rank that serves the store may be gone
        name_it = partial(store.compare_set, _given_up_key(channel), "", operation)
        run_with_timeout(STORE_TIMEOUT_S, name_it)
    channel.group, channel.number = None, channel.number + 1


def _given_up_key(channel: _Channel) -> str:
    return f"checkpoint/given-up-{channel.number}"


# -- actions of all ranks --------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCoordinator:
    """Runs actions on all ranks; an action that fails on one rank raises on all.

    A single rank needs no ``group``; ``give_up`` is called if a rank does not answer.
    """

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    give_up: Callable[[], None] | None = None

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank and return the results of all ranks, by rank.

        Raises:
            CheckpointError: on every rank, if the action raised on any rank, or a rank has died. A
                rank whose own action raised another ``FSDPError`` raises that one instead.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:  # noqa: BLE001  # the other ranks wait for this rank's answer
            failure = error
        own = (value, None if failure is None else error_text(failure))
        answers: list[Any] = [own] * self.size
        if self.group is not None:
            with self._reaching_all_ranks():
                dist.all_gather_object(answers, own, group=self.group)
        failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
        if isinstance(failure, FSDPError) and not isinstance(failure, CheckpointError):
            raise failure
        if failures:
            raise CheckpointError(_joined(failures)) from failure
        return [answer for answer, _ in answers]

    def run_locally(self, action: Callable[[], T]) -> T:
        """Run an action on every rank as ``run_on_all``, but do not send the results."""
        results: list[T] = []
        self.run_on_all(lambda: results.append(action()))
        return results[0]

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run an action on the first rank and return its result on every rank."""
        results = self.run_on_all(lambda: action() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]

    def arrive(self, checksum: int) -> set[int]:
        """Wait for all ranks within the arrival timeout, and return the checksums they give."""
        numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        with self._reaching_all_ranks():
            own = torch.tensor([checksum])
            work = dist.all_gather(numbers, own, group=self.group, async_op=True)
            work.wait(timedelta(seconds=STATE.arrival_timeout_s))
        return {int(number) for number in numbers}

    @contextmanager
    def _reaching_all_ranks(self) -> Iterator[None]:
        """Communicate inside; if a rank does not answer, give up and raise ``CheckpointError``."""
        assert self.group is not None
        assert self.give_up is not None
        try:
            with Interruptible(self.group):
                yield
        except RuntimeError as error:
            cause = notice() or error
            self.give_up()
            raise _unreachable_error(self.rank, self.size, cause) from error

    @contextmanager
    def dcp_errors(self) -> Iterator[None]:
        """Raise torch's ``CheckpointException``, a ``BaseException``, as ``CheckpointError``."""
        try:
            with nullcontext() if self.group is None else Interruptible(self.group):
                yield
        except CheckpointException as error:
            failures = {rank: error_text(cause) for rank, (cause, _) in error.failures.items()}
            raise CheckpointError(_joined(failures)) from error


def coordinate_ranks(group: dist.ProcessGroup | None, what: str, text: str) -> RankCoordinator:
    """Wait for all ranks of a group and compare their arguments; every rank must call it.

    Args:
        group: ``None``: the default group.
        what: the operation, for messages.
        text: the operation's arguments, which must be the same on all ranks.

    Raises:
        DivergenceError: a rank's arguments differ. The next save or load works again.
        CheckpointError: a rank has died, or did not arrive within the arrival timeout.
    """
    ranks = group or (dist.group.WORLD if dist.is_initialized() else None)
    if ranks is None or ranks.size() == 1:
        return RankCoordinator()
    checksum = zlib.crc32(text.encode())
    operation = f"{what} {checksum:x}"
    try:
        own = _group_of(ranks, operation)
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise _unreachable_error(ranks.rank(), ranks.size(), error) from error
    give_up = partial(_give_up, ranks, own, operation)
    coordinator = RankCoordinator(own, ranks.rank(), ranks.size(), give_up)
    if len(coordinator.arrive(checksum)) > 1:
        _raise_divergence(what, coordinator.run_on_all(lambda: text))
    return coordinator


def _unreachable_error(rank: int, size: int, cause: RuntimeError) -> CheckpointError:
    return CheckpointError(
        f"rank {rank}: expected all {size} ranks to take part, got {first_line(cause)}. A rank has "
        "died, is stuck, or does not save or load. If it was only late, call "
        "fsdp_dynamo.checkpoint.set_arrival_timeout(); complete checkpoints are unchanged."
    )


def _raise_divergence(what: str, texts: list[str]) -> None:
    differing = [rank for rank, text in enumerate(texts) if text != texts[0]]
    raise DivergenceError(
        f"{what}: expected the same arguments on all ranks, {texts[0]} as on rank 0, got "
        f"{texts[differing[0]]} on rank(s) {listed(differing)}. Call it with the same arguments on "
        "all ranks. Nothing was changed."
    )


def error_text(error: BaseException) -> str:
    """Return an error's message, preceded by its class unless it is a ``CheckpointError``."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _joined(failures: dict[int, str]) -> str:
    """Join ranks' messages; ranks with equal messages share a line."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    return "\n".join(
        text if text.startswith("rank ") else f"rank {', '.join(map(str, failed))}: {text}"
        for text, failed in ranks.items()
    )
