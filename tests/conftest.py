"""Fixtures: the shared pool of ranks. Marks: the tiers of tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parents[1])]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import durability  # noqa: E402
import tiers  # noqa: E402
from namespaces import why_there_is_no_link  # noqa: E402
from pool import RankPool  # noqa: E402

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")
_COLLECTED = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Size and beginning of the campaign in wrap/test_beside_fsdp1.py."""
    parser.addoption("--programs", type=int, default=200)
    parser.addoption("--first-program", type=int, default=0)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = [item.nodeid.removeprefix("tests/") for item in items]
    for item, name in zip(items, names, strict=True):
        for mark in tiers.marks_of(name):
            item.add_marker(mark)
    config.stash[_COLLECTED] = names


@pytest.fixture(scope="session")
def every_test(request: pytest.FixtureRequest) -> list[str]:
    """Names of all tests, selected or not; skips where some files were not collected."""
    names = request.config.stash[_COLLECTED]
    files = {path.name for path in Path(__file__).parent.glob("*/test_*.py")}
    if files != {Path(name.partition("::")[0]).name for name in names}:
        pytest.skip("needs all files of tests to be collected")
    return names


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
