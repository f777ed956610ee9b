"""The pool of ranks that campaigns share; their scripts put tests/support on the path."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import durability
from pool import RankPool


@contextmanager
def rank_pool() -> Iterator[RankPool]:
    """A pool whose ranks check that checkpoints are on the disk, as in tests."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[durability.LOG_VARIABLE] = str(Path(folder) / "synced")
        pool = RankPool()
        try:
            yield pool
        finally:
            pool.stop()
            del os.environ[durability.LOG_VARIABLE]


def forget_synced() -> None:
    """Empty the list of synced files, which is read for every checkpoint; while no rank saves."""
    Path(os.environ[durability.LOG_VARIABLE]).unlink(missing_ok=True)
