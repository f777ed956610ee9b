"""clip_grad_norm_ with any p: the norm of one process, over sharded and whole units."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from models import Block, batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, ShardingStrategy, UnsupportedError
from fsdp_dynamo.wrap_policy import CustomPolicy

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))
BOUND = 0.1
Norms = tuple[float, float, float]


def _expected(world_size: int, norm_type: float) -> float:
    """Of one process with the whole batch."""
    plain = make_transformer(num_blocks=2)
    total = sum(loss_of(plain, batch(r, 0)) for r in range(world_size)) / world_size
    total.backward()
    return float(nn.utils.clip_grad_norm_(plain.parameters(), BOUND, norm_type))


def _norms(rank: int, world_size: int, wrapped: FSDP, mode: str) -> list[Norms]:
    """For each p: one process's norm, the sharded model's, and the latter after clipping."""
    model = in_mode(wrapped, mode)
    found = []
    for norm_type in NORM_TYPES:
        wrapped.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        got = float(wrapped.clip_grad_norm_(BOUND, norm_type))
        after = float(wrapped.clip_grad_norm_(BOUND, norm_type))
        found.append((_expected(world_size, norm_type), got, after))
    return found


def _check(results: list[list[Norms]]) -> None:
    for norms in results:
        for expected, got, after in norms:
            assert got == pytest.approx(expected, rel=1e-6)
            assert after == pytest.approx(min(BOUND, expected), rel=1e-4)


def _one_strategy(rank: int, world_size: int, name: str, mode: str) -> list[Norms]:
    strategy = ShardingStrategy[name]
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=strategy)
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("FULL_SHARD", "eager"),
        ("NO_SHARD", "eager"),
        ("FULL_SHARD", "hooks"),
        ("FULL_SHARD", "graph"),
        pytest.param("NO_SHARD", "hooks", marks=pytest.mark.slow),
        pytest.param("NO_SHARD", "graph", marks=pytest.mark.slow),
    ],
)
def test_norm_equals_one_process(ranks: RankPool, strategy: str, mode: str) -> None:
    _check(ranks.run(_one_strategy, 2, strategy, mode))


def _sharded_and_whole(rank: int, world_size: int, mode: str) -> list[Norms]:
    """The first block is whole on every rank; the second one and the root are sharded."""
    plain = make_transformer(num_blocks=2)
    strategies = {
        plain.blocks[0]: ShardingStrategy.NO_SHARD,
        plain.blocks[1]: ShardingStrategy.FULL_SHARD,
    }
    policy = CustomPolicy(
        lambda m: {"sharding_strategy": strategies[m]} if isinstance(m, Block) else False
    )
    wrapped = FSDP(plain, auto_wrap_policy=policy)
    used = [unit.config.strategy.name for unit in wrapped._fsdp_root.units]
    assert used == ["FULL_SHARD", "NO_SHARD", "FULL_SHARD"]
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize("mode", MODES)
def test_sharded_and_whole_units_in_one_model(ranks: RankPool, mode: str) -> None:
    _check(ranks.run(_sharded_and_whole, 2, mode))


def _nested_on_other_groups(rank: int, world_size: int, case: str, mode: str) -> list[Norms]:
    """The first block on other groups than the root: four ranks, half of them, or replicas."""
    grid = init_device_mesh("cpu", (2, 2))
    hybrid = {"device_mesh": grid, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    copies = {"process_group": grid.get_group(1)}
    inner, outer = {
        "hybrid in sharded": (hybrid, {}),
        "sharded in hybrid": ({}, hybrid),
        "whole in hybrid": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, hybrid),
        "copies in sharded": (copies, {}),
    }[case]
    plain = make_transformer(num_blocks=2)
    plain.blocks[0] = FSDP(plain.blocks[0], **inner)
    wrapped = FSDP(plain, **outer)
    if case == "copies in sharded":  # they agree where their data do
        return _norms(rank % 2, 2, wrapped, mode)
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("hybrid in sharded", "eager"),
        ("sharded in hybrid", "eager"),
        ("whole in hybrid", "eager"),
        ("copies in sharded", "eager"),
        ("hybrid in sharded", "hooks"),
        ("hybrid in sharded", "graph"),
    ],
)
def test_units_on_other_groups(ranks: RankPool, case: str, mode: str) -> None:
    _check(ranks.run(_nested_on_other_groups, 4, case, mode))


def _copies_that_differ(rank: int, world_size: int) -> str:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    plain = make_transformer(num_blocks=2)
    plain.blocks[0] = FSDP(plain.blocks[0], process_group=alone)
    wrapped = FSDP(plain)
    loss_of(wrapped, batch(rank, 0)).backward()
    before = [p.grad.clone() for p in wrapped.parameters()]
    with pytest.raises(UnsupportedError) as raised:
        wrapped.clip_grad_norm_(BOUND)
    after = [p.grad for p in wrapped.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    return str(raised.value)


def test_a_unit_that_differs_between_ranks_of_the_root(ranks: RankPool) -> None:
    for message in ranks.run(_copies_that_differ, 2):
        assert "clip_grad_norm_(), unit 'blocks.0'" in message
        assert "expected one norm on all ranks of the root" in message
