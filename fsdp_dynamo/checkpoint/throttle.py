"""Work in the background that leaves the processor to the training."""

from __future__ import annotations

import time
from collections.abc import Iterator

PIECE = 1 << 20
"""Bytes that are worked on at a time."""

_LEAST_S = 2e-3


class Pace:
    """Lets one thread work for a share of the time only.

    Args:
        share: of the time; 1: no pauses.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._pause_a_second = 1.0 / share - 1.0
        self._worked_until = 0.0

    def begin(self) -> None:
        """Count this thread's work from now on."""
        self._worked_until = time.thread_time()

    def rest(self) -> None:
        """Sleep as long as the work since the last pause asks for; call it often."""
        worked = time.thread_time() - self._worked_until
        if self._pause_a_second > 0 and worked > _LEAST_S:
            time.sleep(worked * self._pause_a_second)
            self._worked_until = time.thread_time()

    def pieces(self, view: memoryview) -> Iterator[memoryview]:
        """A buffer in pieces, with rests between them."""
        for begin in range(0, len(view), PIECE):
            yield view[begin : begin + PIECE]
            self.rest()
