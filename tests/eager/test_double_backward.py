"""Gradients of inputs that are differentiated again, as gradient penalties need it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import average_gradients
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP, ShardingStrategy, UnsupportedError
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def _critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(_Layer(), _Layer(), nn.Linear(8, 1))


def _penalised(model: nn.Module, rank: int, step: int, between: bool) -> torch.Tensor:
    """A critic's loss with a penalty; ``between``: with a forward after the first backward."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    real, fake, mixed = torch.randn(3, 4, 8, generator=generator)
    loss = torch.zeros(())
    if not between:
        loss = model(fake).mean() - model(real).mean()
    mixed.requires_grad_()
    (grad,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    if between:
        loss = model(fake).mean() - model(real).mean()
    return loss + (grad.norm(dim=1) - 1).square().mean()


def _train(
    model: nn.Module, rank: int, between: bool, average: Callable[[nn.Module], None]
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = _penalised(model, rank, step, between)
        loss.backward()
        average(model)
        optimizer.step()
        with torch.no_grad():
            model(torch.zeros(1, 8))
        losses.append(loss.item())
    return losses


def _compare(rank: int, world_size: int, strategy: str, between: bool) -> tuple[Any, Any, bool]:
    plain = _critic()
    expected = _train(copy.deepcopy(plain), rank, between, average_gradients)
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({_Layer}),
        sharding_strategy=ShardingStrategy[strategy],
    )
    got = _train(model, rank, between, lambda _: None)
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
    return expected, got, any(flat.is_sharded and flat.is_allocated for flat in flats)


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_gradient_penalty(ranks: RankPool, strategy: str, between: bool) -> None:
    for expected, got, is_allocated in ranks.run(_compare, 2, strategy, between):
        assert got == pytest.approx(expected, rel=1e-5)
        assert not is_allocated


def _of_parameters(rank: int, world_size: int) -> tuple[str, list[float], list[float]]:
    model = FSDP(_critic(), auto_wrap_policy=ModuleWrapPolicy({_Layer}))
    message = ""
    try:
        model(torch.ones(2, 8)).sum().backward(create_graph=True)
    except UnsupportedError as error:
        message = str(error)
    model.zero_grad()
    plain = _critic()
    return (
        message,
        _train(plain, rank, False, average_gradients),
        _train(model, rank, False, lambda _: None),
    )


def test_of_parameters_is_refused(ranks: RankPool) -> None:
    for message, expected, got in ranks.run(_of_parameters, 2):
        assert "expected gradients of inputs only" in message
        assert got == pytest.approx(expected, rel=1e-5)
