"""Waits of a device's streams, watched from another thread than the one that enqueues them.

Behind each wait for a collective an event is recorded on the stream that waits. An event holds no
tensor; a backend's handle would keep the collective's output in memory, and what comes next could
not use it again. An event that is not reached says that the stream stands still or is slow, not
which: that is for the ranks to compare (``agreement.collective_order``).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.errors import DivergenceError

_LOOKS_UNTIL_OVERDUE = 3
_LOOKS_UNTIL_BLOCKED = 3


class Reachable(Protocol):
    """A point on a stream."""

    @property
    def is_reached(self) -> bool:
        """Whether the stream has come there; asking does not block."""


class _Pending:
    """Points of one group's waits that are not reached yet, oldest first.

    Attributes:
        run: the default group that its ranks are of.
    """

    def __init__(self) -> None:
        self.run = _current_run()
        self.points: deque[Reachable] = deque()
        self._oldest: Reachable | None = None
        self._num_looks = 0

    def is_overdue(self) -> bool:
        """Whether the oldest has been the same for some looks; drops those that are reached."""
        try:
            while self.points and self.points[0].is_reached:
                self.points.popleft()
        except RuntimeError:  # the device has failed, which it tells the main thread itself
            self.points.clear()
        oldest = self.points[0] if self.points else None
        is_same = oldest is not None and oldest is self._oldest
        self._num_looks = self._num_looks + 1 if is_same else 0
        self._oldest = oldest
        return self._num_looks >= _LOOKS_UNTIL_OVERDUE


def _current_run() -> weakref.ref[dist.ProcessGroup] | None:
    world = dist.group.WORLD
    return None if world is None else weakref.ref(world)


class DeviceWaits:
    """All waits of streams for collectives, by group, and the error that ends them.

    The thread that enqueues adds points; another one looks at them from time to time. Groups are
    not kept alive.
    """

    def __init__(self) -> None:
        self._pending: WeakKeyDictionary[dist.ProcessGroup, _Pending] = WeakKeyDictionary()
        self._lock = threading.Lock()  # of the keys
        self._failure: DivergenceError | None = None
        self._report: Callable[[DivergenceError], None] | None = None
        self._run: weakref.ref[dist.ProcessGroup] | None = None
        self._looks_since_failure = 0

    def __bool__(self) -> bool:
        """Whether there is anything to look at."""
        run = _current_run()
        pending = [one for one in self._all().values() if one.run == run]
        return self._looks_since_failure > 0 or any(one.points for one in pending)

    def add(self, group: dist.ProcessGroup, point: Reachable) -> None:
        """Watch a point behind a wait for one of a group's collectives."""
        pending = self._pending.get(group)
        if pending is None:
            with self._lock:
                pending = self._pending[group] = _Pending()
        pending.points.append(point)

    def _all(self) -> dict[dist.ProcessGroup, _Pending]:
        with self._lock:
            return dict(self._pending)

    def look(self) -> list[tuple[dist.ProcessGroup, bool]]:
        """All groups, and whether a stream waits for one of them that has not moved for some looks.

        (A group of which nothing is pending may be one for which another rank waits.) Groups that
        were destroyed are left out: there may be no store any more. None after a failure.
        """
        run = _current_run()
        if self._failure is not None and self._run == run:
            return []
        now = [(group, pending) for group, pending in self._all().items() if pending.run == run]
        return [(group, pending.is_overdue()) for group, pending in now]

    # -- the error -----------------------------------------------------------------------------

    def fail(self, error: DivergenceError, report: Callable[[DivergenceError], None]) -> None:
        """Raise an error at the next wait, whatever its group. What is pending is given up.

        Args:
            error: what was found.
            report: called with it if there is no next wait.
        """
        self._failure, self._report, self._run = error, report, _current_run()
        self._looks_since_failure = 1
        for pending in self._all().values():
            pending.points.clear()

    def raise_if_failed(self) -> None:
        """Raise what ``fail`` was given for the ranks of this run, anew at each call.

        Raises:
            DivergenceError: what was found.
        """
        if self._failure is None:
            return
        self._looks_since_failure = 0
        if self._run == _current_run():
            raise type(self._failure)(str(self._failure))
        self._failure = None  # of groups that were destroyed

    def report_if_blocked(self) -> None:
        """Look: report an error that no wait has raised for some looks, once."""
        if self._looks_since_failure == 0:
            return
        self._looks_since_failure += 1
        if self._looks_since_failure > _LOOKS_UNTIL_BLOCKED:
            self._looks_since_failure = 0
            if self._failure is not None and self._report is not None:
                self._report(self._failure)
