"""``unsharded_budget_bytes``: which units stay unsharded between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import error_of
from models import Block, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

KEEPS = ShardingStrategy.SHARD_GRAD_OP
BLOCKS = 3


def _bytes_of_a_block() -> int:
    unit = wrap(make_transformer(num_blocks=1)).blocks[0]._fsdp_unit
    return sum(flat.unsharded_bytes for flat in unit.flats)


def _gathers(rank: int, world_size: int, mode: str, num_kept: int) -> tuple[Any, ...]:
    """Gathers of the backward, and of an evaluation, with a budget for so many blocks."""
    budget = num_kept * _bytes_of_a_block() + 1
    model = wrap(
        make_transformer(num_blocks=BLOCKS),
        sharding_strategy=KEEPS,
        unsharded_budget_bytes=budget,
    )
    run = in_mode(model, mode)
    losses, _ = train(run, rank)
    with record_events() as log:
        loss_of(run, batch(rank, 9)).backward()
    again = {unit for _, unit, phase in log.keys("all_gather") if phase == "backward"}
    with torch.no_grad():
        run(batch(rank, 0))
    is_unsharded = [unit.is_unsharded for unit in model._fsdp_root.units]
    return losses, ddp_losses(rank, num_blocks=BLOCKS)[0], again, is_unsharded


@pytest.mark.parametrize(
    ("mode", "num_kept"), [("eager", 0), ("eager", 1), ("eager", 2), ("graph", 2)]
)
def test_the_last_ones_stay(ranks: RankPool, mode: str, num_kept: int) -> None:
    for losses, expected, again, is_unsharded in ranks.run(_gathers, 2, mode, num_kept):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert again == {f"blocks.{i}" for i in range(BLOCKS - num_kept)}
        assert not any(is_unsharded)


def _choices(rank: int, world_size: int) -> dict[str, list[str]]:
    """Names of the units' strategies: one that is too large is passed over; replicas."""
    mesh = init_device_mesh("cpu", (2, 2))
    sizes = (40, 40, 80, 20)
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for size in sizes])
    budget = 4 * (20 * 20 + 40 * 40) + 4 * 1024  # the third is passed over, the first has no room
    kwargs: dict[str, Any] = {"unsharded_budget_bytes": budget}
    policy = ModuleWrapPolicy({nn.Linear})
    hybrid = FSDP(
        make_transformer(num_blocks=1),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD_ZERO2,
        device_mesh=mesh,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        unsharded_budget_bytes=0,
    )
    fully_shard(model, policy=policy, reshard_after_forward=False, **kwargs)
    return {
        name: [unit.config.sharding_strategy.name for unit in one._fsdp_root.units]
        for name, one in (("sizes", model), ("replicas", hybrid))
    }


def test_which_fit(ranks: RankPool) -> None:
    for found in ranks.run(_choices, 4):
        assert found["sizes"] == [
            "SHARD_GRAD_OP",
            "FULL_SHARD",
            "SHARD_GRAD_OP",
            "FULL_SHARD",
            "SHARD_GRAD_OP",
        ]
        assert found["replicas"] == ["HYBRID_SHARD_ZERO2", "HYBRID_SHARD"]


def _refused(rank: int, world_size: int) -> dict[str, str]:
    def wrapped(budget: Any, strategy: ShardingStrategy = KEEPS) -> Any:
        return FSDP(nn.Linear(4, 4), sharding_strategy=strategy, unsharded_budget_bytes=budget)

    return {
        "text": error_of(lambda: wrapped("4GB")),
        "negative": error_of(lambda: wrapped(-1)),
        "strategy": error_of(lambda: wrapped(1, ShardingStrategy.FULL_SHARD)),
        "ranks": error_of(lambda: wrapped(rank)),
    }


def test_errors(ranks: RankPool) -> None:
    for found in ranks.run(_refused, 2):
        assert found["text"].startswith("FSDPTypeError")
        assert "expected 0 or more, got -1" in found["negative"]
        assert (
            "expected one of SHARD_GRAD_OP, HYBRID_SHARD_ZERO2, got FULL_SHARD"
            in (found["strategy"])
        )
        assert found["ranks"].startswith("DivergenceError")
        assert "argument 'unsharded_budget_bytes'" in found["ranks"]
