"""The steps in the picture of ``docs/inspection.md``, inspected by the command::

torchrun --nproc-per-node 2 -m fsdp_dynamo inspect --module tools.inspected:main --out out
python tools/screenshot.py out/index.html docs/pictures/inspection.png
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

WORDS, DIM, HIDDEN = 512, 256, 1024


class Layer(nn.Module):
    """A unit: two products and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` and what is added to it."""
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    """Three units, and a root with an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(DIM, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores of all words."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    """Two steps: the first compiles, the second is the one that is drawn."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(Net(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    step = torch.compile(model, fullgraph=True, backend="fsdp_dynamo_aot_eager")
    for _ in range(2):
        step(torch.randint(WORDS, (8, 128))).square().mean().backward()
    dist.destroy_process_group()
