"""Lines on stderr about what takes long: half a minute of silence looks like a hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_AFTER_S = 5.0
"""What is done sooner is not told."""


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell what is being done if it takes long, and when it has ended; on rank 0.

    Args:
        what: is being done, with the verb first: ``"compiling the backward"``.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        yield
        return
    began = time.monotonic()
    timer = threading.Timer(_AFTER_S, lambda: _write(f"{what} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.monotonic() - began
        if seconds > _AFTER_S:
            _write(f"{what}: {seconds:.0f} s")


def _write(text: str) -> None:
    sys.stderr.write(f"fsdp_dynamo: {text}\n")
    sys.stderr.flush()


__all__ = ["told"]
