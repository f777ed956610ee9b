"""Coordination of the ranks that save or load a checkpoint, and ownership of a folder."""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
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
from fsdp_dynamo.comm.watchdog import STORE_TIMEOUT_S, Interruptible, notice_for
from fsdp_dynamo.errors import CheckpointError, DivergenceError, FSDPError, first_line
from fsdp_dynamo.health.comparison import checked_seconds
from fsdp_dynamo.health.flight_recorder import listed
from fsdp_dynamo.health.notices import link_groups
from fsdp_dynamo.health.store import shared_store

# -- the group -------------------------------------------------------------------------------------
# A gloo group for the small messages of saves and loads. A background thread uses it while the
# model communicates in its own groups.
#
# When a wait in the group times out, gloo closes its connections. The ranks that gave up say so in
# the store: a rank that arrives later raises at once instead of waiting for them, and the next save
# or load creates a new group.


_arrival_timeout_s = 300.0
_BROKEN = "checkpoint/broken"


def set_arrival_timeout(seconds: float) -> None:
    """Limit how long ranks wait for another rank to begin a save or load (default 300 s).

    After that they raise ``CheckpointError``, and so does the late rank when it begins. Their next
    save or load works again. The default leaves one rank time for an evaluation.

    Args:
        seconds: above 0; the same on all ranks.

    Raises:
        FSDPValueError: not a number above 0.
    """
    global _arrival_timeout_s
    fix = "Pass how late a rank may begin to save or load."
    _arrival_timeout_s = checked_seconds(seconds, "set_arrival_timeout()", fix)


def arrival_timeout() -> timedelta:
    """Return the value of ``set_arrival_timeout``."""
    return timedelta(seconds=_arrival_timeout_s)


@dataclass
class _Kept:
    """Group that a process group's ranks currently use, and what they gave up.

    Attributes:
        group: ``None``: not created yet.
        number: how many operations had been given up when ``group`` was created.
        times: how often each operation was given up, by its checksum.
    """

    group: dist.ProcessGroup | None
    number: int
    times: dict[int, int]


_kept: WeakKeyDictionary[dist.ProcessGroup, _Kept] = WeakKeyDictionary()


class Meeting:
    """Save or load that all ranks of a group begin.

    Args:
        of: process group of the ranks.
        text: name and arguments of the operation, the same on all ranks.
    """

    def __init__(self, of: dist.ProcessGroup, text: str) -> None:
        self._of = of
        self._store: Any = shared_store(of)
        self._known = _kept.setdefault(of, _Kept(None, 0, {}))
        self._checksum = zlib.crc32(text.encode())
        self._is_given_up = False

    @property
    def _key(self) -> str:
        return f"checkpoint/{self._checksum:x}-{self._known.times.get(self._checksum, 0)}"

    def group(self) -> dist.ProcessGroup:
        """Return the group to use; create a new one if an operation was given up meanwhile.

        Raises:
            CheckpointError: the other ranks have already given up this operation.
            RuntimeError: a rank has died.
        """
        number = 0
        if self._store is not None:
            number = int(self._store.add(_BROKEN, 0))
            # Read after the number: a rank that gives up sets the key before it raises the number,
            # so an operation whose key is not set yet is not in the number either.
            if self._store.check([self._key]):
                self.give_up()
                raise self._late_error()
        known = self._known
        if known.group is None or known.number != number:
            known.group, known.number = _new_group(self._of), number
        return known.group

    def give_up(self) -> None:
        """Make ranks that arrive later raise, and the next save or load create a new group."""
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._store is not None:
            run_with_timeout(STORE_TIMEOUT_S, partial(_mark, self._store, self._key))
        times = self._known.times
        times[self._checksum] = times.get(self._checksum, 0) + 1

    def _late_error(self) -> CheckpointError:
        return CheckpointError(
            f"rank {self._of.rank()}: expected all {self._of.size()} ranks to begin within "
            f"{_arrival_timeout_s:g} s, got this one after the others had given up. Let all ranks "
            "save and load at the same steps; if they are only late, call "
            "fsdp_dynamo.checkpoint.set_arrival_timeout(). Complete checkpoints are unchanged."
        )


def _mark(store: Any, key: str) -> None:
    """Count an operation that was given up, once; when this returns on any rank, it is counted.

    Without the wait a second rank could begin its next save before the first has counted this one,
    and the two would use different groups.
    """
    counted = f"{key}-counted"
    if store.add(key, 1) == 1:  # this rank is the first to give up
        store.add(_BROKEN, 1)
        store.set(counted, "1")
    else:
        store.wait([counted], timedelta(seconds=STORE_TIMEOUT_S))


def _new_group(of: dist.ProcessGroup) -> dist.ProcessGroup:
    made = new_group([of], dist.get_process_group_ranks(of), "checkpoints", backend="gloo")
    link_groups([made])
    return made


