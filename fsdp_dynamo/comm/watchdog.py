"""Waits for gloo's collectives that end early when another rank has posted a failure notice.

A gloo wait that times out closes the group's connections, so waiting in slices is no option: it
would abort healthy transfers. Instead, a watchdog thread checks the store for the groups of waits
that last longer than a period, and closes a group's connections only when there is a notice. That
ends the wait.
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

from fsdp_dynamo.comm.collective_log import Entry
from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.peer_failure import peer_failure_message
from fsdp_dynamo.comm.point_to_point import UnreachableError, Work, peer_of
from fsdp_dynamo.errors import DivergenceError, RankFailedError

PERIOD_S = 1.0
STORE_TIMEOUT_S = 5.0
"""Limit for diagnostics: the store may be on the rank that has stopped."""

_MAX_IDLE_PERIODS = 30
_INTERRUPT_TAG = 0x0D000001

_Wait = tuple[int, dist.ProcessGroup]


class _Watchdog:
    """Thread that checks long waits; it ends after a while without any."""

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._is_alive = False

    def begin(self, group: dist.ProcessGroup) -> None:
        """The calling thread starts to wait for a collective."""
        self._waits[threading.get_ident()] = (next(self._numbers), group)
        if not self._is_alive:
            self._start()

    def end(self) -> None:
        """The calling thread's wait is over."""
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
        """Whether the thread ends; not if a wait has begun in the meantime."""
        with self._lock:
            self._is_alive = False  # first: a wait that begins from here on starts another thread
            self._is_alive = bool(self._waits)
            return not self._is_alive


def _interrupt_if_noticed(group: dist.ProcessGroup) -> None:
    check_notices = _notice_checks.get(group)
    if check_notices is None:
        return
    try:
        check_notices(group)
    except DivergenceError:
        _close_connections(group)
    except RuntimeError:  # the store or the group is gone: the waits fail by themselves
        pass


def _close_connections(group: dist.ProcessGroup) -> None:
    """Let all waits of a group fail: one that times out closes the connections to all ranks.

    A rank whose own connections are closed already refuses such a wait at once, so each is tried.
    """
    for distance in range(1, group.size()):
        other = (group.rank() + distance) % group.size()
        with suppress(RuntimeError):
            unmatched = group.recv([torch.empty(1)], other, _INTERRUPT_TAG)
            unmatched.wait(timedelta(milliseconds=1))


_watchdog = _Watchdog()
_notice_checks: WeakKeyDictionary[dist.ProcessGroup, Callable[[dist.ProcessGroup], None]] = (
    WeakKeyDictionary()
)
_notice_posters: WeakKeyDictionary[dist.ProcessGroup, Callable[[DivergenceError], None]] = (
    WeakKeyDictionary()
)


def enable_watchdog(
    group: dist.ProcessGroup,
    check_notices: Callable[[dist.ProcessGroup], None],
    post_notice: Callable[[DivergenceError], None],
) -> None:
    """Let waits for a group's collectives end when there is a notice.

    Args:
        group: a gloo group.
        check_notices: raises ``DivergenceError`` if there is a notice. It is given the group, and
            must hold no reference to it: the group would never be freed.
        post_notice: posts an error as a notice.
    """
    _notice_checks[group] = check_notices
    _notice_posters[group] = post_notice


def wait_with_watchdog(
    works: Sequence[Work], group: dist.ProcessGroup, entry: Entry | None = None
) -> None:
    """Block until collectives of CPU tensors are complete.

    Args:
        works: the operations.
        group: of the collectives.
        entry: the collective, for messages.

    Raises:
        DivergenceError: another rank of the group has posted a notice.
        RankFailedError: a rank is gone, or has not come within the group's timeout.
        RuntimeError: a collective failed for another reason.
    """
    watched = group in _notice_checks
    if watched:
        _watchdog.begin(group)
    position = 0
    try:
        for position, work in enumerate(works):  # noqa: B007
            work.wait()
    except RuntimeError as error:
        if watched:
            cause = _cause(error, group, peer_of(group, works, position), entry)
            if cause is not None:
                raise cause from None  # gloo's own message is of no help
        raise
    finally:
        if watched:
            _watchdog.end()


def refusal_of(error: UnreachableError, group: dist.ProcessGroup, entry: Entry) -> RuntimeError:
    """The error to raise for a collective whose messages gloo has refused to begin."""
    cause = None if group not in _notice_checks else _cause(error, group, error.peer, entry)
    return cause or error


def wait_until_settled(works: Sequence[Work], group: dist.ProcessGroup) -> None:
    """Wait until works have completed or failed; a notice ends those that never would.

    A complete gloo work must not be waited for again: it would wait for another message.
    """
    _watchdog.begin(group)
    try:
        for work in works:
            if not _is_complete(work):
                work.wait()
    except RuntimeError:
        pass  # the connections are closed: no more data arrives
    finally:
        _watchdog.end()


def _is_complete(work: Work) -> bool:
    is_completed = getattr(work, "is_completed", None)  # coalesced works have no such method
    return is_completed is not None and bool(is_completed())


def _cause(
    error: RuntimeError, group: dist.ProcessGroup, peer: int | None, entry: Entry | None
) -> DivergenceError | None:
    """The error of another rank's notice, or one for the peer, which is then posted."""
    message = peer_failure_message(error, peer, entry)
    notice = run_with_timeout(STORE_TIMEOUT_S, partial(_notice_checks[group], group))
    if isinstance(notice, DivergenceError):
        return notice
    if message is None:
        return None
    failure = RankFailedError(message)
    run_with_timeout(STORE_TIMEOUT_S, partial(_notice_posters[group], failure))
    return failure
