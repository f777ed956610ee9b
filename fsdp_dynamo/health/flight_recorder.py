"""Flight recorder: a rank that fails writes its last collectives to a file.

    python -m fsdp_dynamo flight FOLDER

explains the records of all ranks. A rank writes its record when an exception ends it, and prints
the path. It also writes one if its main thread is blocked by the device when another thread finds
that ranks have diverged. A rank that was killed leaves no record, which is informative, too.

Records go to ``$FSDP_DYNAMO_FLIGHT`` (``0``: no records), by default to a temporary folder of the
run. ``record_flight`` chooses another folder, and also writes a record on SIGTERM (which torchrun
sends to the other ranks), even while the rank waits inside a collective. ``record_flight(None)``
turns records off. A record has at most 1 MiB; older collectives are dropped.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import signal
import socket
import stat
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.collective_log import Entry
from fsdp_dynamo.comm.exit_callbacks import register_exit_callback
from fsdp_dynamo.errors import FSDPStateError, RankFailedError

VARIABLE = "FSDP_DYNAMO_FLIGHT"
_STACK_FRAMES = 12
MAX_BYTES = 1 << 20
"""Largest size of a record."""

_MAX_TEXT = 4000
"""Characters kept of an error, and of each frame of the stack."""


class _Recorder:
    """Writer of this rank's record: writes once, and again only if more collectives were issued.

    Args:
        folder: folder of the records; created when needed, for this user only.
        private: parent folder with a guessable name in a directory shared by all users; checked
            before use.
    """

    def __init__(self, folder: Path, private: Path | None = None) -> None:
        self.folder, self._private = folder, private
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._lock = threading.RLock()  # a second signal may arrive during the first one's handler
        self._written_at = -1

    @property
    def path(self) -> Path:
        """File of the record."""
        return self.folder / f"rank-{self._rank}.json"

    def remove_old(self) -> None:
        """Remove this rank's record of an earlier run, and records beyond the world size."""
        for path in self.folder.glob("rank-*.json"):
            number = path.stem.partition("-")[2]
            if number == str(self._rank) or (number.isdigit() and int(number) >= self._world_size):
                path.unlink(missing_ok=True)

    def write(self, reason: str, stack: Sequence[str]) -> None:
        """Write the record unless it is up to date, and print its path."""
        with self._lock:
            groups = collective_log.recent_by_group()
            issued = sum(count for _, count, _ in groups)
            if self._written_at == issued:
                return
            if self._private is not None:
                self._private.mkdir(mode=0o700, exist_ok=True)
                require_private(self._private)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = self.path.with_suffix(".part")
            with open(draft, "w", opener=_for_this_user) as file:
                file.write(self._text(reason, stack, groups))
            draft.rename(self.path)
            # With the lock held: another thread may end the process once the record is written.
            if issued:  # of no use for a script that fails before it trains
                explainer = f"python -m fsdp_dynamo flight {self.folder}"
                _print_error(f"rank {self._rank}: flight record in {self.path} ({explainer})")
            self._written_at = issued

    def _text(
        self, reason: str, stack: Sequence[str], groups: Sequence[collective_log.GroupRecord]
    ) -> str:
        """Content of the record, ASCII, with as many of the last collectives as fit."""
        kept, groups = collective_log.MAX_ENTRIES, list(groups)
        while True:
            last = [
                (ranks, n, entries[max(0, len(entries) - kept) :]) for ranks, n, entries in groups
            ]
            text = json.dumps(self._content(reason, stack, last))
            if len(text) <= MAX_BYTES or not groups:
                return text
            if kept:
                kept //= 2
            else:
                groups.pop()

    def _content(
        self, reason: str, stack: Sequence[str], groups: Sequence[collective_log.GroupRecord]
    ) -> dict[str, Any]:
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "reason": reason[:_MAX_TEXT],
            "stack": [frame[:_MAX_TEXT] for frame in list(stack)[-_STACK_FRAMES:]],
            "groups": [
                {"ranks": list(ranks), "count": count, "entries": entries}
                for ranks, count, entries in groups
            ],
        }


def _for_this_user(path: str, flags: int) -> int:
    """Opener for files that only this user may read; refuses symbolic links."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def require_private(folder: Path) -> None:
    """Make a folder private to this user.

    Raises:
        PermissionError: it belongs to another user, or is a link.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"'{folder}' is a link, or belongs to another user. Remove it, or set {VARIABLE} to a "
            "folder of your own"
        )
    if found.st_mode & 0o077:
        folder.chmod(0o700)


def _print_error(line: str) -> None:
    """Print to standard error, even if a signal has interrupted another print."""
    try:
        print(line, file=sys.stderr, flush=True)
    except RuntimeError:  # a reentrant call inside the buffered writer
        os.write(2, f"{line}\n".encode())


_recorder: _Recorder | None = None
_is_off = False


