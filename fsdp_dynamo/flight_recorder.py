"""The last collectives of every rank, written down when one fails, and explained afterwards.

    fsdp_dynamo.record_flight("flight")       # in every rank, after init_process_group

    python -m fsdp_dynamo.flight flight       # when the run has failed: what happened, in words

A rank writes its record when an exception ends it, and when it is told to end (SIGTERM, which
torchrun sends to the others), also while it waits inside a collective. One that was killed leaves
none, which is a statement, too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fsdp_dynamo import order_log
from fsdp_dynamo.errors import FSDPStateError, explain

_STACK_FRAMES = 12


class _Recorder:
    """Where this rank writes its record; a record is written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._is_written = False

    def write(self, reason: str, stack: Sequence[str]) -> None:
        """Write the record, if nobody has."""
        with self._lock:
            if self._is_written:
                return
            self._is_written = True
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"rank-{self.rank}.json"
            draft = path.with_suffix(".part")
            draft.write_text(json.dumps(self._content(reason, stack)))
            draft.rename(path)

    def _content(self, reason: str, stack: Sequence[str]) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "host": socket.gethostname(),
            "reason": reason,
            "stack": list(stack)[-_STACK_FRAMES:],
            "groups": [
                {"ranks": list(ranks), "count": count, "entries": entries}
                for ranks, count, entries in order_log.all_recent()
            ],
        }


_recorder: _Recorder | None = None


def record_flight(folder: str | Path) -> None:
    """From now on, write this rank's last collectives to ``folder/rank-N.json`` when it fails.

    Records of an earlier run are removed. Handlers of exceptions and of SIGTERM that were there are
    called afterwards.

    Raises:
        FSDPStateError: there is no process group, or another thread than the main one calls it.
    """
    global _recorder
    if not dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        raise FSDPStateError(
            explain(
                expected="a process group, and a call in the main thread",
                got="none" if not dist.is_initialized() else "another thread",
                where="record_flight()",
                fix="Call it once in every rank, after init_process_group().",
            )
        )
    is_first = _recorder is None
    _recorder = _Recorder(Path(folder))
    (_recorder.folder / f"rank-{_recorder.rank}.json").unlink(missing_ok=True)
    if is_first:
        _write_at_exceptions()
        _write_at_termination()


def _write_at_exceptions() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if _recorder is not None:
                lines = traceback.format_exception(kind, error, trace)
                _recorder.write(f"{kind.__name__}: {error}", lines)
        finally:
            before(kind, error, trace)

    sys.excepthook = hook


def _write_at_termination() -> None:
    """A handler in Python runs when the main thread comes back from a collective, which may be
    never: the signal's number goes through a pipe to a thread that waits for it."""
    before = signal.getsignal(signal.SIGTERM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                _write_stack("SIGTERM")
                _end(before)

    threading.Thread(target=wait, name="flight", daemon=True).start()


def _write_stack(reason: str) -> None:
    """Of the main thread, as it is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if _recorder is not None:
        _recorder.write(reason, traceback.format_stack(frame))


def _end(before: Any) -> None:
    """As the signal would have ended the process."""
    if callable(before):
        before(signal.SIGTERM, None)
    elif before is not signal.SIG_IGN:
        os._exit(128 + signal.SIGTERM)
