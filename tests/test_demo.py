"""The demo: what it writes, what its summary says, and that it goes on from a checkpoint."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parent.parent
DEMO = REPOSITORY / "examples" / "demo"
NUM_BLOCKS = 2
TINY = ["--dim", "32", "--blocks", str(NUM_BLOCKS), "--length", "16", "--lr", "0.01"]
TINY += ["--text-bytes", "200000", "--backend", "fsdp_dynamo_aot_eager"]


def _demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo from ``folder``, so that its default output folder lies in there."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    environment = dict(os.environ, PYTHONPATH=str(REPOSITORY), CUDA_VISIBLE_DEVICES="")
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", str(DEMO / "train.py"), *TINY, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )


def _read(folder: Path, name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / name).read_text())
    return values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo has run twelve steps."""
    folder = tmp_path_factory.mktemp("demo")
    result = _demo(folder, "--steps", "12")
    assert result.returncode == 0, result.stderr
    assert "def " in result.stdout
    return folder


def test_writes_consistent_results_and_resumes(folder: Path) -> None:
    results = folder / "runs" / "demo"
    for picture in ("loss.png", "timeline.png"):
        assert (results / picture).read_bytes().startswith(b"\x89PNG")
    names = {path.name for path in (results / "checkpoint").iterdir()}
    assert names == {"run.json", "model.pt", "rank0.pt", "rank1.pt"}
    summary = _read(results, "summary.json")
    units = NUM_BLOCKS + 1
    assert (summary["units"], summary["world_size"], summary["steps"]) == (units, 2, 12)
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

    before = _read(results, "checkpoint/run.json")
    result = _demo(folder, "--steps", "16", "--resume")
    assert result.returncode == 0, result.stderr
    after = _read(results, "checkpoint/run.json")
    assert (before["step"], after["step"]) == (12, 16)
    assert after["losses"][:12] == before["losses"]
    assert max(after["losses"][12:]) < before["losses"][0] - 0.5  # the weights were loaded
    summary = _read(results, "summary.json")
    assert (summary["resumed_from"], summary["steps"]) == (12, 16)
    assert not (results / "checkpoint.part").exists()


@pytest.mark.parametrize(
    ("name", "must_equal", "message"),
    [
        ("checkpoint", {"world_size": 4}, "expected world_size 2"),
        ("checkpoint", {"world_size": 2, "dim": 64}, "expected dim 32"),
        ("nothing_here", {}, "expected a checkpoint in"),
    ],
)
def test_resume_is_refused_with_a_reason(
    folder: Path, name: str, must_equal: dict[str, Any], message: str
) -> None:
    checkpoint = runpy.run_path(str(DEMO / "checkpoint.py"))
    with pytest.raises(SystemExit, match=message):
        checkpoint["read_run"](folder / "runs" / "demo" / name, must_equal)
