"""The eager mode against DistributedDataParallel."""

from __future__ import annotations

import pytest
from models import STRATEGIES, ddp_losses, make_transformer, train, wrap
from pool import RankPool, on_ranks

from fsdp_dynamo import ShardingStrategy

FULL, GRADIENTS, WHOLE = STRATEGIES


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_losses_equal_ddp_bitwise(rank: int, strategy: ShardingStrategy) -> None:
    expected, _ = ddp_losses(rank)
    assert train(wrap(make_transformer(), sharding_strategy=strategy), rank)[0] == expected


def _compare(rank: int, world_size: int, tied: bool, strategy: ShardingStrategy) -> None:
    losses, norms = ddp_losses(rank, clip=0.5, tied=tied)
    model = wrap(make_transformer(tied=tied), sharding_strategy=strategy)
    got_losses, got_norms = train(model, rank, clip=0.5)
    assert got_losses == pytest.approx(losses, rel=1e-6)
    assert got_norms == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize(
    ("world_size", "tied", "strategy"),
    [
        (1, False, FULL),
        (1, True, WHOLE),
        (2, False, FULL),
        (2, True, GRADIENTS),
        (3, True, FULL),
        (3, False, WHOLE),
        (4, True, WHOLE),
        (4, False, GRADIENTS),
    ],
)
def test_losses_and_norms_equal_ddp(
    ranks: RankPool, world_size: int, tied: bool, strategy: ShardingStrategy
) -> None:
    ranks.run(_compare, world_size, tied, strategy)
