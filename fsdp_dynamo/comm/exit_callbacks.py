"""End of a rank: callbacks after an uncaught exception, and a pause for gloo's threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType

ExitCallback = Callable[[BaseException], None]
"""Called with the exception; an exception raised by the callback is dropped."""

_TIMEOUT_S = 5.0
_GLOO_PAUSE_S = 0.05


@cache
def register_exit_callback(callback: ExitCallback) -> None:
    """Call ``callback`` when an uncaught exception ends the main thread.

    The previous ``sys.excepthook`` runs first. A callback that is registered already is ignored.
    """
    previous, process = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if os.getpid() == process:  # a forked child is not a rank
            run_with_timeout(_TIMEOUT_S, partial(callback, error))

    sys.excepthook = hook


@cache
def wait_for_gloo_at_exit() -> None:
    """Give gloo's threads time to release tensors before the interpreter is finalized.

    They release the tensors of the last collective after its waiter has continued, and need the GIL
    to do so. A thread that requests the GIL during finalization is ended, which aborts the process
    (SIGABRT, "terminate called without an active exception") although all work is done. Destroying
    the process groups does not help while a model refers to them.
    """
    atexit.register(time.sleep, _GLOO_PAUSE_S)


def run_with_timeout(timeout_s: float, action: Callable[[], object]) -> Exception | None:
    """Run an action that may block forever on a thread, and abandon it after ``timeout_s``.

    Returns the exception that the action raised, if any.
    """
    raised: list[Exception] = []

    def run() -> None:
        try:
            action()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="fsdp_dynamo diagnostics", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return raised[0] if raised else None
