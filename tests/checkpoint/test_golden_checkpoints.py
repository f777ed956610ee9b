"""Checkpoints of all released versions load, model and optimizer, into any number of ranks."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from pool import RankPool
from shardings import assert_same, unsharded

from fsdp_dynamo import FSDP, checkpoint, fully_shard

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.parents[1].name for path in GOLDEN.glob("*/*/manifest.json"))
assert "0.1.0" in VERSIONS

sys.path.insert(0, str(GOLDEN))
from write import STEPS, Counter, make_model, make_optimizer  # noqa: E402

sys.path.remove(str(GOLDEN))


def _require_golden(rank: int, world_size: int, version: str, wrapping: str) -> None:
    """Everything that a checkpoint restores is as it was."""
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
        loaded = checkpoint.load(GOLDEN / version, model, optimizer, **states)
    assert loaded is not None
    assert loaded.step == STEPS
    if wrapping == "plain":
        named = {id(param): name for name, param in model.named_parameters()}
        moments = {named[id(param)]: state for param, state in optimizer.state.items()}
    else:
        moments = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    expected = torch.load(GOLDEN / version / "expected.pt", weights_only=True)
    assert_same(unsharded(model.state_dict()), dict(expected["model"]))
    assert_same(moments, expected["optimizer"])
    assert scheduler.last_epoch == 3
    rates = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert rates == [(pytest.approx(1e-4), 0.1), (pytest.approx(1e-3), 0.01)]
    assert counter.value == (30 + 3 * rank if world_size == 2 else 0)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("wrapping", "world_size"), [("wrapper", 3), ("fully_shard", 2)])
def test_sharded(ranks: RankPool, version: str, wrapping: str, world_size: int) -> None:
    ranks.run(_require_golden, world_size, version, wrapping)


@pytest.mark.parametrize("version", VERSIONS)
def test_on_one_process(version: str) -> None:
    _require_golden(0, 1, version, "plain")
