"""Two runs that save into one folder notice each other; a run that was started again does not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from loops import error_of
from torch import nn

from fsdp_dynamo import checkpoint
from fsdp_dynamo.checkpoint.manifest import OWNER_FILE

SAVE = """
import sys, torch
from fsdp_dynamo import checkpoint
checkpoint.save(sys.argv[1], torch.nn.Linear(2, 2), step=int(sys.argv[2]))
"""


def _save(folder: Path, step: int) -> list[str]:
    """Save in this process; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint.save(folder, nn.Linear(2, 2), step=step)
    return [text for one in caught if "run" in (text := str(one.message)).split()]


def _save_elsewhere(folder: Path, step: int) -> str:
    """Save in another process, which ends; returns what it said."""
    command = [sys.executable, "-c", SAVE, str(folder), str(step)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _steps(folder: Path) -> list[int]:
    return [step for step, _ in checkpoint.complete(folder)]


def test_two_runs(tmp_path: Path) -> None:
    assert _save(tmp_path, 1) == _save(tmp_path, 2) == []
    assert "another run that is alive" in _save_elsewhere(tmp_path, 3)
    error = error_of(lambda: _save(tmp_path, 4))
    assert "expected no run but this one" in error
    assert f"process {os.getpid()} on {socket.gethostname()}" in error
    assert _steps(tmp_path) == [1, 2, 3]
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    (tmp_path / OWNER_FILE).unlink()
    assert _save(tmp_path, 5) == []
    assert _steps(tmp_path) == [1, 2, 3, 5]


def test_a_run_that_was_started_again(tmp_path: Path) -> None:
    assert "another run" not in _save_elsewhere(tmp_path, 1)
    assert "another run" not in _save_elsewhere(tmp_path, 2)
    assert _save(tmp_path, 3) == []
    assert _steps(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 1}', '{"process": "x"}'])
def test_a_damaged_owner_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / OWNER_FILE).write_text(content)
    assert _save(tmp_path, 1) == []
    owner = json.loads((tmp_path / OWNER_FILE).read_text())
    assert owner["process"] == os.getpid()


def test_through_a_link_it_is_the_same_folder(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    assert _save(real, 1) == _save(link, 2) == []
    model = nn.Linear(2, 2)
    loaded = checkpoint.load(link, model)
    assert loaded is not None
    assert loaded.step == 2
    assert torch.isfinite(model.weight).all()
