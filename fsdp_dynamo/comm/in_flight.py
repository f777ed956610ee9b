"""Handle of a collective that was issued."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.collective_log import is_profiling, profiler_range
from fsdp_dynamo.comm.point_to_point import Work
from fsdp_dynamo.comm.streams import StreamEvent, timer_of
from fsdp_dynamo.comm.watchdog import wait_on_device, wait_until_finished, wait_with_watchdog


class InFlight:
    """Collective in flight; keeps its buffers alive until it has been waited for.

    Args:
        works: handles of the backend; empty if nothing is transferred.
        buffers: inputs and outputs, which the backend reads and writes until the wait.
        event: recorded event, or ``None`` if events are not recorded.
        finish: local work once all data has arrived, or ``None``.
        group: process group; with it, the watchdog ends waits for ranks that have failed.
        entry: log entry, for error messages.
    """

    __slots__ = ("_buffers", "_entry", "_event", "_finish", "_group", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        buffers: Sequence[torch.Tensor] = (),
        event: events.Event | None = None,
        finish: Callable[[], object] | None = None,
        group: dist.ProcessGroup | None = None,
        entry: collective_log.Entry | None = None,
    ) -> None:
        self._works = list(works)
        self._entry = entry
        self._buffers = buffers
        self._finish = finish
        self._group = group
        self._event = event

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """Inputs and outputs; empty after the wait."""
        return self._buffers

    def wait(self) -> None:
        """Block until complete (on CUDA: make the current stream wait)."""
        event, self._event = self._event, None
        if event is None:
            self._wait()
            return
        began_ns = events.blocked_since(event)
        timer = timer_of(self._buffers[0].device) if self._buffers else None
        self._wait()
        events.complete(event, began_ns, None if timer is None else timer.stopped())

    def _wait(self) -> None:
        if not is_profiling():
            self._complete()
            return
        kind, label = ("collective", "") if self._entry is None else self._entry[2:4]
        with profiler_range(kind, label, is_wait=True):
            self._complete()

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        if self._works:
            self._wait_for_works()
        if finish is not None:
            finish()
        self._buffers = ()

    def _wait_for_works(self) -> None:
        """Wait for all works; after an error, drop the remaining ones.

        Dropping is safe: gloo never writes to freed buffers. The list is cleared in place, because
        the frames in the error's traceback refer to it, too.
        """
        try:
            if self._group is None:
                for work in self._works:
                    work.wait()
            elif isinstance(self._works[0], StreamEvent):
                wait_on_device(self._works[0], self._group)
            else:
                wait_with_watchdog(self._works, self._group, self._entry)
        except RuntimeError:
            self._works.clear()
            raise
        self._works = []

    def abandon(self) -> None:
        """Wait until nothing writes to the buffers any more, even if the collective fails."""
        self._event = self._finish = None
        if self._group is not None:
            wait_until_finished(self._works, self._group)
        else:
            for work in self._works:
                work.abandon() if isinstance(work, InFlight) else work.wait()
        self._works, self._buffers = [], ()

    def __del__(self) -> None:
        """Finish a collective that nobody waited for, as when a model is dropped after an error.

        gloo cannot reuse a connection with a message that has no buffer to go to.
        """
        if self._works and not sys.is_finalizing():
            self.abandon()


__all__ = ["InFlight"]
