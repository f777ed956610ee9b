"""``unsharded_budget_bytes``: which units stay unsharded between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPTypeError,
    FSDPValueError,
    ShardingStrategy,
    fully_shard,
    record_events,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

KEEPS = ShardingStrategy.SHARD_GRAD_OP
BLOCKS = 3


def _bytes_of_a_block() -> int:
    unit = wrap(make_transformer(num_blocks=1)).blocks[0]._fsdp_unit
    return sum(flat.unsharded_bytes for flat in unit.flats)


@pytest.mark.parametrize(("mode", "num_kept"), [("eager", 0), ("eager", 1), ("graph", 2)])
@on_ranks(2)
def test_the_last_ones_stay(rank: int, mode: str, num_kept: int) -> None:
    """Between forward and backward, with a budget for so many blocks; none after evaluations."""
    model = wrap(
        make_transformer(num_blocks=BLOCKS),
        sharding_strategy=KEEPS,
        unsharded_budget_bytes=num_kept * _bytes_of_a_block() + 1,
    )
    run = in_mode(model, mode)
    expected, _ = ddp_losses(rank, num_blocks=BLOCKS)
    assert train(run, rank)[0] == pytest.approx(expected, rel=1e-6)
    with record_events() as log:
        loss_of(run, batch(rank, 9)).backward()
    again = {unit for _, unit, phase in log.keys("all_gather") if phase == "backward"}
    assert again == {f"blocks.{i}" for i in range(BLOCKS - num_kept)}
    with torch.no_grad():
        run(batch(rank, 0))
    assert not any(unit.is_unsharded for unit in model._fsdp_root.units)


def _strategies(model: Any) -> list[str]:
    return [unit.config.sharding_strategy.name for unit in model._fsdp_root.units]


@on_ranks(4)
def test_which_fit(rank: int) -> None:
    """A unit that is too large is passed over; replicas follow the same rule."""
    sizes = (40, 40, 80, 20)
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for size in sizes])
    budget = 4 * (20 * 20 + 40 * 40) + 4 * 1024  # the third is passed over, the first has no room
    policy = ModuleWrapPolicy({nn.Linear})
    kwargs: dict[str, Any] = {"unsharded_budget_bytes": budget}
    fully_shard(model, policy=policy, reshard_after_forward=False, **kwargs)
    kept, resharded = "SHARD_GRAD_OP", "FULL_SHARD"
    assert _strategies(model) == [kept, resharded, kept, resharded, kept]
    hybrid = wrap(
        make_transformer(num_blocks=1),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD_ZERO2,
        device_mesh=init_device_mesh("cpu", (2, 2)),
        unsharded_budget_bytes=0,
    )
    assert _strategies(hybrid) == ["HYBRID_SHARD_ZERO2", "HYBRID_SHARD"]


@on_ranks(2)
def test_errors(rank: int) -> None:
    full = ShardingStrategy.FULL_SHARD
    for budget, strategy, kind, words in (
        ("4GB", KEEPS, FSDPTypeError, "unsharded_budget_bytes"),
        (-1, KEEPS, FSDPValueError, "expected 0 or more, got -1"),
        (1, full, FSDPValueError, "SHARD_GRAD_OP, HYBRID_SHARD_ZERO2, got FULL_SHARD"),
        (rank, KEEPS, DivergenceError, "argument 'unsharded_budget_bytes'"),
    ):
        with pytest.raises(kind, match=words):
            FSDP(nn.Linear(4, 4), sharding_strategy=strategy, unsharded_budget_bytes=budget)


@on_ranks(1)
def test_one_rank_has_nothing_to_keep(rank: int) -> None:
    for kwargs in ({}, {"reshard_after_forward": False}):
        make = fully_shard if kwargs else FSDP
        strategy = kwargs or {"sharding_strategy": KEEPS}
        model = make(nn.Linear(4, 4), unsharded_budget_bytes=100, **strategy)
        assert _strategies(model) == ["NO_SHARD"]
