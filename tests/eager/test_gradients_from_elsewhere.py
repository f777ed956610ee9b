"""Gradients that reach a unit's parameters other than through the tensors that it returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, gradients, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 4
VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda out: out.unsqueeze(0).squeeze(0),
    lambda out: out.view(-1, 2, 4).flatten(1),
    lambda out: out[:, :],
)


class _Block(nn.Module):
    """Returns a view, if it has one, and stores what a loss of its own may use."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        self.first, self.second, self.router = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.view = view
        self.stored: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        if self.view is not None:
            out = self.view(out)
        self.stored = self.router(hidden).square().mean()
        return out


class _Model(nn.Module):
    """Changes the views in place that its blocks return."""

    def __init__(self, *views: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(map(_Block, views))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            out = block(x)
            if block.view is None:
                x = out + x
            else:
                out += x
                x = out.relu_()
        return x


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_views_changed_in_place_and_losses_on_stored_tensors(rank: int, mode: str) -> None:
    """Eager mode refuses the latter."""

    def loss(model: Any, out: torch.Tensor) -> torch.Tensor:
        stored = [] if mode == "eager" else [block.stored for block in model.blocks]
        return out.square().mean() + sum(stored)

    plain, inner = _Model(*VIEWS, None), _Model(*VIEWS, None)
    model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({_Block}))
    step = in_mode(model, mode)
    for seed in range(2):  # units are prefetched from the second step on
        batches = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))
        for used in (plain, model):
            used.zero_grad()
        for batch in batches:
            (loss(plain, plain(batch)) / 2).backward()
        loss(inner, step(batches[rank])).backward()
        assert different(whole_gradients(model), gradients(plain)) == []


@pytest.mark.parametrize("with_output", [False, True])
@on_ranks(2)
def test_a_loss_on_a_stored_tensor_in_eager_mode(rank: int, with_output: bool) -> None:
    """Autograd refuses: the router's weights are needed before the unit's backward begins."""
    inner = _Model(None, None)
    model = FSDP(inner, auto_wrap_policy=ModuleWrapPolicy({_Block}))
    for _ in range(2):
        out = model(torch.randn(4, 8))
        loss = sum(block.stored for block in inner.blocks) + with_output * out.sum()
        with pytest.raises(RuntimeError, match="inplace"):
            loss.backward()
        for param in model.parameters():
            assert param.grad is None


# -- units that return their parameters, whose memory is freed behind the forward, or raise --------


class _ReturnsWeight(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight


class _ReturnsDetached(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.weight.detach()


class _ReturnsView(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"views": [self.weight.t()[1:]]}


class _Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.in_features == DIM:
            raise ValueError
        return y, self.weight


class _Returning(nn.Module):
    """Uses what its units return behind them; goes on without a unit that raises."""

    def __init__(self, *units: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(unit(DIM, DIM) for unit in units)
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for unit in self.units:
            try:
                x, weight = unit(x)
            except ValueError:
                continue
            if isinstance(weight, dict):
                weight = weight["views"][0]
            total = total + weight.square().sum()
        return total + self.last(x).square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("units", [(_ReturnsWeight, _ReturnsDetached, _ReturnsView), (_Raises,)])
@on_ranks(2)
def test_units_that_return_their_parameters(
    rank: int, units: tuple[type[nn.Linear], ...], mode: str
) -> None:
    plain = _Returning(*units)
    model = copy.deepcopy(plain)
    for one in (*model.units, model.last, model):
        fully_shard(one)
    run = in_mode(model, mode)
    for step in range(2):
        x = torch.ones(3, DIM) + step
        loss, expected = run(x), plain(x)
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
    assert different(whole_gradients(model), gradients(plain)) == []
