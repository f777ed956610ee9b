"""Waits for other ranks that end early when another rank has posted a failure notice.

All waits of this package for other ranks go through this file: waits for its own collectives
(``wait_with_watchdog``, ``wait_on_device``) and waits inside torch's blocking calls (``watched``).

A gloo wait that times out closes the group's connections, so waiting in short slices would abort
healthy transfers. Instead a watchdog thread checks the store for groups whose waits last longer
than a period, and closes a group's connections only if there is a notice. That ends the wait.

On a device a wait blocks a stream, not the host. The thread then checks groups whose streams are
blocked (``comm.device_waits``). If ranks have diverged, the next wait raises the error. Where a
stream stays blocked, the communicators are aborted, which frees a host that waits for its device.
"""

from __future__ import annotations

import re
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.collective_log import FULL_PARAMS, Entry, recent, record
from fsdp_dynamo.comm.device_waits import device_waits
from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.point_to_point import UnreachableError, Work, peer_of
from fsdp_dynamo.comm.streams import StreamEvent
from fsdp_dynamo.errors import DivergenceError, FSDPError, RankFailedError, with_section

# -- peer failure ----------------------------------------------------------------------------------
# Error messages for collectives that failed because another rank is late or gone.


_LATE = re.compile(r"[Tt]imed? ?out(?: waiting (\d+)ms)?")
_GONE = re.compile(
    r"closed|reset by peer|Broken pipe|refused|unreachable|remote process exited", re.IGNORECASE
)
_PROBE_TAG = 0x0D000002

GONE = "a closed connection"
GONE_FIX = (
    "It has ended or was killed (usually because it ran out of memory), or its machine is down: "
    "look at the end of its output, then start all ranks again."
)
_FULL_PARAMS_FIX = " All ranks must call state_dict() and summon_full_params()."
_ALONE_FIX = (
    "It may not have called the model at all (if rank == 0: evaluate(model)): all ranks must, as a "
    "forward gathers from all. Or it"
)


class SideGroup:
    """A gloo group of the ranks of a group of another backend, whose connections tell who is gone.

    Attributes:
        group: ``None`` where there is none.
        is_tried: whether all ranks have tried to make it.
    """

    group: dist.ProcessGroup | None = None
    is_tried = False


class OnDemand:
    """Whether two ranks of a gloo group connect when they first exchange a message."""

    connects = False


