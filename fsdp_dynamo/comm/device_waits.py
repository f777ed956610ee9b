"""Waits that the main thread enqueues on a device's streams, watched by the watchdog's thread.

Behind each wait for a collective, an event is recorded on the waiting stream. Events hold no
tensors, while a backend's handle would keep the collective's output allocated. An event that is not
reached only shows that the stream is blocked or slow. To find out which, ranks compare their
collectives (``health.collective_order``).
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.errors import DivergenceError

_LOOKS_UNTIL_OVERDUE = 3
_LOOKS_UNTIL_BLOCKED = 3
_LOOKS_UNTIL_END = 60
_LAST_WORDS_S = 5.0
_SPOILED = (
    "Parameters may hold what collectives did not bring, or brought from other units: go on from a "
    "checkpoint."
)

Report = Callable[[DivergenceError], None]


class Reachable(Protocol):
    """Point on a stream."""

    @property
    def is_reached(self) -> bool:
        """Whether the stream has reached the point; does not block."""


class _Pending:
    """Unreached points behind one group's waits, oldest first.

    Attributes:
        num_added: number of waits so far.
        num_blocked: looks for which the oldest point has been unreached.
        num_idle: looks without a wait.
    """

    def __init__(self) -> None:
        self.points: deque[Reachable] = deque()
        self.num_added = 0
        self.num_blocked = self.num_idle = 0
        self._seen: tuple[Reachable | None, int] = None, 0

    def look(self) -> None:
        """Drop points that were reached, and count."""
        try:
            while self.points and self.points[0].is_reached:
                self.points.popleft()
        except RuntimeError:  # the device has failed; the main thread gets its own error
            self.points.clear()
        oldest = self.points[0] if self.points else None
        before, num_before = self._seen
        self.num_blocked = self.num_blocked + 1 if oldest is not None and oldest is before else 0
        is_idle = oldest is None and self.num_added == num_before
        self.num_idle = self.num_idle + 1 if is_idle else 0
        self._seen = oldest, self.num_added

    @property
    def num_overdue(self) -> int:
        """Number of looks for which the stream has been blocked for too long to be busy."""
        return max(0, self.num_blocked - _LOOKS_UNTIL_OVERDUE + 1)


class DeviceWaits:
    """Waits of streams for collectives by group, and the error that the next wait raises.

    The enqueuing thread adds points; the watchdog thread looks at them. Groups are not kept alive.
    """

    def __init__(self) -> None:
        self._pending: WeakKeyDictionary[dist.ProcessGroup, _Pending] = WeakKeyDictionary()
        self._lock = threading.Lock()  # guards the keys of _pending
        self._error: DivergenceError | None = None
        self._report: Report | None = None  # until the error is reported or raised
        self._num_looks = 0  # since the error
        self._has_aborted = False

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        return self._report is not None or any(one.points for one in self._groups().values())

    @property
    def has_failed(self) -> bool:
        """Whether waits raise an error."""
        return self._error is not None

    def add(self, group: dist.ProcessGroup, point: Reachable) -> None:
        """Watch a point behind a wait for one of a group's collectives."""
        pending = self._pending.get(group)
        if pending is None:
            with self._lock:
                pending = self._pending[group] = _Pending()
        pending.points.append(point)
        pending.num_added += 1

    def _groups(self) -> dict[dist.ProcessGroup, _Pending]:
        with self._lock:
            return dict(self._pending.items())

    def look(self) -> list[tuple[dist.ProcessGroup, int, int]]:
        """Return all groups, with the numbers of looks overdue and idle.

        A group without waits is included, since another rank may wait for it.
        """
        groups = self._groups()
        for one in groups.values():
            one.look()
        return [(group, one.num_overdue, one.num_idle) for group, one in groups.items()]

    def fail(self, error: DivergenceError, report: Report | None) -> None:
        """Make the next wait raise an error, whatever its group.

        ``report`` is called with the error if no wait raises it soon.
        """
        self._error, self._report = type(error)(f"{error} {_SPOILED}"), report

    def failure(self) -> DivergenceError | None:
        """Return the error given to ``fail``, a new object at every call, to raise."""
        if self._error is None:
            return None
        self._report = None
        return type(self._error)(str(self._error))

    def look_after_failure(self, aborts: bool) -> None:
        """Report an error that no wait has raised for several looks; end waits that are overdue.

        Other ranks have seen the notice by then. An abort earlier would give them errors of the
        backend in place of it. A process whose streams are still blocked long after the abort ends.
        """
        self._num_looks += 1
        if self._num_looks <= _LOOKS_UNTIL_BLOCKED:
            return
        self.report_now()
        is_overdue = any(num_overdue for _, num_overdue, _ in self.look())
        if aborts and is_overdue and not self._has_aborted:
            self._has_aborted = True
            # On a thread of its own, since an abort may hang.
            threading.Thread(target=abort_communicators, daemon=True).start()
        if aborts and is_overdue and self._num_looks > _LOOKS_UNTIL_END:
            last = f"{self._error} The process ends: its device stays blocked.\n"
            run_with_timeout(_LAST_WORDS_S, partial(sys.stderr.write, last))
            end_process(1)

    def report_now(self) -> None:
        """Report the error at once, if no wait has raised it."""
        report, self._report = self._report, None
        if report is not None and self._error is not None:
            report(self._error)


def device_waits() -> DeviceWaits:
    """Return the waits of this job; a new default group has new ones."""
    return state_of(dist.group.WORLD, DeviceWaits)


end_process = os._exit
"""Nothing else ends a process whose main thread is blocked in its device."""


def abort_communicators() -> None:
    """End all collectives of this process's devices; gloo's groups ignore it.

    NCCL aborts the communicators as a group: one after the other they may wait for each other.
    """
    groups = [*dist.distributed_c10d._world.pg_map]
    with ExitStack() as stack:
        backend = next(filter(None, map(_nccl_backend, groups)), None)
        if backend is not None:
            backend._group_start()
            stack.callback(backend._group_end)
        for group in reversed(groups):
            try:
                group.abort()
            except RuntimeError as error:
                warnings.warn(f"group {group.name()} was not aborted: {error}", stacklevel=2)


def _nccl_backend(group: dist.ProcessGroup) -> Any:
    """Return the group's NCCL backend, or ``None``."""
    device = torch.device("cuda")
    backend = group._get_backend(device) if device in group._device_types else None
    return backend if hasattr(backend, "_group_start") else None
