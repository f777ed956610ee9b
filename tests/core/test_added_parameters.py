"""Parameters that come into the model after wrapping: an error, in every mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP, FSDPStateError


class Adapter(nn.Module):
    """A layer beside another one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


def _adapt(model: FSDP) -> None:
    block = model.module.blocks[1].module
    block.up = Adapter(block.up)


def _extend(model: FSDP) -> None:
    model.module.norm.extra = nn.Parameter(torch.zeros(3))


def _bias(model: FSDP) -> None:
    model.module.head.bias = nn.Parameter(torch.zeros(31))


ADDED: dict[str, tuple[Callable[[FSDP], None], str]] = {
    "adapter": (_adapt, "parameter 'blocks.1.up.low.weight': expected all trainable"),
    "parameter": (_extend, "parameter 'norm.extra': expected all trainable"),
    "in the place of None": (_bias, "parameter 'head.bias': expected all trainable"),
}


def _added(rank: int, world_size: int, mode: str, name: str) -> list[str]:
    wrapped = wrap(make_transformer(num_blocks=2, tied=True))
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    ADDED[name][0](wrapped)
    messages = []
    if mode != "graph" or name != "parameter":  # a graph that does not use it needs no new trace
        with pytest.raises(FSDPStateError) as caught:
            model(batch(rank, 0))
        messages.append(str(caught.value))
    with pytest.raises(FSDPStateError) as caught:
        wrapped.state_dict()
    return [*messages, str(caught.value)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ADDED)
def test_refused(ranks: RankPool, name: str, mode: str) -> None:
    for messages in ranks.run(_added, 2, mode, name):
        assert all(ADDED[name][1] in message for message in messages), messages


def _allowed(rank: int, world_size: int) -> bool:
    """Modules without parameters, frozen ones, and units of their own."""
    wrapped = wrap(make_transformer(num_blocks=2))
    loss_of(wrapped, batch(rank, 0)).backward()
    wrapped.module.blocks[0].activation = nn.ReLU()
    wrapped.module.teacher = nn.Linear(2, 2).requires_grad_(False)
    wrapped.module.extra = FSDP(nn.Linear(2, 2))
    loss_of(wrapped, batch(rank, 0)).backward()
    return "blocks.0.up.weight" in wrapped.state_dict()


def test_allowed(ranks: RankPool) -> None:
    assert ranks.run(_allowed, 2) == [True, True]
