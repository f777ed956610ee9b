"""What is done when an exception ends this rank: once set up, for all who want to know of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

OnFailure = Callable[[BaseException], None]
"""Is called with the exception; what it raises itself is dropped."""

_wanted: list[OnFailure] = []


def on_failure(do: OnFailure) -> None:
    """Call ``do`` when an exception that nobody has caught ends the process.

    Who was called before (``sys.excepthook``) is called afterwards.
    """
    if not _wanted:
        _install()
    if do not in _wanted:
        _wanted.append(do)


def _install() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for do in _wanted:
            with suppress(Exception):
                do(error)
        before(kind, error, trace)

    sys.excepthook = hook
