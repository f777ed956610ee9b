"""The demo: what it writes, and that it goes on where a rank was killed."""

from __future__ import annotations

import json
import os
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


def _printed_by(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == 0, printed
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


@pytest.mark.slow
def test_a_killed_rank_is_restarted_and_goes_on(tmp_path: Path) -> None:
    """torchrun starts all ranks again, which go on from the newest checkpoint, unattended."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert "def " in _printed_by(_start(whole, "--steps", str(STEPS)))
    results = whole / "runs" / "demo"
    for picture in ("loss.png", "timeline.png"):
        assert (results / picture).read_bytes().startswith(b"\x89PNG")
    summary = _read(results, "summary.json")
    units = NUM_BLOCKS + 1
    assert (summary["units"], summary["world_size"], summary["steps"]) == (units, 2, STEPS)
    assert (summary["graphs"], summary["recompiles"]) == (1, 0)
    counts = {"all_gather": 2 * NUM_BLOCKS + 1, "reduce_scatter": units}
    assert summary["collectives_per_step"] == counts
    num_bytes = summary["bytes_per_step"]
    assert num_bytes["all_gather"] >= 2 * summary["parameters"]  # each at least once, bfloat16
    assert num_bytes["reduce_scatter"] >= 4 * summary["parameters"]  # each once, float32
    assert 0 < summary["peak_unsharded_bytes"] <= num_bytes["all_gather"]
    assert summary["loss_last"] < summary["loss_first"] - 0.5

    process = _start(killed, "--steps", str(STEPS), "--save-every", "2", "--resume", restarts=3)
    saved = killed / "runs" / "demo" / "checkpoints"
    end = time.monotonic() + 60
    while not checkpoint.complete(saved):
        assert time.monotonic() < end
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _printed_by(process)
    assert 0 < _read(saved.parent, "summary.json")["resumed_from"] < STEPS
    assert _losses(saved.parent) == _losses(results)[:STEPS]