def beside(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the gloo group beside a group, if there is one, else the group."""
    return state_of(group, SideGroup).group or group


def gone_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks to which a connection of a gloo or side group is closed.

    gloo notices at once when the process at the other end ends, and reports it in the next
    operation. The operation here is a receive that nobody answers and nobody waits for.
    """
    probed = beside(group)
    if state_of(probed, _Interrupted).is_so:  # by this process: it would take all for gone
        return []
    gone = [rank for rank in _connected(probed) if _is_closed(probed, rank)]
    return [dist.get_global_rank(probed, rank) for rank in gone]


def _is_closed(group: dist.ProcessGroup, rank: int) -> bool:
    try:
        group.recv([torch.empty(1, device="cpu")], rank, _PROBE_TAG)
    except RuntimeError as error:
        return _GONE.search(str(error)) is not None
    return False


def _connected(group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a gloo group to which this rank has connections.

    In a group that connects on demand, those at distances of 1, 2, 4, ... have exchanged messages.
    """
    own, size = group.rank(), group.size()
    distances = set(range(1, size))
    if state_of(group, OnDemand).connects:
        distances &= {1 << k for k in range(size.bit_length())}
    return [rank for rank in range(size) if {abs(rank - own), size - abs(rank - own)} & distances]


def _failure_of_gone(group: dist.ProcessGroup) -> RankFailedError | None:
    """Return an error if a rank is gone; each rank looks at those that it has connections to."""
    gone = gone_ranks(group)
    if not gone:
        return None
    entry = next(iter(recent(group, 1)), None)
    return RankFailedError(str(peer_failure_message(RuntimeError(GONE), group, gone[0], entry)))


def peer_failure_message(
    error: RuntimeError, group: dist.ProcessGroup, peer: int | None, entry: Entry | None
) -> str | None:
    """Return the message for a peer that is late or gone; ``None`` for errors with another cause.

    Args:
        error: error of the backend; gloo's errors differ only in their text.
        peer: global rank at the other end; ``None``: all other ranks.
        entry: the collective, if known.
    """
    is_full_params = entry is not None and entry.use == FULL_PARAMS
    text = str(error)
    late = _LATE.search(text)
    if late is None and _GONE.search(text) is None:
        return None
    if late is not None:
        within = f" within {int(late[1]) / 1000:g} s" if late[1] else " within the group's timeout"
        got = f"nothing{within}"
        begin = _ALONE_FIX if entry is not None and entry.use == "forward" else "It"
        fix = (
            f"{begin} is stopped, stuck, cut off, or waits for something else: look at its stack "
            "(py-spy dump), then start all ranks again. If it is only slow, give the process group "
            "a longer timeout."
        )
    else:
        got, fix = GONE, GONE_FIX
        gone = gone_ranks(group) if peer is None else [peer]
        peer = gone[0] if len(gone) == 1 else None
    where = "another rank" if peer is None else f"rank {peer}"
    what = "a collective" if entry is None else entry.description()
    message = f"{where}: expected its part of {what}, got {got}. {fix}"
    if not is_full_params:
        return message
    return with_section(f"{message}{_FULL_PARAMS_FIX}", "other-units-on-one-rank")


# -- watchdog --------------------------------------------------------------------------------------


PERIOD_S = 1.0
STORE_TIMEOUT_S = 5.0
"""Limit for diagnostics, since the store may be on the rank that has stopped."""

_MAX_IDLE_PERIODS = 60
_PERIODS_UNTIL_GONE = 8
_INTERRUPT_TAG = 0x0D000001

_FIRST_LOOKS = frozenset({1, 2, 3, 5, 8, 12, 18})
_LOOK_EVERY = 15


def is_look(num_periods: int) -> bool:
    """Whether a wait that has lasted so many periods is looked at; more and more seldom.

    Each look reads the store, which thousands of ranks share.
    """
    return num_periods in _FIRST_LOOKS or (num_periods > 0 and num_periods % _LOOK_EVERY == 0)


class _SpareLooks:
    """Looks that a rank may take although no stream is blocked, as another rank may ask for it.

    One a minute, of two operations; most are saved for the time after the last wait.
    """

    _MOST, _PERIODS_EACH, _FIRST = 5.0, 60, 3

    def __init__(self) -> None:
        self._number = self._MOST
        self._next = self._FIRST

    def take(self, num_idle: int) -> bool:
        """Whether to look now, in another period, after so many periods without a wait."""
        self._number = min(self._number + 1 / self._PERIODS_EACH, self._MOST)
        if num_idle == 0:
            self._next = self._FIRST
        takes = self._number >= (1 if num_idle >= self._next else self._MOST)
        if takes:
            self._number -= 1
            self._next = max(self._next, 2 * num_idle)
        return takes


class Monitor(Protocol):
    """Questions of the watchdog to other ranks, during long waits (``health.notices``)."""

    def look(self, group: dist.ProcessGroup, num_periods: int, runs_ahead: bool) -> None:
        """Look once during a wait; raise ``DivergenceError`` for a failure of other ranks.

        Args:
            num_periods: for how many periods this rank has waited.
            runs_ahead: a stream waits, not the host.
        """

    def look_in_passing(self) -> None:
        """Look although this rank does not wait, as another one may; raises as ``look``."""

    def raise_notice(self) -> None:
        """Raise the error that another rank has posted, without counting it as raised."""

    def count_raised(self, error: DivergenceError) -> None:
        """Count an error as raised by this rank; post it unless another rank has posted it."""

    def report_blocked(self, error: DivergenceError) -> None:
        """Report an error that no wait raises because the host is blocked by its device."""


@dataclass(slots=True, eq=False)
class _Wait:
    """Wait of a thread.

    Attributes:
        group: group whose log has the collective.
        through: group that communicates.
        num_periods: for how many periods it has lasted.
    """

    group: dist.ProcessGroup
    through: dist.ProcessGroup
    num_periods: int = 0


class _Watchdog:
    """Thread that looks at long waits; it ends after a period without waits.

    Attributes:
        aborts: waits of a device that are overdue after an error end.
        monitor: asks other ranks; ``None``: nothing is watched yet.
        closed: why the connections of a group were closed, which gloo does not remember.
    """

    def __init__(self) -> None:
        self._waits: dict[int, _Wait] = {}
        self.aborts = True
        self.monitor: Monitor | None = None
        self.closed: WeakKeyDictionary[dist.ProcessGroup, DivergenceError] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._is_alive = False
        self._reported: set[str] = set()

    def begin(self, wait: _Wait) -> None:
        """Register that the calling thread starts to wait for a collective."""
        self._waits[threading.get_ident()] = wait
        self.ensure_running()

    def end(self) -> None:
        """Register that the calling thread's wait is over."""
        self._waits.pop(threading.get_ident(), None)

    def ensure_running(self) -> None:
        """Start the thread unless it runs."""
        if self._is_alive:
            return
        with self._lock:
            if not self._is_alive:
                self._is_alive = True
                threading.Thread(target=self._run, name="fsdp_dynamo", daemon=True).start()

    def _run(self) -> None:
        """Watch; after an error, report it once and watch again."""
        while True:
            try:
                return self._watch()
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                if text not in self._reported:
                    self._reported.add(text)
                    _warn_of_failure(error)
                time.sleep(PERIOD_S)

    def _watch(self) -> None:
        idle = 0
        while idle < _MAX_IDLE_PERIODS or not self._ends():
            idle = idle + 1 if self._is_idle() else 0

    def _is_idle(self) -> bool:
        """Look once; whether nobody waits. Keeps no group alive afterwards."""
        before = list(self._waits.values())
        time.sleep(PERIOD_S)
        now = list(self._waits.values())
        for wait in before:
            if wait in now:  # no other one of its thread
                self._look_at_host(wait)
        self._look_at_devices()
        return not (before or now or device_waits())

    def _look_at_host(self, wait: _Wait) -> None:
        wait.num_periods += 1
        if is_look(wait.num_periods) and self._error_of_look(wait.group, wait.num_periods, False):
            _close_connections(wait.through)

    def _look_at_devices(self) -> None:
        waits = device_waits()
        if waits.has_failed:
            waits.look_after_failure(self.aborts)
            return
        error = None
        num_idle = _MAX_IDLE_PERIODS
        for group, num_overdue, group_idle in waits.look():
            num_idle = min(num_idle, group_idle)
            if is_look(num_overdue):
                error = error or self._error_of_look(group, num_overdue, True)
            # Ranks that have done their part may end while slow work is still before the wait.
            if error is None and num_overdue >= _PERIODS_UNTIL_GONE and is_look(num_overdue):
                error = _failure_of_gone(group)
        if error is None and num_idle < _MAX_IDLE_PERIODS:
            spare = state_of(dist.group.WORLD, _SpareLooks)
            error = self._error_of_look() if spare.take(num_idle) else None
        if error is not None and self.monitor is not None:
            with suppress(RuntimeError):  # the store is gone
                self.monitor.count_raised(error)
            waits.fail(error, self.monitor.report_blocked)

    def _ends(self) -> bool:
        """Whether the thread ends now, which it does not if a wait has begun in the meantime."""
        with self._lock:
            # Set before the check: a wait that begins after it starts another thread.
            self._is_alive = False
            self._is_alive = bool(self._waits) or bool(device_waits())
            return not self._is_alive

    def _error_of_look(self, *wait: Any) -> DivergenceError | None:
        """Return the error of a notice, or of diverged ranks; without a wait, look in passing."""
        try:
            if self.monitor is not None:
                self.monitor.look(*wait) if wait else self.monitor.look_in_passing()
        except DivergenceError as error:
            return error
        except (RuntimeError, ValueError):
            pass  # the store or the group is gone: waits fail by themselves
        return None


def _warn_of_failure(error: Exception) -> None:
    where = "".join(traceback.format_exception(error))
    with suppress(Warning):  # where warnings are errors
        warnings.warn(
            f"the thread that watches waits for other ranks has failed, and begins anew; please "
            f"report this: {where}",
            stacklevel=2,
        )


class _Interrupted:
    """Whether this process has closed the connections of a group."""

    is_so = False


def _close_connections(group: dist.ProcessGroup) -> None:
    """End all waits of a group with an error, by letting a wait on every connection time out.

    gloo refuses the wait at once on a connection that is closed already, so each one is tried.
    """
    state_of(group, _Interrupted).is_so = True
    for rank in _connected(group):
        with suppress(RuntimeError):
            unmatched = group.recv([torch.empty(1, device="cpu")], rank, _INTERRUPT_TAG)
            unmatched.wait(timedelta(milliseconds=1))


_watchdog = _Watchdog()


def set_abort_on_divergence(aborts: bool) -> None:
    """Choose whether an error that concerns other ranks ends waits of a device, too.

    By default the communicators of this process are aborted, if a stream is still blocked some
    seconds after the error was found. A host that waits for its device (``.item()``) goes on; what
    it reads is worthless, and the next wait, optimizer step or state dict raises the error. A
    process whose device stays blocked for another minute ends. Without aborts it stays until the
    process group's timeout, for a debugger.

    Args:
        aborts: whether to abort. Set it before the first step.
    """
    _watchdog.aborts = aborts


def refuse_results(error: DivergenceError) -> None:
    """Make all later waits, optimizer steps and state dicts of this run raise an error."""
    device_waits().fail(error, None)


def report_failure_at_exit() -> None:
    """Report an error that ends this process as another one, such as an aborted collective's."""
    device_waits().report_now()


def set_monitor(monitor: Monitor) -> None:
    """Watch waits from now on, and let failures of other ranks end them."""
    _watchdog.monitor = monitor


def wait_with_watchdog(
    works: Sequence[Work], group: dist.ProcessGroup, entry: Entry | None = None
) -> None:
    """Block until collectives of CPU tensors are complete.

    Raises:
        DivergenceError: another rank of the group has posted a notice.
        RankFailedError: a rank is gone, or has not come within the group's timeout.
        RuntimeError: a collective failed for another reason.
    """
    position = 0
    try:
        with Interruptible(group):
            for position, work in enumerate(works):  # noqa: B007
                work.wait()
    except RuntimeError as error:
        cause = _cause(error, group, peer_of(group, works, position), entry)
        if cause is not None:
            raise cause from None  # gloo's own message does not help
        raise


def wait_on_device(end: StreamEvent, group: dist.ProcessGroup) -> None:
    """Make the current stream wait for the end of a collective, and watch it.

    Raises:
        DivergenceError: a failure of any group was found since the last wait.
    """
    raise_if_failed()
    end.wait()
    if _watchdog.monitor is not None and group.size() > 1 and not end.is_captured:
        device_waits().add(group, end)
        _watchdog.ensure_running()


def raise_if_failed() -> None:
    """Raise the error of ranks that have diverged on devices, if there is one.

    Aborted collectives end without results, so nothing may be updated or saved behind them.
    """
    failure = device_waits().failure()
    if failure is not None:
        raise failure


@contextmanager
def watched(group: dist.ProcessGroup, kind: str, use: str, numel: int = 0) -> Iterator[None]:
    """Context for one of torch's blocking collectives, which all ranks of a group call.

    Ranks log the collective and compare it, as they do for collectives of units. Raises as
    ``wait_with_watchdog``.

    Args:
        kind: ``"all_reduce"``, ``"broadcast"``, ...
        use: purpose, for messages.
        numel: elements, if equal on all ranks.
    """
    raise_if_failed()
    entry = record(group, kind, "", numel, use)
    try:
        with Interruptible(group, beside(group)):
            yield
    except RuntimeError as error:
        cause = None if isinstance(error, FSDPError) else _cause(error, group, None, entry)
        if cause is None:
            raise
        raise cause from None


class Interruptible:
    """Context for a wait for other ranks; a notice makes it fail with an error of gloo's.

    Args:
        group: group whose log has the collective.
        through: group that communicates, if it is another one.
    """

    def __init__(self, group: dist.ProcessGroup, through: dist.ProcessGroup | None = None) -> None:
        self._wait = _Wait(group, through or group)
        self._is_watched = _watchdog.monitor is not None

    def __enter__(self) -> None:
        if self._is_watched:
            _watchdog.begin(self._wait)

    def __exit__(self, *_: object) -> None:
        if self._is_watched:
            _watchdog.end()


def notice() -> DivergenceError | None:
    """Return the error that another rank has posted, without counting it as raised."""
    monitor = _watchdog.monitor
    raised = None if monitor is None else run_with_timeout(STORE_TIMEOUT_S, monitor.raise_notice)
    return raised if isinstance(raised, DivergenceError) else None


def refusal_of(error: RuntimeError, group: dist.ProcessGroup, entry: Entry | None) -> RuntimeError:
    """Return the error to raise for a collective that the backend refuses to start or to end."""
    if isinstance(error, FSDPError):
        return error
    peer = error.peer if isinstance(error, UnreachableError) else None
    return _cause(error, group, peer, entry) or error


def wait_until_finished(works: Sequence[Work], group: dist.ProcessGroup) -> None:
    """Wait until works have completed or failed; a notice ends works that never would.

    A completed gloo work must not be waited for again: it would wait for another message.
    """
    # After an error the connections are closed, so no more data arrives.
    with suppress(RuntimeError), Interruptible(group):
        for work in works:
            if not _is_complete(work):
                work.wait()


def _is_complete(work: Work) -> bool:
    is_completed = getattr(work, "is_completed", None)  # coalesced works have no such method
    return is_completed is not None and bool(is_completed())


def _cause(
    error: RuntimeError, group: dist.ProcessGroup, peer: int | None, entry: Entry | None
) -> DivergenceError | None:
    """Return the error of another rank's notice, or one for the peer, which is then delivered."""
    known = _watchdog.closed.get(group)
    if known is not None:
        return type(known)(
            f"{known} The process group has no connections since: start all ranks again, or make a "
            "new group and wrap the model again."
        )
    of_devices = device_waits().failure()  # counted as raised when it was found
    failure = of_devices or notice()
    if failure is None:
        message = peer_failure_message(error, group, peer, entry)
        if message is None:
            return None
        failure = RankFailedError(message)
    _watchdog.closed[group] = type(failure)(str(failure))  # without the traceback's frames
    if _watchdog.monitor is not None and of_devices is None:
        run_with_timeout(STORE_TIMEOUT_S, partial(_watchdog.monitor.count_raised, failure))
    return failure
