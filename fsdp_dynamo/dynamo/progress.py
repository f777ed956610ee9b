"""Progress of long work on rank 0's stderr: half a minute of silence looks like a hang."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._dynamo.callback import (  # no public API reports compilations
    CallbackArgs,
    CallbackTrigger,
    callback_handler,
)

from fsdp_dynamo.dynamo.untraced import UNDER_LOCK, untraced

_AFTER_S = 5.0
_SHORT_ONES_S = 15.0


@contextmanager
def told(what: str) -> Iterator[None]:
    """Report on rank 0 that work (``"warming up"``) takes long, and when it ends."""
    if not _is_told_here():
        yield
        return
    began = time.monotonic()
    timer = _write_later(lambda: f"{what} ...")
    try:
        yield
    finally:
        timer.cancel()
        seconds = time.monotonic() - began
        if seconds > _AFTER_S:
            _write(f"{what}: {seconds:.0f} s")


class CompilationProgress:
    """Lines about what this process compiles: each long compilation, and many short ones together.

    ``begin`` and ``end`` are callbacks of Dynamo's.
    """

    def __init__(self) -> None:
        self._what = ""
        self._again = ""
        self._began = 0.0
        self._timer: threading.Timer | None = None
        self._short_ones: list[float] = []

    def describe(self, what: str) -> None:
        """Say what the compilation in progress makes, and why."""
        self._what = what + self._again

    @untraced(UNDER_LOCK)
    def begin(self, args: CallbackArgs | None) -> None:
        """Prepare the line that appears if this compilation takes long."""
        is_anew = args is not None and is_recompile(args)
        self._again = " anew (TORCH_LOGS=recompiles says why)" if is_anew else ""
        self.describe("code")
        self._began = time.monotonic()
        if _is_told_here():
            self._timer = _write_later(lambda: f"compiling {self._what} ...")

    @untraced(UNDER_LOCK)
    def end(self, _: Any) -> None:
        """Report this compilation if it was long, and short ones whenever their sum is."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        seconds = time.monotonic() - self._began
        if seconds > _AFTER_S:
            _write(f"compiling {self._what}: {seconds:.0f} s")
            return
        self._short_ones.append(seconds)
        if sum(self._short_ones) > _SHORT_ONES_S:
            count, total = len(self._short_ones), sum(self._short_ones)
            _write(f"{count} short compilations, the last of {self._what}: {total:.0f} s")
            self._short_ones.clear()


def is_recompile(args: CallbackArgs) -> bool:
    """Whether the compilation that begins is not a function's first, nor that of a backward."""
    # Those of a function are numbered from 0, after the last "/".
    number = args.compile_id.rpartition("/")[2]
    return args.callback_trigger is CallbackTrigger.DYNAMO and number != "0"


def _is_told_here() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _write_later(text: Callable[[], str]) -> threading.Timer:
    timer = threading.Timer(_AFTER_S, lambda: _write(text()))
    timer.daemon = True
    timer.start()
    return timer


def _write(text: str) -> None:
    sys.stderr.write(f"fsdp_dynamo: {text}\n")
    sys.stderr.flush()


compilations = CompilationProgress()


def report_compilations() -> None:
    """Report long compilations until ``torch.compiler.reset``."""
    if compilations.end not in callback_handler.end_callbacks:
        callback_handler.register_start_callback(compilations.begin)
        callback_handler.register_end_callback(compilations.end)


def report_this_compilation() -> None:
    """Report the compilation in progress, unless it is reported already."""
    if compilations.end not in callback_handler.end_callbacks:
        report_compilations()
        compilations.begin(None)


__all__ = [
    "CompilationProgress",
    "compilations",
    "is_recompile",
    "report_compilations",
    "report_this_compilation",
    "told",
]
