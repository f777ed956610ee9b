"""Tests of what torch does not promise. They need torch alone, so that they run on any version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test says what was relied on, and what to do instead."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.failed:
        for mark in item.iter_markers("private"):
            said = f"{', '.join(mark.args)}\nneeded for: {mark.kwargs['need']}\n"
            said += f"when it is gone: {mark.kwargs['instead']}"
            report.sections.append(("private API", said))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """The default group: gloo, this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Dynamo has compiled nothing, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's caches are empty."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
