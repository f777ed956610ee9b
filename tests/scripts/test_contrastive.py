"""A model whose forward gathers features of all ranks, as contrastive training does (CLIP)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from loops import shard
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

BATCH = 4


class _Pairs(nn.Module):
    """The loss of pairs of views, each against the views of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        towers = [nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)]
        self.left, self.right = towers
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = [F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)]
        left, right = (all_gather_tensor_autograd(one, 0, dist.group.WORLD) for one in own)
        scale = self.scale.exp()
        losses = [
            F.cross_entropy(scale * mine @ others.T, labels)
            for mine, others in zip(own, (right, left), strict=True)
        ]
        return (losses[0] + losses[1]) / 2


def _losses(model: nn.Module, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    labels = torch.arange(BATCH) + BATCH * rank
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(BATCH, 8, generator=generator)
        loss = model(x, x + 0.1 * torch.randn(BATCH, 8, generator=generator), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_trains_as_ddp(rank: int, mode: str) -> None:
    """In graph mode, the user's collectives are nodes among those of the units."""
    expected = _losses(DistributedDataParallel(_Pairs()), rank)
    assert _losses(in_mode(shard(_Pairs()), mode), rank) == pytest.approx(expected, rel=1e-5)
