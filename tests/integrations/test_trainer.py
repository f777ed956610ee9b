"""transformers.Trainer on fsdp_dynamo: torchrun with two ranks, once for all tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers", minversion="5.23")  # on Python 3.10 pip finds older ones only
RUNS = Path(__file__).parents[1] / "support" / "trainer_runs.py"
TIMEOUT_S = 300


def _run(folder: Path, *runs: str, num_ranks: int = 2) -> list[dict[str, Any]]:
    """What each rank has found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(RUNS.parents[2]), os.environ.get("PYTHONPATH", "")])
    ours = {"GLOO_SOCKET_IFNAME": "lo", "FSDP_DYNAMO_FLIGHT": "0", "PYTHONPATH": path}
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={num_ranks}", str(RUNS), str(folder), *runs],
        env={**os.environ, **quiet, **ours},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def ranks_results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One start of two ranks for all tests."""
    runs = ("same_as_ddp", "resumed", "saved", "best", "last_is_best", "others", "generated")
    return _run(tmp_path_factory.mktemp("trainer"), *runs, "refused")


def _of(ranks_results: list[dict[str, Any]], run: str) -> Any:
    """What both ranks have found alike."""
    first, second = (results[run] for results in ranks_results)
    assert first == second
    return first


def _require_same(got: dict[str, Any], expected: dict[str, Any], names: list[str]) -> None:
    for name in names:
        assert got[name] == pytest.approx(expected[name], rel=2e-6), name


@pytest.mark.parametrize(("mode", "gathers"), [("eager", 60), ("grad op", 36)])
def test_trains_as_ddp(ranks_results: list[dict[str, Any]], mode: str, gathers: int) -> None:
    """Losses, norms before clipping, rates, evaluation; two batches a step are reduced once."""
    found = _of(ranks_results, "same_as_ddp")
    expected, got = found["ddp"], found[mode]
    assert expected["losses"][-1] < expected["losses"][0]
    assert min(expected["norms"]) > 0.3  # clipped in each step
    _require_same(got, expected, ["losses", "norms", "rates", "eval", "flos"])
    assert got["numel"] == expected["numel"] / 2
    assert (got["gathers"], got["scatters"]) == (gathers, 3 * 6)  # 3 units, 6 steps


def _require_compiled(found: dict[str, Any]) -> None:
    _require_same(found["compiled"], found["ddp"], ["losses", "norms", "eval"])
    assert found["ddp"]["graphs"] == 0
    assert found["compiled"]["graphs"] >= 2  # trained, and evaluated


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks", "graph"])
def test_trains_compiled_as_ddp(tmp_path: Path, mode: str) -> None:
    _require_compiled(_of(_run(tmp_path, mode), mode))


def test_resumed_as_if_never_stopped(ranks_results: list[dict[str, Any]]) -> None:
    """In the middle of an epoch, with dropout; a checkpoint that is not complete is left out."""
    found = _of(ranks_results, "resumed")
    assert found["newest"] == "checkpoint-3"
    assert found["again"] == found["whole"]
    assert found["equal"]
    assert found["files"] == ["fsdp_dynamo"] * 2 + ["trainer_state.json"] * 2


def test_saved_for_from_pretrained(ranks_results: list[dict[str, Any]]) -> None:
    found = _of(ranks_results, "saved")
    assert found["class"] == "LlamaForCausalLM"
    assert found["keys"]
    assert found["values"]
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert {"config.json", "model.safetensors"} <= set(found["files"])


@pytest.mark.slow
def test_fewer_ranks_go_on(tmp_path: Path) -> None:
    expected = _of(_run(tmp_path, "stopped"), "stopped")["losses"]
    (found,) = _run(tmp_path, "fewer", num_ranks=1)
    assert found["fewer"]["losses"] == pytest.approx(expected, rel=1e-5)


def test_generates_as_plain_trainer(ranks_results: list[dict[str, Any]]) -> None:
    expected, got = _of(ranks_results, "generated").values()
    assert got == expected
    assert len(got) == 8
    assert len({tuple(row) for row in got}) > 4


@pytest.mark.parametrize("only_model", ["False", "True"])
def test_best_model_comes_back(ranks_results: list[dict[str, Any]], only_model: str) -> None:
    losses, at_end = _of(ranks_results, "best")[only_model]
    assert min(losses) < losses[-1]
    assert at_end == min(losses)


def test_the_last_model_may_be_the_best(ranks_results: list[dict[str, Any]]) -> None:
    assert _of(ranks_results, "last_is_best") == "checkpoint-6"


@pytest.mark.parametrize(
    ("what", "tolerance"),
    [
        ("smoothing", 1e-6),
        ("checkpointing", 1e-6),
        ("no clipping", 1e-6),
        ("sync each batch", 1e-6),
        ("bf16", 1e-2),
    ],
)
def test_with_other_arguments(
    ranks_results: list[dict[str, Any]], what: str, tolerance: float
) -> None:
    """As plain Trainer; in bfloat16 autocast keeps other operations in float32 than we do."""
    expected, got = _of(ranks_results, "others")[what]
    assert got == pytest.approx(expected, rel=tolerance)
    if what == "bf16":
        assert got != pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("fp16", "expected training arguments without fp16, got fp16=True. Use bf16=True"),
        ("compile", "without torch_compile, got torch_compile=True. Use Sharding(compile="),
        ("batch", "without auto_find_batch_size, got auto_find_batch_size=True. Choose"),
        ("layers", "got 'Llama'. Name some of: Embedding, Linear, LlamaAttention, LlamaDecoderL"),
        ("version", "expected a Trainer with the method _clip_grad_norm, got transformers 5."),
        ("other", "got 'optimizer.pt' of another Trainer, whose states are of whole parameters"),
    ],
)
def test_refused(ranks_results: list[dict[str, Any]], what: str, message: str) -> None:
    for found in ranks_results:
        assert message in found["refused"][what]
