"""The set for a GPU, dry: its commands run, and its checks notice what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pool import RankPool

from benchmarks import gpu, gpu_checks
from fsdp_dynamo import record_events
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.unit import Unit

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def _found(rank: int, world_size: int, case: str, mode: str) -> list[dict[str, Any]]:
    """Of a comparison: as it is, and with a gradient that is too large by a tenth."""
    right = gpu_checks._compare(gpu_checks.CASES[case], mode, CPU)
    with mock.patch.object(FlatParameter, "as_grad", lambda flat, grad: grad * 1.1):
        return [right, gpu_checks._compare(gpu_checks.CASES[case], mode, CPU)]


@pytest.mark.parametrize(("case", "mode"), [("fp32", "eager"), ("bf16", "hooks")])
def test_wrong_values_are_noticed(ranks: RankPool, case: str, mode: str) -> None:
    for right, wrong in ranks.run(_found, 2, case, mode):
        assert right["is_right"], right
        assert not wrong["is_right"], wrong


def _forced(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    """What one rank does in a step, and what is found if its gathers are not waited for."""
    with gpu_checks.forced_sharding():
        case = gpu_checks.Case()
        sharded, call = gpu_checks.wrapped(case, "eager", CPU)
        step = gpu_checks.step_of(sharded, call, case, CPU)
        with record_events() as events:
            step(0)
        kinds = [event.kind for event in events if "_" in event.kind]
        with mock.patch.object(Unit, "_wait_gathers", return_value=None):
            faults = gpu_checks._steady(case, "eager", CPU)["faults"]
    return kinds, faults


def test_one_rank_gathers_and_reduces(ranks: RankPool) -> None:
    for kinds, faults in ranks.run(_forced, 1):
        units = gpu_checks.SIZES.num_blocks + 1
        assert kinds.count("all_gather") >= 2 * units - 1
        assert kinds.count("reduce_scatter") == units
        assert faults


def test_a_part_is_run_once(tmp_path: Path) -> None:
    """A record is kept; a reason is not."""
    part = gpu.Part("none", "no_such_script.py", (), 0)
    result = tmp_path / "none.json"
    result.write_text(json.dumps(gpu.run_part(part, result, 60)))
    assert "failed with exit code 2" in result.read_text()
    assert not gpu.is_done(result)
    late = gpu.run_part(part._replace(least_s=9), result, 3)
    assert late == {"skipped": "needs 9 s, 3 s were left"}
    result.write_text("{}")
    assert gpu.is_done(result)


@pytest.mark.slow
def test_every_part_runs_dry(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry-run"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    planned = [*gpu.checks(is_dry=True), *gpu.speeds("small", 4, 16, is_dry=True)]
    assert {path.stem for path in tmp_path.glob("*.json")} == {part.name for part in planned}
    for name in ("eager", "graphs_250"):
        speed = json.loads((tmp_path / f"{name}.json").read_text())
        assert speed["steps"] >= 20
        assert all(row["tokens_per_s"] > 0 for row in speed["rows"])
    assert (tmp_path / "trace_graph.json.gz").exists()
    again = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True)
    assert again.stdout.strip() == str(tmp_path)