# -- rank coordination -----------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class RankCoordinator:
    """Runs actions on all ranks; an action that fails on one rank raises on all.

    Attributes:
        group: gloo group of all ranks; ``None`` if there is only one.
        rank: this process's rank in it.
        size: number of ranks.
        meeting: the operation that the ranks perform.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    meeting: Meeting | None = None

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
        answers = [own] * self.size
        if self.group is not None:
            self._gather(answers, own)
        failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
        if isinstance(failure, FSDPError) and not isinstance(failure, CheckpointError):
            raise failure
        if failures:
            raise CheckpointError(_joined(failures)) from failure
        return [answer for answer, _ in answers]  # type: ignore[misc]

    def run_locally(self, action: Callable[[], T]) -> T:
        """Run an action on every rank as ``run_on_all``, but do not send the results."""
        results: list[T] = []
        self.run_on_all(lambda: results.append(action()))
        return results[0]

    def _gather(self, answers: list[Any], own: object) -> None:
        assert self.group is not None
        try:
            with Interruptible(self.group):
                dist.all_gather_object(answers, own, group=self.group)
        except RuntimeError as error:
            raise self.unreachable_error(error) from error

    def unreachable_error(self, error: RuntimeError) -> CheckpointError:
        """Give up, so that the group is not used again, and return the error to raise."""
        notice = None if self.group is None else notice_for(self.group)
        if self.meeting is not None:
            self.meeting.give_up()
        return CheckpointError(
            f"rank {self.rank}: expected all {self.size} ranks to take part, got "
            f"{first_line(notice or error)}. A rank has died, is stuck, or does not save "
            "or load. If it was only late, call fsdp_dynamo.checkpoint.set_arrival_timeout(); "
            "complete checkpoints are unchanged."
        )

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run an action on the first rank and return its result on every rank."""
        results = self.run_on_all(lambda: action() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]


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
        return RankCoordinator(None, 0, 1)
    meeting = Meeting(ranks, f"{what}: {text}")
    try:
        own = meeting.group()
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise RankCoordinator(ranks, ranks.rank(), ranks.size()).unreachable_error(error) from error
    coordinator = RankCoordinator(own, ranks.rank(), ranks.size(), meeting)
    if not _is_same_on_all(coordinator, zlib.crc32(text.encode())):
        _raise_divergence(what, coordinator.run_on_all(lambda: text))
    return coordinator


def _is_same_on_all(coordinator: RankCoordinator, number: int) -> bool:
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(coordinator.size)]
    group = coordinator.group
    assert group is not None
    try:
        with Interruptible(group):
            work = dist.all_gather(numbers, torch.tensor([number]), group=group, async_op=True)
            work.wait(arrival_timeout())
    except RuntimeError as error:
        raise coordinator.unreachable_error(error) from error
    return len({int(one) for one in numbers}) == 1


def _raise_divergence(what: str, texts: list[str]) -> None:
    differing = [rank for rank, text in enumerate(texts) if text != texts[0]]
    raise DivergenceError(
        f"{what}: expected the same arguments on all ranks, {texts[0]} as on rank 0, got "
        f"{texts[differing[0]]} on rank(s) {listed(differing)}. Call it with the same arguments on "
        "all ranks. Nothing was changed."
    )


@contextmanager
def translate_dcp_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise torch's ``CheckpointException``, a ``BaseException``, as ``CheckpointError``.

    Args:
        group: group in which torch.distributed.checkpoint communicates, if any.
    """
    try:
        with nullcontext() if group is None else Interruptible(group):
            yield
    except CheckpointException as error:
        failures = {rank: error_text(one) for rank, (one, _) in error.failures.items()}
        raise CheckpointError(_joined(failures)) from error


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


# -- owner -----------------------------------------------------------------------------------------
# Owner of a checkpoint folder. Two runs that save into one folder would remove each other's
# checkpoints as old ones.
#
# The first rank writes its run's id into the folder at its first save there. A restarted run takes
# the folder over; if the previous run is still alive, its next save finds another id and raises.


OWNER_FILE = "owner.json"


@dataclass(frozen=True)
class Owner:
    """Run that saves into a folder.

    Attributes:
        run: unique id.
        host: host of the run's first rank.
        process: process id of its first rank.
        since: when it first saved there, in UTC.
    """

    run: str
    host: str
    process: int
    since: str

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since} UTC"

    def is_alive(self) -> bool:
        """Return whether its process is running, as far as this host can see."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True


_claimed: dict[tuple[int, Path], Owner] = {}
"""Owners that this process has written, by process id (it may fork) and folder."""


def claim(folder: Path) -> None:
    """Make this process's run the owner of a folder; warn if another run there is alive.

    Raises:
        CheckpointError: another run has taken over the folder since this one saved there.
    """
    key = (os.getpid(), folder.resolve())
    own, found = _claimed.get(key), _read(folder)
    if own is not None and found == own:
        return
    if own is not None and found is not None:
        raise CheckpointError(
            f"'{folder}': expected one run that saves there, this one ({own}), got another one "
            f"({found}). Give each run a folder of its own. If the other one has ended and this "
            f"one is to go on, remove '{OWNER_FILE}'. Nothing was written."
        )
    if found is not None and found.process != os.getpid() and found.is_alive():
        warnings.warn(
            f"'{folder}' has checkpoints of another run that lives ({found}): each would remove "
            "what the other saves. This run takes the folder over; the other one gets an error "
            "when it saves again.",
            stacklevel=2,
        )
    _claimed[key] = _write(folder)


def _read(folder: Path) -> Owner | None:
    """Return the folder's owner; ``None`` if the file is missing or damaged."""
    try:
        content = json.loads((folder / OWNER_FILE).read_text())
        return Owner(
            str(content["run"]), str(content["host"]), int(content["process"]), content["since"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path) -> Owner:
    now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    owner = Owner(uuid.uuid4().hex, socket.gethostname(), os.getpid(), now)
    draft = folder / f"{OWNER_FILE}.{owner.run}"
    draft.write_text(json.dumps(asdict(owner), indent=1))
    draft.replace(folder / OWNER_FILE)
    return owner