def record_flight(folder: str | Path | None) -> None:
    """Write this rank's last collectives to ``folder/rank-N.json`` when the rank fails.

    A rank fails when an exception ends it, or on SIGTERM. Records of an earlier run are removed.
    Existing handlers of exceptions and of SIGTERM still run. A record has at most 1 MiB.

    Args:
        folder: created with the first record. ``None`` turns records off, including the default
            ones, before or after the model is wrapped.

    Raises:
        FSDPStateError: there is no process group, or the call is not in the main thread.
    """
    global _recorder, _is_off
    _is_off = folder is None
    if folder is None:
        _recorder = None
        return
    if not dist.is_initialized() or threading.current_thread() is not threading.main_thread():
        raise FSDPStateError(
            "record_flight(): expected a process group, and a call in the main thread, got "
            f"{'none' if not dist.is_initialized() else 'another thread'}. Call it once in every "
            "rank, after init_process_group()."
        )
    _begin(Path(folder))
    _write_at_termination()


def record_flight_by_default() -> None:
    """Record to ``$FSDP_DYNAMO_FLIGHT`` or a default folder, unless the user has decided."""
    configured = os.environ.get(VARIABLE, "")
    if _recorder is not None or _is_off or configured == "0":
        return
    try:
        if configured:
            _begin(Path(configured))
        else:
            _begin_in_temporary_files()
    except OSError as error:  # training does not depend on records
        warnings.warn(f"no flight records: {error}", stacklevel=2)


def _begin_in_temporary_files() -> None:
    folder = _default_folder()
    if os.path.lexists(folder.parent):
        require_private(folder.parent)
    _begin(folder, private=folder.parent)


def _default_folder() -> Path:
    """Folder that is the same for all ranks of a run on one machine."""
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


def _begin(folder: Path, private: Path | None = None) -> None:
    global _recorder
    recorder = _Recorder(folder, private)
    recorder.remove_old()
    _recorder = recorder
    register_exit_callback(_record_error)


def _record_error(error: BaseException) -> None:
    if _recorder is not None:
        _recorder.write(f"{type(error).__name__}: {error}", traceback.format_exception(error))


def report_blocked(error: BaseException) -> None:
    """Print an error that a blocked main thread cannot raise, and write the record."""
    what = f"{type(error).__name__}: {error}"
    _print_error(
        f"rank {dist.get_rank()}: {what} This rank raises it when it next waits for a collective. "
        "Values that it reads from its device before are worthless."
    )
    _write_stack(what, sys._current_frames().get(_main_thread()))


_process = 0
"""Process that handles SIGTERM; 0 for none."""


def _write_at_termination() -> None:
    """Write a record on SIGTERM.

    A Python signal handler runs only once the main thread returns from a collective, which may
    never happen. So the signal's number goes through a pipe to a thread. If the process has such a
    pipe already, that pipe stays and the record is written by the handler.
    """
    global _process
    if _process == os.getpid():
        return
    _process = os.getpid()
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() == _process:
            _write_stack("SIGTERM", frame)
        if callable(before):
            before(number, frame)
        elif before is not signal.SIG_IGN:
            os._exit(128 + number)

    signal.signal(signal.SIGTERM, handle)
    others = signal.set_wakeup_fd(-1)
    if others != -1:
        signal.set_wakeup_fd(others)
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def wait() -> None:
        """Serve signals while the main thread may be stuck; the user's handler is left to it."""
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                _write_stack("SIGTERM", sys._current_frames().get(_main_thread()))
                if before is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is handle:
                    os._exit(128 + signal.SIGTERM)

    threading.Thread(target=wait, name="flight", daemon=True).start()


def _main_thread() -> int:
    return threading.main_thread().ident or 0


def _write_stack(reason: str, frame: FrameType | None) -> None:
    """Write a record with the main thread's current stack."""
    if _recorder is not None:
        with suppress(Exception):  # the signal must take effect in any case
            _recorder.write(reason, traceback.format_stack(frame))


# -- flight report ---------------------------------------------------------------------------------
# Report of a failed run, from the records of its ranks.


Record = Mapping[str, Any]
FIELDS = frozenset({"rank", "world_size", "reason", "groups", "stack"})
"""Fields of a record that a report needs."""


def explain_records(records: Sequence[Record]) -> str:
    """Describe the ranks that failed or left no record, and where collectives diverged.

    Args:
        records: records of the ranks, in any order.
    """
    by_rank = {record["rank"]: record for record in records}
    size = max(record["world_size"] for record in records)
    lines = [f"{len(by_rank)} of {size} ranks have left a record."]
    missing = [rank for rank in range(size) if rank not in by_rank]
    if missing:
        lines.append(
            f"{_ranks(missing)} left none: killed (kill -9, out of memory, machine down), ended "
            "without an error, or the record is on another machine."
        )
    for rank in sorted(by_rank):
        lines.append(f"rank {rank}: {by_rank[rank]['reason'].splitlines()[0]}")
    for ranks, logs in _groups(by_rank):
        lines += _compare_logs(ranks, logs)
    causes = [r for r in sorted(by_rank) if not _is_consequence(by_rank[r]["reason"])]
    if causes and not missing:
        lines.append(f"Look first at rank {causes[0]}:")
        lines += [line.rstrip() for line in by_rank[causes[0]]["stack"]]
    return "\n".join(lines)


