"""Units that stay unsharded between forward and backward, beside units that reshard."""

from __future__ import annotations

import pytest
import torch
from models import batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import CustomPolicy

KEEPS = ShardingStrategy.SHARD_GRAD_OP
BLOCKS = 3


@pytest.mark.parametrize(("mode", "num_kept"), [("eager", 3), ("eager", 1), ("graph", 2)])
@on_ranks(2)
def test_the_last_ones_stay(rank: int, mode: str, num_kept: int) -> None:
    """Between forward and backward, by a policy; none after evaluations."""
    plain = make_transformer(num_blocks=BLOCKS)
    kept = plain.blocks[BLOCKS - num_kept :]

    def choose(module: nn.Module) -> object:
        return {"sharding_strategy": KEEPS} if module in kept else module in plain.blocks

    model = wrap(plain, auto_wrap_policy=CustomPolicy(choose))
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


@on_ranks(1)
def test_one_rank_has_nothing_to_keep(rank: int) -> None:
    wrapped = FSDP(nn.Linear(4, 4), sharding_strategy=KEEPS)
    sharded = fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
    for model in (wrapped, sharded):
        names = [unit.config.sharding_strategy.name for unit in model._fsdp_root.units]
        assert names == ["NO_SHARD"]
