"""Two runs that save into one folder notice each other; a run that was started again does not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from loops import error_of
from pool import RankPool
from torch import nn

from fsdp_dynamo import checkpoint
from fsdp_dynamo.checkpoint.manifest import OWNER_FILE


def _save(folder: Path, step: int) -> None:
    checkpoint.save(folder, nn.Linear(2, 2), step=step)


def _save_elsewhere(rank: int, world_size: int, folder: Path, step: int) -> None:
    """The same in a rank of the pool, which is another run."""
    _save(folder, step)


def _steps(folder: Path) -> list[int]:
    return [step for step, _ in checkpoint.complete(folder)]


def test_two_runs(ranks: RankPool, tmp_path: Path) -> None:
    _save(tmp_path, 1)
    _save(tmp_path, 2)
    ranks.run(_save_elsewhere, 1, tmp_path, 3)
    error = error_of(lambda: _save(tmp_path, 4))
    assert f'expected no run but this one ({{"process": {os.getpid()}, "host": "' in error
    assert _steps(tmp_path) == [1, 2, 3]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    (tmp_path / OWNER_FILE).unlink()
    _save(tmp_path, 5)
    assert _steps(tmp_path) == [1, 2, 3, 5]


def test_a_run_that_was_started_again(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_elsewhere, 1, tmp_path, 1)
    ranks.stop()
    _save(tmp_path, 2)
    assert _steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("content", ["", "[]", '{"run": 1}', '{"process": "x"}'])
def test_a_damaged_owner_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / OWNER_FILE).write_text(content)
    _save(tmp_path, 1)
    owner = json.loads((tmp_path / OWNER_FILE).read_text())
    assert owner["process"] == os.getpid()


def test_through_a_link_it_is_the_same_folder(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    _save(real, 1)
    _save(link, 2)
    loaded = checkpoint.load(link, nn.Linear(2, 2))
    assert loaded is not None
    assert loaded.step == 2
