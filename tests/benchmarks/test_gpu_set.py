"""The set for a GPU, dry: its commands run, and its checks notice what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from pool import on_ranks

from benchmarks import gpu, gpu_checks, gpu_speeds
from benchmarks.peers import Setting, Trainee, named
from benchmarks.streams.program import HostWait
from benchmarks.streams.recording import record_program
from benchmarks.workloads import catalogue
from fsdp_dynamo import record_events
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.unit import Unit

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("case", "mode"), [("fp32", "eager"), ("bf16", "hooks")])
@on_ranks(2)
def test_wrong_values_are_noticed(rank: int, case: str, mode: str) -> None:
    """A gradient that is too large by a tenth."""
    assert gpu_checks._compare(gpu_checks.CASES[case], mode, CPU)["is_right"]
    with mock.patch.object(FlatParameter, "as_grad", lambda flat, grad: grad * 1.1):
        assert not gpu_checks._compare(gpu_checks.CASES[case], mode, CPU)["is_right"]


@on_ranks(1)
def test_one_rank_gathers_and_reduces(rank: int) -> None:
    """And gathers that are not waited for are found."""
    with gpu_checks.forced_sharding():
        case = gpu_checks.Case()
        sharded, call = gpu_checks.wrapped(case, "eager", CPU)
        step = gpu_checks.step_of(sharded, call, case, CPU)
        with record_events() as events:
            step(0)
        kinds = [event.kind for event in events if "_" in event.kind]
        with mock.patch.object(Unit, "_wait_gathers", return_value=None):
            assert gpu_checks._steady(case, "eager", CPU)["faults"]
    units = gpu_checks.SIZES.num_blocks + 1
    assert kinds.count("all_gather") >= 2 * units - 1
    assert kinds.count("reduce_scatter") == units


@on_ranks(1)
def test_nothing_waits_between_steps(rank: int) -> None:
    """With SGD: the steps of AdamW are counted in the host's memory, which is not known here."""
    (peer,) = named(["ours"])
    setting = Setting(catalogue.decoder("small", 2, 8, num_blocks=2), CPU)
    sgd = staticmethod(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with gpu_checks.forced_sharding(), mock.patch.object(Trainee, "make_optimizer", sgd):
        trainee = peer.train(setting)
        gpu_speeds.run_steps(trainee, setting, 0, 2)
        with record_program() as recorder:
            gpu_speeds.run_steps(trainee, setting, 2, 20)
    waits = [n for n, one in enumerate(recorder.program) if isinstance(one, HostWait)]
    kinds = [getattr(recorder.program[n], "name", "") for n in waits]
    assert kinds == ["_local_scalar_dense"] * 20  # the losses
    collectives = [n for n, one in enumerate(recorder.program) if getattr(one, "group", "")]
    assert collectives[-1] < waits[0]


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
