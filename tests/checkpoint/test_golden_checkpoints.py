"""Checkpoints of all released versions load, model and optimizer, into any number of ranks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, checkpoint, fully_shard

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir() and path.name[0] != "_")

sys.path.insert(0, str(GOLDEN))
from write import STEPS, Counter, make_model, make_optimizer  # noqa: E402

sys.path.remove(str(GOLDEN))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _load(rank: int, world_size: int, folder: str, wrapping: str) -> dict[str, Any]:
    """Everything that a checkpoint has restored, whole."""
    model = make_model()
    if wrapping == "wrapper":
        model = FSDP(model)
    elif wrapping == "fully_shard":
        fully_shard([model[1], model[2]])  # type: ignore[index]
        fully_shard(model)
    optimizer, counter = make_optimizer(model), Counter()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    states = {"shared": {"scheduler": scheduler}, "per_rank": {"counter": counter}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random numbers of other numbers of ranks
        loaded = checkpoint.load(folder, model, optimizer, **states)
    assert loaded is not None
    if wrapping == "plain":
        found = model.state_dict()
        named = {id(param): name for name, param in model.named_parameters()}
        moments = {named[id(param)]: state for param, state in optimizer.state.items()}
    else:
        moments = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        with FSDP.summon_full_params(model):
            found = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return {
        "model": {key: _whole(value) for key, value in found.items()},
        "optimizer": moments,
        "step": loaded.step,
        "scheduler": (scheduler.last_epoch, [group["lr"] for group in optimizer.param_groups]),
        "decay": [group["weight_decay"] for group in optimizer.param_groups],
        "counter": counter.value,
    }


def _require_golden(version: str, found: dict[str, Any]) -> None:
    expected = torch.load(GOLDEN / version / "expected.pt", weights_only=True)
    assert found["model"].keys() == expected["model"].keys()
    for key, value in expected["model"].items():
        assert torch.equal(found["model"][key], value), key
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for key, state in expected["optimizer"].items():
        for name, value in state.items():
            assert torch.equal(found["optimizer"][key][name], value), (key, name)
    assert found["step"] == STEPS
    assert found["scheduler"] == (3, [pytest.approx(1e-4), pytest.approx(1e-3)])
    assert found["decay"] == [0.1, 0.01]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("wrapping", "world_size"),
    [("wrapper", 2), ("wrapper", 3), ("fully_shard", 2), ("fully_shard", 3)],
)
def test_sharded(ranks: RankPool, version: str, wrapping: str, world_size: int) -> None:
    answers = ranks.run(_load, world_size, str(GOLDEN / version), wrapping)
    for rank, found in enumerate(answers):
        _require_golden(version, found)
        assert found["counter"] == (30 + 3 * rank if world_size == 2 else 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_on_one_process(version: str) -> None:
    _require_golden(version, _load(0, 1, str(GOLDEN / version), "plain"))


def test_there_is_one() -> None:
    assert VERSIONS == ["0.1.0"]
