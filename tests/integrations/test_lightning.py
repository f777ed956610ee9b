"""lightning.pytorch.Trainer on fsdp_dynamo: FSDPDynamoStrategy against Lightning's own DDP.

Lightning is imported in ranks only: it takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from models import VOCABULARY
from modes import INDUCTOR_MODES, MODES
from pool import RankPool

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

TIMEOUT_S = 120


def _call(rank: int, world_size: int, run: str, *arguments: Any) -> Any:
    return getattr(import_module("lightning_runs"), run)(rank, *arguments)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("Module", "eager"),
        ("Direct", "eager"),
        ("Module", "graph"),
        pytest.param("Module", "hooks", marks=pytest.mark.slow),
        pytest.param("Module", "graph-inductor", marks=pytest.mark.slow),
    ],
)
def test_trains_as_ddp(ranks: RankPool, kind: str, mode: str) -> None:
    """Two batches a step are reduced once, gradients are clipped, evaluation in inference mode."""
    changed = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}
    compiled = {**MODES, **INDUCTOR_MODES}[mode]
    for found in ranks.run(_call, 2, "trained", kind, compiled, changed):
        _require_same(found["ours"], found["ddp"], 2e-6 if mode != "graph-inductor" else 1e-5)
        assert found["free"]["losses"][-1] != pytest.approx(found["ddp"]["losses"][-1], rel=1e-3)
        assert 0.49 < found["ours"]["numel"] / found["ddp"]["numel"] < 0.51
        assert found["ours"]["scatters"] == 3 * 4  # 3 units, 4 steps
        assert (found["ours"]["graphs"] >= 2) == (compiled is not None)  # trained, and evaluated


def _require_same(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert len(got["losses"]) == 8
    assert expected["losses"][-1] < expected["losses"][0]
    assert got["losses"] == pytest.approx(expected["losses"], rel=tolerance)
    assert got["norms"] == pytest.approx(expected["norms"], rel=10 * tolerance)
    assert expected["norms"]
    assert got["eval"] == pytest.approx(expected["eval"], rel=tolerance)
    for fqn, value in expected["whole"].items():
        is_low = value.dtype == torch.bfloat16  # one unit in the last place of a parameter near 1
        atol = 8e-3 if is_low else tolerance
        torch.testing.assert_close(got["whole"][fqn], value, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("precision", "kind", "mode"),
    [
        ("bf16-mixed", "Direct", "eager"),
        ("bf16-true", "Direct", "eager"),
        pytest.param("64-true", "Direct", "eager", marks=pytest.mark.slow),
        pytest.param("bf16-mixed", "Module", "graph", marks=pytest.mark.slow),
        pytest.param("bf16-true", "Module", "hooks", marks=pytest.mark.slow),
    ],
)
def test_precision_is_lightnings(ranks: RankPool, precision: str, kind: str, mode: str) -> None:
    """What the Trainer's precision does under DDP it does here."""
    for found in ranks.run(_call, 2, "trained", kind, MODES[mode], {"precision": precision}):
        _require_same(found["ours"], found["ddp"], 1e-3 if precision == "bf16-true" else 2e-6)


@pytest.mark.slow
def test_low_precision_of_ours(ranks: RankPool) -> None:
    for expected, alone, in_autocast in ranks.run(_call, 2, "in_low_precision"):
        assert alone == pytest.approx(expected, rel=2e-2)
        assert in_autocast == pytest.approx(expected, rel=2e-2)
        assert alone != pytest.approx(expected, rel=1e-6)


# -- checkpoints -----------------------------------------------------------------------------------


def test_resumed_as_if_never_stopped(ranks: RankPool, tmp_path: Path) -> None:
    """Bit by bit, with dropout; evaluated from a checkpoint; a plain module reads it."""
    for found in ranks.run(_call, 2, "resumed", str(tmp_path)):
        whole, again = found["losses"]
        assert len(again) == 8
        assert again == whole
        assert found["equal"] == [True, True]
        assert found["rates"][0] == found["rates"][1]
        assert len(set(found["eval"])) == 1
        assert found["files"] == ["epoch=3.ckpt", "last.ckpt"]
    path = str(tmp_path / "parts" / "last.ckpt")
    (plain,) = ranks.run(_call, 1, "read_by_plain", path)
    assert all(torch.equal(value, found["whole"][fqn]) for fqn, value in plain.items())


def test_resumed_within_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """With a loader that can: Lightning begins others anew."""
    for whole, again in ranks.run(_call, 2, "within_epoch", str(tmp_path)):
        assert len(whole) == 10
        assert again == whole


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("Module", {"precision": "fp16"}, "a precision without gradient scaler, got MixedPrecis"),
        ("Module", {"plugins": "io"}, "expected no CheckpointIO plugin, got AsyncCheckpointIO."),
        ("Module", {"sync_batchnorm": True}, "got sync_batchnorm=True. Call nn.SyncBatchNorm.con"),
        ("Module", {"is_compiled": True}, "got one of torch.compile. Use Sharding(compile={"),
        ("Manual", {}, "got automatic_optimization=False. Return the loss from training_step."),
        ("WithoutForward", {"compile": True}, "a module with forward, which is compiled, got one"),
        (
            "Module",
            {"ckpt_path": "nowhere.ckpt"},
            "a complete checkpoint, got no such",
        ),
    ],
)
def test_refused(ranks: RankPool, kind: str, changed: dict[str, Any], message: str) -> None:
    for said in ranks.run(_call, 2, "refused", kind, changed):
        assert message in said


# -- starting --------------------------------------------------------------------------------------

SCRIPT = """
import sys
from pathlib import Path

import lightning.pytorch as pl
from lightning_runs import Direct, FSDPDynamoStrategy, Sharding, loader

module = Direct()
strategy = FSDPDynamoStrategy(Sharding(layers=["Block"]))
trainer = pl.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, strategy=strategy, logger=False,
    enable_checkpointing=False, enable_progress_bar=False,
)
trainer.fit(module, loader(1))
shape = trainer.predict(module, loader(2, 8))[0].shape
Path(sys.argv[1], f"rank-{trainer.global_rank}").write_text(str(list(shape)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_started_by(tmp_path: Path, launcher: str) -> None:
    """Lightning starts the ranks itself, or torchrun does."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join(
        [str(Path(__file__).parents[1] / "support"), str(Path(__file__).parents[2])]
    )
    ours = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, *(torchrun if launcher == "torchrun" else []), str(script), str(tmp_path)],
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shapes = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert shapes == dict.fromkeys(["rank-0", "rank-1"], str([2, 8, VOCABULARY]))
