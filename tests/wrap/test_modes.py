"""Both compiled paths against DDP, on 1 to 4 ranks."""

from __future__ import annotations

import pytest
from models import STRATEGIES, ddp_losses, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool

from fsdp_dynamo import ShardingStrategy


def _compare(
    rank: int, world_size: int, mode: str, strategy: ShardingStrategy, blocks: int = 3
) -> object:
    expected = ddp_losses(rank, clip=0.5, num_blocks=blocks)
    model = wrap(make_transformer(num_blocks=blocks), sharding_strategy=strategy)
    return expected, train(in_mode(model, mode), rank, clip=0.5)


def _check(results: list[object], rel: float) -> None:
    for (losses, norms), (got_losses, got_norms) in results:  # type: ignore[misc]
        assert got_losses == pytest.approx(losses, rel=rel)
        assert got_norms == pytest.approx(norms, rel=max(rel, 1e-6))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", ["hooks", "graph"])
def test_aot_eager_equals_ddp(ranks: RankPool, mode: str, strategy: ShardingStrategy) -> None:
    _check(ranks.run(_compare, 2, mode, strategy), 1e-6)


@pytest.mark.parametrize("world_size", [1, 3, 4])
@pytest.mark.parametrize("mode", ["hooks", "graph"])
def test_world_sizes(ranks: RankPool, mode: str, world_size: int) -> None:
    _check(ranks.run(_compare, world_size, mode, ShardingStrategy.FULL_SHARD, 2), 1e-6)


@pytest.mark.parametrize(
    "mode", [pytest.param("hooks-inductor", marks=pytest.mark.slow), "graph-inductor"]
)
def test_inductor_equals_ddp(ranks: RankPool, mode: str) -> None:
    _check(ranks.run(_compare, 2, mode, ShardingStrategy.FULL_SHARD), 1e-5)
