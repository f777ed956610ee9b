"""Groups of all ranks that carry only the small objects of saves and loads.

Another thread may use one while the model communicates. gloo closes a group's connections when a
rank has waited for too long, so ranks agree through their store which saves were given up: one that
comes late gets an error at once, and the next save has a new group.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.agreement.exchange import checked_seconds
from fsdp_dynamo.agreement.failure_propagation import link_groups
from fsdp_dynamo.agreement.store import shared_store
from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.new_groups import new_group
from fsdp_dynamo.comm.watchdog import STORE_TIMEOUT_S
from fsdp_dynamo.errors import CheckpointError

_arrival_timeout_s = 300.0
_BROKEN = "checkpoint/broken"


def set_arrival_timeout(seconds: float) -> None:
    """Limit how late a rank may begin a save or load (default 300 s).

    The others wait for it so long: it may have run an evaluation before. Then they raise
    ``CheckpointError``, and so does the rank when it comes. The next save works again.

    Args:
        seconds: more than 0; the same on all ranks.

    Raises:
        FSDPValueError: not a number above 0.
    """
    global _arrival_timeout_s
    fix = "Pass how late a rank may begin to save or load."
    _arrival_timeout_s = checked_seconds(seconds, "set_arrival_timeout()", fix)


def arrival_timeout() -> timedelta:
    """The value of ``set_arrival_timeout``."""
    return timedelta(seconds=_arrival_timeout_s)


@dataclass
class _Kept:
    """What a rank knows of the saves and loads of some ranks.

    Attributes:
        group: the group of those after the last that was given up; ``None``: to be made.
        number: how many had been given up when it was made.
        times: how often each was given up, by its checksum.
    """

    group: dist.ProcessGroup | None
    number: int
    times: dict[int, int]


_kept: WeakKeyDictionary[dist.ProcessGroup, _Kept] = WeakKeyDictionary()


class Meeting:
    """One save or load that all ranks of a group begin.

    Args:
        of: the ranks.
        text: what they do, the same on all ranks.
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
        """The group to use, made anew if saves were given up since.

        Raises:
            CheckpointError: the others have given this one up already.
            RuntimeError: a rank has died.
        """
        number = 0
        if self._store is not None:
            number = int(self._store.add(_BROKEN, 0))
            # Looked up after the number: what is not given up yet is not in the number either.
            if self._store.check([self._key]):
                self.give_up()
                raise self._late_error()
        known = self._known
        if known.group is None or known.number != number:
            known.group, known.number = _new_group(self._of), number
        return known.group

    def give_up(self) -> None:
        """Let ranks that come later raise, and the next save or load have a new group."""
        if self._is_given_up:
            return
        self._is_given_up = True
        if self._store is not None:
            run_with_timeout(STORE_TIMEOUT_S, partial(_mark, self._store, self._key))
        times = self._known.times
        times[self._checksum] = times.get(self._checksum, 0) + 1

    def _late_error(self) -> CheckpointError:
        return CheckpointError(
            expected=f"all {self._of.size()} ranks to begin within {_arrival_timeout_s:g} s",
            got="this one after the others had given up",
            where=f"rank {self._of.rank()}",
            fix="Let all ranks save and load at the same steps; if they are only late, call "
            "fsdp_dynamo.checkpoint.set_arrival_timeout(). Complete checkpoints are unchanged.",
        )


def _mark(store: Any, key: str) -> None:
    """Count a save or load that is given up, once; when this returns on any rank, it is counted."""
    counted = f"{key}-counted"
    if store.add(key, 1) == 1:  # the first of the ranks that give it up
        store.add(_BROKEN, 1)
        store.set(counted, "1")
    else:
        store.wait([counted], timedelta(seconds=STORE_TIMEOUT_S))


def _new_group(of: dist.ProcessGroup) -> dist.ProcessGroup:
    made = new_group([of], dist.get_process_group_ranks(of), "checkpoints", backend="gloo")
    link_groups([made])
    return made
