"""Optimizers that are refused for sharded parameters, and state that is older than the shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, ShardingStrategy


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def _transformers_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return transformers.Adafactor(model.parameters())


def _steps(rank: int, world_size: int, make: Any, strategy: str) -> str:
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    optimizer = make(model)

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0, 0))
        loss.backward()
        return loss

    closure()
    return error_of(lambda: optimizer.step(closure))


@pytest.mark.parametrize("make", [_lbfgs, _adafactor, _transformers_adafactor])
def test_across_elements(ranks: RankPool, make: Any) -> None:
    for message in ranks.run(_steps, 2, make, "FULL_SHARD"):
        assert "optimizer of parameter 'scale'" in message
        assert "which takes norms or dot products" in message
    assert ranks.run(_steps, 2, make, "NO_SHARD") == ["", ""]


class Lamb(torch.optim.SGD):
    """A user's own, of a name that is refused in libraries."""


def _own(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.1)


def test_a_users_own(ranks: RankPool) -> None:
    assert ranks.run(_steps, 2, _own, "FULL_SHARD") == ["", ""]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int
) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _stepped_before(rank: int, world_size: int, kind: str, strategy: str) -> tuple[Any, Any]:
    """Losses of a model that was trained before it was wrapped, under DDP and here."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for wraps in (False, True):
        plain = make_transformer(num_blocks=1)
        optimizer = getattr(torch.optim, kind)(plain.parameters(), lr=0.05, **options)
        _train(plain, optimizer, 0, 0)  # the same batches on every rank
        model = DistributedDataParallel(plain)
        if wraps:
            model = wrap(plain, sharding_strategy=ShardingStrategy[strategy])
        found.append(_train(model, optimizer, rank, 2))
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_stepped_before_wrapping(ranks: RankPool, kind: str, strategy: str) -> None:
    for expected, got in ranks.run(_stepped_before, 2, kind, strategy):
        assert got == pytest.approx(expected, rel=1e-4)


def _loaded_from_rank_0(rank: int, world_size: int) -> str:
    model = wrap(make_transformer(num_blocks=1))
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, rank, 0)
    saved = [copy.deepcopy(optimizer.state_dict())]
    torch.distributed.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])
    loss_of(model, batch(rank, 0)).backward()
    return error_of(optimizer.step)


def test_a_plain_state_dict_of_another_rank(ranks: RankPool) -> None:
    first, second = ranks.run(_loaded_from_rank_0, 2)
    assert first == ""
    assert "another rank's, perhaps" in second
    assert "FSDP.optim_state_dict" in second


def _loaded_back(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    found = []
    for loads in (False, True):
        model = wrap(make_transformer(num_blocks=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        _train(model, optimizer, rank, 0)
        if loads:
            state = FSDP.optim_state_dict(model, optimizer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        found.append(_train(model, optimizer, rank, 2))
    return found[0], found[1]


def test_what_is_advised_works(ranks: RankPool) -> None:
    for expected, got in ranks.run(_loaded_back, 2):
        assert got == pytest.approx(expected, rel=1e-6)
