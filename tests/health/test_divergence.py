"""Ranks that run different units, in eager and on the hooks mode: an error on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from models import Block, Branching, Transformer, batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, DivergenceError, ShardingStrategy
from fsdp_dynamo.comm import watchdog
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

LIMIT_S = 10.0
PERIOD_S = 0.2


def _branching() -> nn.Module:
    torch.manual_seed(7)
    return Branching(num_blocks=3)


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


def _diverge(rank: int, world_size: int, mode: str, case: str) -> tuple[str, str, float]:
    """A step that is the same on all ranks, then one that is not."""
    policy = ModuleWrapPolicy({Block})
    model: Any = FSDP(_branching(), auto_wrap_policy=policy)
    run = in_mode(model, mode)
    loss_of(run, batch(rank, 0)).backward()
    began = time.monotonic()
    try:
        with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
            CASES[case][0](run, rank)
        return "", "", time.monotonic() - began
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began


_SLOW_ON_HOOKS = ("the last unit left out", "a backward left out", "a state dict of one rank")


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(
            mode,
            case,
            marks=[pytest.mark.slow] if mode == "hooks" and case in _SLOW_ON_HOOKS else [],
        )
        for mode in ("eager", "hooks")
        for case in CASES
    ],
)
def test_every_rank_gets_an_error(ranks: RankPool, mode: str, case: str) -> None:
    found = ranks.run(_diverge, 2, mode, case)
    for kind, message, seconds in found:
        assert kind == DivergenceError.__name__, message
        assert CASES[case][1] in message
        assert "step " in message
        assert seconds < LIMIT_S  # the promise; the wait itself is one period of the watcher
    assert found[0][1] == found[1][1]


class _Ordered(Transformer):
    """Runs its blocks in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(self.norm(x)) * self.scale


ORDERS = {"swapped": (1, 0, 2), "left out": (0, 1), "once more": (0, 1, 2, 1)}


def _at_once(
    rank: int, world_size: int, mode: str, order: str, strategy: ShardingStrategy
) -> tuple[str, str, float]:
    """The last rank's blocks run in another order than the others', in the first step."""
    mesh = init_device_mesh("cpu", (2, 2) if strategy.is_hybrid else (world_size,))
    model: Any = FSDP(
        _Ordered(num_blocks=3),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=strategy,
        device_mesh=mesh,
    )
    if rank >= world_size // 2:  # a whole replica
        model.module.order = ORDERS[order]
    began = time.monotonic()
    try:
        loss_of(in_mode(model, mode), batch(rank, 0)).backward()
        return "", "", 0.0
    except DivergenceError as error:
        return type(error).__name__, str(error), time.monotonic() - began


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
@pytest.mark.parametrize("order", list(ORDERS))
@pytest.mark.parametrize("mode", ["eager", pytest.param("hooks", marks=pytest.mark.slow)])
def test_in_the_first_step(ranks: RankPool, mode: str, order: str, strategy: str) -> None:
    """Also where gradients are all-reduced: those of equal blocks would be mixed up."""
    number = 4 if strategy == "HYBRID_SHARD" else 2
    found = ranks.run(_at_once, number, mode, order, ShardingStrategy[strategy])
    for kind, message, seconds in found:
        assert kind == DivergenceError.__name__
        assert "blocks." in message
        assert seconds < LIMIT_S or mode == "hooks"


def _another_wrap(rank: int, world_size: int) -> tuple[str, str]:
    plain = make_transformer(num_blocks=2)
    model = wrap(plain) if rank == 0 else FSDP(plain)
    try:
        loss_of(model, batch(rank, 0)).backward()
    except DivergenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_another_wrap(ranks: RankPool) -> None:
    for kind, message in ranks.run(_another_wrap, 2):
        assert kind == DivergenceError.__name__
        assert "elements" in message


def _late(rank: int, world_size: int) -> float:
    """One rank is slow: nothing is wrong with that."""
    model = wrap(make_transformer(num_blocks=2))
    with mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        if rank == 1:
            time.sleep(5 * PERIOD_S)
        loss = loss_of(model, batch(rank, 0))
        if rank == 0:
            time.sleep(4 * PERIOD_S)
        loss.backward()
    return loss.item()


def test_a_slow_rank_is_waited_for(ranks: RankPool) -> None:
    assert all(loss > 0 for loss in ranks.run(_late, 2))
