"""Ranks that run different units, in eager and on the hooks mode: an error on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, Transformer, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, DivergenceError, ShardingStrategy
from fsdp_dynamo.comm import watchdog
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

LIMIT_S = 10.0
PERIOD_S = 0.2


def _skip(model: Any, rank: int) -> None:
    model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
    loss_of(model, batch(rank, 1)).backward()


def _skip_the_last(model: Any, rank: int) -> None:
    model.module.skipped = frozenset({2}) if rank == 0 else frozenset()
    loss_of(model, batch(rank, 1)).backward()


def _one_forward_more(model: Any, rank: int) -> None:
    loss = loss_of(model, batch(rank, 1))
    if rank == 0:
        loss = loss + loss_of(model, batch(rank, 2))
    loss.backward()


def _no_backward(model: Any, rank: int) -> None:
    loss = loss_of(model, batch(rank, 1))
    if rank == 1:
        loss = loss_of(model, batch(rank, 2))
    loss.backward()
    loss_of(model, batch(rank, 3)).backward()


def _a_full_state_dict_of_one(model: Any, rank: int) -> None:
    if rank == 0:
        model.state_dict()
    loss_of(model, batch(rank, 1)).backward()


CASES: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "a unit left out": (_skip, "unit 'blocks.1'"),
    "the last unit left out": (_skip_the_last, "unit 'blocks.2'"),
    "one forward more": (_one_forward_more, "rank"),
    "a backward left out": (_no_backward, "rank"),
    "a state dict of one rank": (_a_full_state_dict_of_one, "rank"),
}


@contextmanager
def _an_error_in_time(words: Sequence[str]) -> Iterator[None]:
    """The promise; the wait itself is one period of the watcher. The store has the message."""
    began = time.monotonic()
    with pytest.raises(DivergenceError) as raised:
        yield
    assert time.monotonic() - began < LIMIT_S
    for word in words:
        assert word in str(raised.value)
    store: Any = dist.distributed_c10d._get_default_store()
    assert store.compare_set("message", "", str(raised.value)).decode() == str(raised.value)


@pytest.mark.parametrize(
    ("mode", "case"),
    [*(("eager", case) for case in CASES), ("hooks", "a unit left out")],
)
@on_ranks(2)
def test_every_rank_gets_an_error(rank: int, mode: str, case: str) -> None:
    """The same one, in a step after one that is the same on all ranks."""
    torch.manual_seed(7)
    plain = Branching(num_blocks=3)
    model: Any = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({Block}))
    run = in_mode(model, mode)
    loss_of(run, batch(rank, 0)).backward()
    diverge, unit = CASES[case]
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S), _an_error_in_time([unit, "step "]):
        diverge(run, rank)


class _Ordered(Transformer):
    """Runs its blocks in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(self.norm(x)) * self.scale


class _Two(nn.Module):
    """Two units, of which the second may be left out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, 1, bias=False), nn.Linear(size, 1, bias=False)
        self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + (0 if self.skips else self.second(x))


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("size", [2, 520], ids=["of 16 bytes", "of 4160 bytes"])
@on_ranks(2)
def test_gradients_are_not_mixed_up_with_comparisons(rank: int, mode: str, size: int) -> None:
    """A rank that alone has other calls, or another graph, compares while the other reduces."""
    torch.manual_seed(7)
    model: Any = FSDP(
        _Two(size).double(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, size, dtype=torch.float64)
    run(x).sum().backward()
    before = [p.detach().to_local().clone() for p in model.parameters()]
    model.module.skips = rank == 1

    def step() -> None:
        run(x).sum().backward()
        optimizer.step()

    with pytest.raises(DivergenceError), mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        step()
    assert all(map(torch.equal, (p.detach().to_local() for p in model.parameters()), before))


def _in_another_order(
    rank: int, world_size: int, order: tuple[int, ...], strategy: ShardingStrategy
) -> None:
    """The last ranks' blocks run in another order than the others', in the first step."""
    mesh = init_device_mesh("cpu", (2, 2) if strategy.is_hybrid else (world_size,))
    model: Any = FSDP(
        _Ordered(num_blocks=3),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_mesh=mesh,
    )
    if rank >= world_size // 2:  # a whole replica
        model.module.order = order
    began = time.monotonic()
    with pytest.raises(DivergenceError, match=r"blocks\."):
        loss_of(model, batch(rank, 0)).backward()
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("NO_SHARD", (1, 0, 2)),
        ("NO_SHARD", (0, 1)),
        ("NO_SHARD", (0, 1, 2, 1)),
        ("SHARD_GRAD_OP", (1, 0, 2)),
        ("HYBRID_SHARD", (1, 0, 2)),
        ("HYBRID_SHARD", (0, 1)),
    ],
)
def test_in_the_first_step(ranks: RankPool, strategy: str, order: tuple[int, ...]) -> None:
    """Also where gradients are all-reduced: those of equal blocks would be mixed up."""
    number = 4 if strategy == "HYBRID_SHARD" else 2
    ranks.run(_in_another_order, number, order, ShardingStrategy[strategy])


@on_ranks(2)
def test_another_wrap(rank: int) -> None:
    plain = make_transformer(num_blocks=2)
    model = wrap(plain) if rank == 0 else FSDP(plain)
    with pytest.raises(DivergenceError, match="elements"):
        loss_of(model, batch(rank, 0)).backward()


@on_ranks(2)
def test_a_slow_rank_is_waited_for(rank: int) -> None:
    """Nothing is wrong with that."""
    model = wrap(make_transformer(num_blocks=2))
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        if rank == 1:
            time.sleep(5 * PERIOD_S)
        loss = loss_of(model, batch(rank, 0))
        if rank == 0:
            time.sleep(4 * PERIOD_S)
        loss.backward()
