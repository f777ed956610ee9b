"""Fixtures: the shared pool of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pool import RankPool  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks: ``ranks.run(fn, world_size, *args)``."""
    pool = RankPool()
    yield pool
    pool.stop()
