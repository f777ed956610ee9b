"""What is done when an exception ends this rank: once set up, for all who want to know of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

OnFailure = Callable[[BaseException], None]
"""Is called with the exception; what it raises itself is dropped."""

_TIMEOUT_S = 5.0

_wanted: list[OnFailure] = []


def on_failure(do: OnFailure) -> None:
    """Call ``do`` when an exception that nobody has caught ends the main thread.

    Who was called before (``sys.excepthook``) is called first.
    """
    if not _wanted:
        _install()
    if do not in _wanted:
        _wanted.append(do)


def _install() -> None:
    before, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        for do in _wanted if os.getpid() == process else ():  # a forked child is no rank
            within(_TIMEOUT_S, lambda do=do: do(error))  # type: ignore[misc]

    sys.excepthook = hook


def within(seconds: float, do: Callable[[], object]) -> Exception | None:
    """Run something that may block for ever, and leave it there; returns what it has raised."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            do()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="fsdp_dynamo failing", daemon=True)
    thread.start()
    thread.join(seconds)
    return raised[0] if raised else None
