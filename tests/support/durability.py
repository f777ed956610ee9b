"""A check of every checkpoint that a test writes: all of it is on the disk once it has its name.

Each process appends what it has synced to one file. The rank that publishes a checkpoint looks for
all files and folders there, as they are now: a file that grew after its fsync is not found.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

LOG_VARIABLE = "FSDP_DYNAMO_TESTS_FSYNC_LOG"


def check_checkpoints() -> None:
    """Record fsync calls of this process, and check what it publishes, from now on."""
    from fsdp_dynamo.checkpoint import manifest

    log = Path(os.environ[LOG_VARIABLE])
    fsync, publish = os.fsync, manifest.publish

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        with log.open("a") as file:  # one short write: whole lines, whoever else writes
            file.write(_state_of(os.fstat(descriptor)) + "\n")

    def checked(part: Path) -> Path:
        _require_synced(part.iterdir(), log)
        path = publish(part)
        _require_synced([path, path.parent], log)
        return path

    os.fsync, manifest.publish = recorded, checked


def _state_of(found: os.stat_result) -> str:
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _require_synced(paths: Iterable[Path], log: Path) -> None:
    synced = set(log.read_text().splitlines()) if log.exists() else set()
    lost = [path for path in paths if _state_of(path.stat()) not in synced]
    assert not lost, f"expected fsync after the last write to each of {lost}"
