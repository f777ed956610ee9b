"""Units that return their parameters, whose memory is freed behind the forward, and that raise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import different, whole_gradients
from modes import MODES, in_mode
from pool import RankPool
from torch import nn

from fsdp_dynamo import fully_shard

DIM = 4


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


class _Model(nn.Module):
    """Uses what its unit returns behind it; goes on without it where it raises."""

    def __init__(self, unit: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unit, self.last = unit(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y, weight = self.unit(x)
        except ValueError:
            return self.last(x).square().sum()
        if isinstance(weight, dict):
            weight = weight["views"][0]
        return self.last(y).square().sum() + weight.square().sum()


def _compared(rank: int, world_size: int, unit: type[nn.Linear], mode: str) -> Any:
    """Losses of two steps, those expected, and gradients that differ."""
    plain = _Model(unit)
    model = copy.deepcopy(plain)
    for one in (model.unit, model.last, model):
        fully_shard(one)
    run, losses, expected = in_mode(model, mode), [], []
    for step in range(2):
        x = torch.ones(3, DIM) + step
        for call, found in ((run, losses), (plain, expected)):
            loss = call(x)
            loss.backward()
            found.append(loss.detach())
    grads = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return *map(torch.stack, (losses, expected)), different(whole_gradients(model), grads)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("unit", [_ReturnsWeight, _ReturnsDetached, _ReturnsView, _Raises])
def test_as_without_it(ranks: RankPool, unit: type[nn.Linear], mode: str) -> None:
    for losses, expected, wrong in ranks.run(_compared, 2, unit, mode):
        torch.testing.assert_close(losses, expected)
        assert wrong == []