def _is_consequence(reason: str) -> bool:
    """Whether a rank ended only because another rank failed."""
    return (
        reason == "SIGTERM" or reason.startswith(RankFailedError.__name__) or "Connection" in reason
    )


Logs = dict[int, tuple[int, list[Entry]]]


def _groups(by_rank: Mapping[int, Record]) -> Iterator[tuple[tuple[int, ...], Logs]]:
    """Yield the ranks of each group, with each rank's number of collectives and last entries.

    Groups of the same ranks are distinguished by the order of their first use.
    """
    found: dict[tuple[tuple[int, ...], int], Logs] = {}
    for rank, record in sorted(by_rank.items()):
        seen: dict[tuple[int, ...], int] = {}
        for group in record["groups"]:
            ranks = tuple(group["ranks"])
            position = seen[ranks] = seen.get(ranks, -1) + 1
            entries = [Entry(*entry) for entry in group["entries"]]
            found.setdefault((ranks, position), {})[rank] = (group["count"], entries)
    for (ranks, _), logs in found.items():
        yield ranks, logs


def _compare_logs(ranks: tuple[int, ...], logs: Logs) -> list[str]:
    """Describe the first mismatch between the ranks of a group, or the ranks that are behind."""
    if len(logs) < 2:
        return []
    known = {r: {entry.number: entry for entry in entries} for r, (_, entries) in logs.items()}
    first = min(known)
    for number in sorted(set.intersection(*(set(entries) for entries in known.values()))):
        mine = known[first][number]
        differing = (r for r in sorted(known) if known[r][number].signature != mine.signature)
        other = next(differing, None)
        if other is not None:
            return [
                f"Among {_ranks(ranks)}, collective {number}: rank {first} issued "
                f"{mine.description()}, rank {other} {known[other][number].description()}. They "
                "diverged here: a unit left out or run once more, another branch, another wrap."
            ]
    least, most = min(c for c, _ in logs.values()), max(c for c, _ in logs.values())
    if least == most:
        return [f"Among {_ranks(ranks)}, all have issued the same {most} collectives."]
    behind = [rank for rank, (count, _) in logs.items() if count == least]
    ahead = next(rank for rank, (count, _) in logs.items() if count == most)
    following = known[ahead].get(least)
    what = "the next" if following is None else following.description()
    return [
        f"Among {_ranks(ranks)}, {_ranks(behind)} issued {least} collectives, rank {ahead} {most}: "
        f"{_ranks(behind)} did not come to {what}."
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Explain the records of a folder; returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m fsdp_dynamo flight", description="Explain the flight records of a failed run."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="given to record_flight()")
    folder = parser.parse_args(arguments).folder
    paths = sorted(folder.glob("rank-*.json"))
    records = [record for path in paths if (record := _record_in(path)) is not None]
    if not records:
        found = "no readable one" if paths else "none"
        print(
            f"expected rank-0.json and others in '{folder}', found {found}: call "
            "fsdp_dynamo.record_flight(folder) in every rank.",
            file=sys.stderr,
        )
        return 2
    print(explain_records(records))
    return 0


def _record_in(path: Path) -> dict[str, Any] | None:
    """Flight record in a file; ``None``, and a line on standard error, if there is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    else:
        if isinstance(record, dict) and record.keys() >= FIELDS:
            return record
        problem = "other content"
    print(
        f"expected a flight record in '{path}', got {problem}. It is left out: its rank may have "
        "been killed while it wrote, or something else wrote the file.",
        file=sys.stderr,
    )
    return None


# -- rank ranges -----------------------------------------------------------------------------------
# Ranks as ranges, which keeps messages short.


_MOST_LISTED = 12


def listed(ranks: Iterable[int]) -> str:
    """Format ranks for a message, ``0, 1, 4 to 9``; after a limit, ``and 20 more``."""
    pieces: list[str] = []
    left = 0
    for first, last in _ranges(ranks):
        if len(pieces) >= _MOST_LISTED:
            left += last - first + 1
        elif last - first > 1:
            pieces.append(f"{first} to {last}")
        else:
            pieces += map(str, range(first, last + 1))
    return ", ".join(pieces) + (f" and {left} more" if left else "")


def _ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the first and last rank of each run of consecutive ranks."""
    found: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if found and found[-1][1] == rank - 1:
            found[-1] = (found[-1][0], rank)
        else:
            found.append((rank, rank))
    return found
