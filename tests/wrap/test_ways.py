"""Both compiled paths against DDP, on 1 to 4 ranks."""

from __future__ import annotations

import pytest
from models import STRATEGIES, ddp_losses, make_transformer, train, wrap
from pool import RankPool
from ways import in_way

from fsdp_dynamo import ShardingStrategy


def _compare(
    rank: int, world_size: int, way: str, strategy: ShardingStrategy, blocks: int = 4
) -> object:
    expected = ddp_losses(rank, clip=0.5, num_blocks=blocks)
    model = wrap(make_transformer(num_blocks=blocks), sharding_strategy=strategy)
    return expected, train(in_way(model, way), rank, clip=0.5)


def _check(results: list[object], rel: float) -> None:
    for (losses, norms), (got_losses, got_norms) in results:  # type: ignore[misc]
        assert got_losses == pytest.approx(losses, rel=rel)
        assert got_norms == pytest.approx(norms, rel=max(rel, 1e-6))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("way", ["hooks", "graph"])
def test_aot_eager_equals_ddp(ranks: RankPool, way: str, strategy: ShardingStrategy) -> None:
    _check(ranks.run(_compare, 2, way, strategy), 1e-6)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("way", ["hooks", "graph"])
def test_world_sizes(ranks: RankPool, way: str, world_size: int) -> None:
    _check(ranks.run(_compare, world_size, way, ShardingStrategy.FULL_SHARD, 2), 1e-6)


@pytest.mark.parametrize(
    "way", [pytest.param("hooks-inductor", marks=pytest.mark.slow), "graph-inductor"]
)
def test_inductor_equals_ddp(ranks: RankPool, way: str) -> None:
    _check(ranks.run(_compare, 2, way, ShardingStrategy.FULL_SHARD), 1e-5)
