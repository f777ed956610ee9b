"""The demo: what it writes, what its summary says, and that it goes on from a checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_dynamo import checkpoint

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "examples" / "demo"
NUM_BLOCKS = 2
STEPS = 40
TINY = ["--dim", "32", "--blocks", str(NUM_BLOCKS), "--length", "16", "--lr", "0.01"]
TINY += ["--text-bytes", "200000", "--backend", "fsdp_dynamo_aot_eager"]


def _start(folder: Path, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    """Start the demo from ``folder``, so that its default output folder lies in there."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--max-restarts", str(restarts), "--nproc-per-node", "2"]
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), CUDA_VISIBLE_DEVICES="")
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/checkpoints.md says why
    return subprocess.Popen(
        [*launcher, str(DEMO / "train.py"), *TINY, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _demo(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the demo; returns what it printed."""
    process = _start(folder, *arguments)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == code, printed
    return printed


def _read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text())
    return values


def _losses(results: Path) -> list[float]:
    """Of the newest checkpoint."""
    step, path = checkpoint.complete(results / "checkpoints")[-1]
    states = torch.load(path / "shared.pt", weights_only=True)["shared"]
    losses: list[float] = states["progress"]["losses"]
    assert len(losses) == step
    return losses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo has run some steps."""
    folder = tmp_path_factory.mktemp("demo")
    assert "def " in _demo(folder, "--steps", str(STEPS))
    return folder


def test_writes_consistent_results_and_resumes(folder: Path) -> None:
    results = folder / "runs" / "demo"
    for picture in ("loss.png", "timeline.png"):
        assert (results / picture).read_bytes().startswith(b"\x89PNG")
    summary = _read(results, "summary.json")
    units = NUM_BLOCKS + 1
    assert (summary["units"], summary["world_size"], summary["steps"]) == (units, 2, STEPS)
    assert (summary["graphs"], summary["recompiles"]) == (1, 0)
    assert summary["collectives_per_step"] == {
        "all_gather": 2 * NUM_BLOCKS + 1,
        "reduce_scatter": units,
    }
    num_bytes = summary["bytes_per_step"]
    assert num_bytes["all_gather"] >= 2 * summary["parameters"]  # each at least once, bfloat16
    assert num_bytes["reduce_scatter"] >= 4 * summary["parameters"]  # each once, float32
    assert 0 < summary["peak_unsharded_bytes"] <= num_bytes["all_gather"]
    assert summary["loss_last"] < summary["loss_first"] - 0.5

    before = _losses(results)
    _demo(folder, "--steps", str(STEPS + 4), "--resume")
    after = _losses(results)
    assert after[:STEPS] == before
    assert max(after[STEPS:]) < before[0] - 0.5  # the weights were loaded
    summary = _read(results, "summary.json")
    assert (summary["resumed_from"], summary["steps"]) == (STEPS, STEPS + 4)


def test_a_killed_rank_is_restarted_and_goes_on(folder: Path, tmp_path: Path) -> None:
    """torchrun starts all ranks again, which go on from the newest checkpoint, unattended."""
    process = _start(tmp_path, "--steps", str(STEPS), "--save-every", "2", "--resume", restarts=3)
    saved = tmp_path / "runs" / "demo" / "checkpoints"
    end = time.monotonic() + 60
    while not checkpoint.complete(saved):
        assert time.monotonic() < end
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
    assert 0 < _read(saved.parent, "summary.json")["resumed_from"] < STEPS
    assert _losses(saved.parent) == _losses(folder / "runs" / "demo")[:STEPS]


@pytest.mark.slow
def test_resume_is_refused_with_a_reason(folder: Path) -> None:
    printed = _demo(folder, "--steps", "99", "--resume", "--dim", "64", code=1)
    assert re.search("--resume: .*expected shape", printed)
