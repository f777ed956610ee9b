"""The toy model whose interleaving of hooks and compiled backwards started this project."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


class MyModule(nn.Module):
    """A linear layer and a ReLU: one unit."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(num_inputs, num_outputs), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class ToyModel(nn.Module):
    """Three ``MyModule``: widths 10 -> 10000 -> 1000 -> 5."""

    WIDTHS = (10, 10000, 1000, 5)

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        self.net = nn.Sequential(*(MyModule(a, b) for a, b in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)
