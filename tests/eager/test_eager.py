"""The eager mode against DistributedDataParallel."""

from __future__ import annotations

import pytest
from models import STRATEGIES, ddp_losses, make_transformer, train, wrap
from pool import RankPool

from fsdp_dynamo import ShardingStrategy


def _compare(rank: int, world_size: int, strategy: ShardingStrategy, tied: bool) -> object:
    expected = ddp_losses(rank, clip=0.5, tied=tied)
    model = wrap(make_transformer(tied=tied), sharding_strategy=strategy)
    return expected, train(model, rank, clip=0.5)


def _compare_unclipped(rank: int, world_size: int, strategy: ShardingStrategy) -> object:
    expected, _ = ddp_losses(rank)
    losses, _ = train(wrap(make_transformer(), sharding_strategy=strategy), rank)
    return expected, losses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_equal_ddp_bitwise(ranks: RankPool, strategy: ShardingStrategy) -> None:
    for expected, got in ranks.run(_compare_unclipped, 2, strategy):
        assert got == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_losses_and_norms_equal_ddp(
    ranks: RankPool, world_size: int, strategy: ShardingStrategy, tied: bool
) -> None:
    for (losses, norms), (got_losses, got_norms) in ranks.run(_compare, world_size, strategy, tied):
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-6)
