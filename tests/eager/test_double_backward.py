"""Gradients of inputs that are differentiated again, as gradient penalties need it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import average_gradients
from pool import on_ranks
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


def _sharded(strategy: ShardingStrategy) -> FSDP:
    policy = ModuleWrapPolicy({_Layer})
    return FSDP(_critic(), auto_wrap_policy=policy, sharding_strategy=strategy)


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
    model: nn.Module,
    rank: int,
    between: bool,
    average: Callable[[nn.Module], None] = lambda model: None,
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


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_gradient_penalty(rank: int, strategy: str, between: bool) -> None:
    expected = _train(_critic(), rank, between, average_gradients)
    model = _sharded(ShardingStrategy[strategy])
    assert _train(model, rank, between) == pytest.approx(expected, rel=1e-5)
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
    assert not any(flat.is_sharded and flat.is_allocated for flat in flats)


@on_ranks(2)
def test_of_parameters_is_refused(rank: int) -> None:
    model = _sharded(ShardingStrategy.FULL_SHARD)
    with pytest.raises(UnsupportedError, match="expected gradients of inputs only"):
        model(torch.ones(2, 8)).sum().backward(create_graph=True)
    model.zero_grad()
    expected = _train(_critic(), rank, False, average_gradients)
    assert _train(model, rank, False) == pytest.approx(expected, rel=1e-5)
