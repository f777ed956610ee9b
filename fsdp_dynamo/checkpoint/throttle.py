"""Background work that leaves most of the processor to training."""

from __future__ import annotations

import time
from collections.abc import Iterator

CHUNK_BYTES = 1 << 20
"""Bytes processed between two pauses."""

_MIN_WORK_S = 2e-3


class Throttle:
    """Limits the processor time of one thread.

    Args:
        duty_cycle: fraction of the time that the thread may work; 1: no pauses.
    """

    def __init__(self, duty_cycle: float = 1.0) -> None:
        self._pause_per_second = 1.0 / duty_cycle - 1.0
        self._worked_at_pause = 0.0

    def begin(self) -> None:
        """Count this thread's work from now on."""
        self._worked_at_pause = time.thread_time()

    def pause(self) -> None:
        """Sleep in proportion to the work since the last pause; call it often."""
        worked = time.thread_time() - self._worked_at_pause
        if self._pause_per_second > 0 and worked > _MIN_WORK_S:
            time.sleep(worked * self._pause_per_second)
            self._worked_at_pause = time.thread_time()

    def chunks(self, view: memoryview) -> Iterator[memoryview]:
        """A buffer in chunks, with a pause after each."""
        for begin in range(0, len(view), CHUNK_BYTES):
            yield view[begin : begin + CHUNK_BYTES]
            self.pause()
