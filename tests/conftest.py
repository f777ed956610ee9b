"""Fixtures: the shared pool of ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parents[1])]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import durability  # noqa: E402
from namespaces import why_there_is_no_link  # noqa: E402
from pool import RankPool  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def _checkpoints_are_checked(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In this process and, since they inherit the variable, in ranks."""
    os.environ[durability.LOG_VARIABLE] = str(tmp_path_factory.mktemp("synced") / "log")
    durability.check_checkpoints()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of ranks: ``ranks.run(fn, world_size, *args)``."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def two_namespaces() -> None:
    """Skips where no link between two network namespaces can be made."""
    reason = why_there_is_no_link()
    if reason is not None:
        pytest.skip(reason)
