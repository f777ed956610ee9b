"""Waits for gloo's collectives that end when another rank has said that it will not come.

A gloo wait that runs out of time closes the group's connections, so waiting in slices is no way: a
second look may find that a healthy transfer has been torn apart. Instead a thread looks at waits
that have lasted for more than a period, reads the store for them, and closes the connections of a
group only when there is a notice. That ends the wait.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import WHOLE, Entry
from fsdp_dynamo.comm.exit_callbacks import within
from fsdp_dynamo.comm.peer_failure import message_of_loss
from fsdp_dynamo.comm.point_to_point import Work, peer_of
from fsdp_dynamo.errors import DivergenceError, RankFailedError

PERIOD_S = 1.0
STORE_TIMEOUT_S = 5.0
"""For what explains a failure: the store may be on the very rank that has stopped."""

_MAX_IDLE_PERIODS = 30
_INTERRUPT_TAG = 0x0D000001

_Wait = tuple[int, dist.ProcessGroup]


class _Watcher:
    """A thread that lives while waits go on; one that has nothing to see for long ends."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_alive = False

    def begin(self, group: dist.ProcessGroup) -> None:
        """This thread waits for a collective from now on."""
        self._waits[threading.get_ident()] = (next(self._numbers), group)
        if not self._is_alive:
            self._start()

    def end(self) -> None:
        """This thread no longer waits."""
        self._waits.pop(threading.get_ident(), None)

    def _start(self) -> None:
        with self._lock:
            if not self._is_alive:
                self._is_alive = True
                threading.Thread(target=self._watch, name="fsdp_dynamo", daemon=True).start()

    def _watch(self) -> None:
        idle = 0
        while idle < _MAX_IDLE_PERIODS or not self._ends():
            before = dict(self._waits)
            time.sleep(PERIOD_S)
            now = dict(self._waits)
            idle = 0 if before or now else idle + 1
            for group in {now[t][1] for t in now if before.get(t) == now[t]}:
                _interrupt_if_noticed(group)

    def _ends(self) -> bool:
        """Whether nobody has begun to wait while the thread was about to end."""
        with self._lock:
            self._is_alive = False  # first: who begins to wait now starts another thread
            self._is_alive = bool(self._waits)
            return not self._is_alive


def _interrupt_if_noticed(group: dist.ProcessGroup) -> None:
    look = _looks.get(group)
    if look is None:
        return
    with suppress(RuntimeError):  # the store or the group is gone: the waits find out themselves
        try:
            look(group)
        except DivergenceError:
            other = (group.rank() + 1) % group.size()
            never = group.recv([torch.empty(1)], other, _INTERRUPT_TAG)
            never.wait(timedelta(milliseconds=1))  # runs out of time: closes the connections


_watcher = _Watcher()
_looks: WeakKeyDictionary[dist.ProcessGroup, Callable[[dist.ProcessGroup], None]] = (
    WeakKeyDictionary()
)
_tells: WeakKeyDictionary[dist.ProcessGroup, Callable[[DivergenceError], None]] = (
    WeakKeyDictionary()
)


def watch(
    group: dist.ProcessGroup,
    look: Callable[[dist.ProcessGroup], None],
    tell: Callable[[DivergenceError], None],
) -> None:
    """From now on, waits for this group's collectives look for notices.

    Args:
        group: a gloo group.
        look: is called with the group, which it must not hold itself, or the group would never
            be freed; raises ``DivergenceError`` if there is a notice.
        tell: leaves one.
    """
    _looks[group] = look
    _tells[group] = tell


def wait_watching(
    works: Sequence[Work], group: dist.ProcessGroup, entry: Entry | None = None
) -> None:
    """Block until collectives of CPU tensors are complete.

    Args:
        works: what to wait for.
        group: whose collectives.
        entry: what they are, for messages.

    Raises:
        DivergenceError: another rank of the group has left a notice.
        RankFailedError: a rank is gone, or has not come within the group's timeout.
        RuntimeError: a collective failed otherwise.
    """
    watched = group in _looks
    if watched:
        _watcher.begin(group)
    position = 0
    try:
        for position, work in enumerate(works):  # noqa: B007
            work.wait()
    except RuntimeError as error:
        if watched:
            explanation = _explanation(error, group, peer_of(group, works, position), entry)
            if explanation is not None:
                raise explanation from None  # gloo's own words are no help
        raise
    finally:
        if watched:
            _watcher.end()


def wait_for_the_end(works: Sequence[Work], group: dist.ProcessGroup) -> None:
    """Wait until works have come to an end, whichever; a notice ends those that never would.

    gloo must not be asked again about one that is complete: it would wait for another message.
    """
    _watcher.begin(group)
    try:
        for work in works:
            if not _is_complete(work):
                work.wait()
    except RuntimeError:
        pass  # the connections are closed: nothing comes any more
    finally:
        _watcher.end()


def _is_complete(work: Work) -> bool:
    ask = getattr(work, "is_completed", None)  # a launch of several has no such method
    return ask is not None and bool(ask())


def _explanation(
    error: RuntimeError, group: dist.ProcessGroup, peer: int | None, entry: Entry | None
) -> DivergenceError | None:
    """What another rank has left, or what follows from the failure itself."""
    what = "a collective" if entry is None else entry.described()
    is_whole = entry is not None and entry.use == WHOLE
    message = message_of_loss(error, peer, what, is_whole)
    found = within(STORE_TIMEOUT_S, partial(_looks[group], group))
    if isinstance(found, DivergenceError):
        return found
    if message is None:
        return None
    lost = RankFailedError(message)
    within(STORE_TIMEOUT_S, partial(_tells[group], lost))
    return lost
