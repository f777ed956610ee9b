"""The last collectives of every rank, written down when one fails, and explained afterwards.

    python -m fsdp_dynamo.flight FOLDER

A rank writes its record when an exception ends it, and when it is told to end (SIGTERM, which
torchrun sends to the others), also while it waits inside a collective; it says where. One that was
killed leaves none, which is a statement, too. Records go to ``$FSDP_DYNAMO_FLIGHT`` (``0``: none
are made), or to a folder of the run beside other temporary files; ``record_flight`` names another.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_dynamo import order_log
from fsdp_dynamo.errors import FSDPStateError, explain
from fsdp_dynamo.failing import on_failure

VARIABLE = "FSDP_DYNAMO_FLIGHT"
_STACK_FRAMES = 12


class _Recorder:
    """Where this rank writes its record: once, and again only when it has gone on since."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._lock = threading.Lock()
        self._written_at = -1

    @property
    def path(self) -> Path:
        """Of the record."""
        return self.folder / f"rank-{self._rank}.json"

    def write(self, reason: str, stack: Sequence[str]) -> None:
        """Write the record, if nobody has, and say where."""
        with self._lock:
            groups = order_log.all_recent()
            issued = sum(count for _, count, _ in groups)
            if self._written_at == issued:
                return
            self._written_at = issued
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = self.path.with_suffix(".part")
            draft.write_text(json.dumps(self._content(reason, stack, groups)))
            draft.rename(self.path)
        explainer = f"python -m fsdp_dynamo.flight {self.folder}"
        print(f"rank {self._rank}: flight record in {self.path} ({explainer})", file=sys.stderr)

    def _content(
        self, reason: str, stack: Sequence[str], groups: Sequence[order_log.Recent]
    ) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "reason": reason,
            "stack": list(stack)[-_STACK_FRAMES:],
            "groups": [
                {"ranks": list(ranks), "count": count, "entries": entries}
                for ranks, count, entries in groups
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
    if not dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        raise FSDPStateError(
            explain(
                expected="a process group, and a call in the main thread",
                got="none" if not dist.is_initialized() else "another thread",
                where="record_flight()",
                fix="Call it once in every rank, after init_process_group().",
            )
        )
    _begin(Path(folder))


def record_flight_by_default() -> None:
    """Where the user has said nothing: record all the same."""
    wanted = os.environ.get(VARIABLE, "")
    if _recorder is None and wanted != "0":
        _begin(Path(wanted) if wanted else _default_folder())


def _default_folder() -> Path:
    """The same for all ranks of a run on a machine."""
    environment = os.environ
    run = environment.get("TORCHELASTIC_RUN_ID", "none")
    if run == "none":  # torchrun with a fixed address, or another launcher
        run = environment.get("MASTER_PORT", f"process-{os.getppid()}")
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Path(tempfile.gettempdir()) / f"fsdp_dynamo-flight-{_user()}" / f"{run}-{attempt}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return str(os.getuid())


def _begin(folder: Path) -> None:
    global _recorder
    is_first = _recorder is None
    _recorder = _Recorder(folder)
    _recorder.path.unlink(missing_ok=True)
    on_failure(_record_error)
    if is_first and threading.current_thread() is threading.main_thread():
        _write_at_termination()


def _record_error(error: BaseException) -> None:
    if _recorder is not None:
        _recorder.write(f"{type(error).__name__}: {error}", traceback.format_exception(error))


def _write_at_termination() -> None:
    """A handler in Python runs when the main thread comes back from a collective, which may be
    never: the signal's number goes through a pipe to a thread that waits for it. Nothing is done
    where somebody else has such a pipe."""
    others = signal.set_wakeup_fd(-1)
    if others != -1:
        signal.set_wakeup_fd(others)
        return
    before = signal.getsignal(signal.SIGTERM)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def keep(*_: Any) -> None:
        """The thread sees to it."""

    signal.signal(signal.SIGTERM, keep)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def wait() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                _write_stack("SIGTERM")
                if signal.getsignal(signal.SIGTERM) is keep:  # else its new owner decides
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
