"""Models and wrappings that are unusual: trained as by one process, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import (
    classification_loss,
    different,
    examples,
    gradients,
    make_classifier,
    whole_gradients,
)
from models import DOORS, average_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, FSDPError, FSDPStateError, FSDPValueError, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class Scaled(nn.Module):
    """Convolutions in channels-last memory, with scalars that are trained and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.conv = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        self.block = nn.Sequential(nn.Conv2d(6, 5, 3), nn.Tanh())
        self.block.to(memory_format=torch.channels_last)
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.conv(x) * self.scale).mean((2, 3)) + self.shift


def _sharded(door: str, model: nn.Module) -> Any:
    policy = ModuleWrapPolicy({nn.Sequential})
    if door == "wrapper":
        return FSDP(model, auto_wrap_policy=policy)
    return fully_shard(model, policy=policy)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_scalars_and_channels_last(rank: int, door: str, mode: str) -> None:
    torch.manual_seed(3)
    plain = Scaled()
    model = _sharded(door, copy.deepcopy(plain))
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(rank))
    for net, call in (plain, plain), (model, in_mode(model, mode)):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            call(x).pow(2).sum().backward()
            if net is plain:
                average_gradients(net)
            optimizer.step()
    with FSDP.summon_full_params(model):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
    assert different(values, dict(plain.named_parameters())) == []


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_copy_between_forward_and_backward(rank: int, door: str) -> None:
    """Both are trained: the backward is the original's."""
    plain, model = make_classifier(), _sharded(door, make_classifier())
    loss = classification_loss(model, examples(rank, 0))
    copied = copy.deepcopy(model)
    loss.backward()
    assert all(param.grad is None for param in copied.parameters())
    classification_loss(copied, examples(rank, 1)).backward()
    for step, trained in enumerate((model, copied)):
        plain.zero_grad()
        classification_loss(plain, examples(rank, step)).backward()
        average_gradients(plain)
        assert different(whole_gradients(trained), gradients(plain)) == []


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_module_attached_later(rank: int, door: str) -> None:
    """It is left alone while it is frozen."""
    model = _sharded(door, make_classifier())
    classification_loss(model, examples(rank)).backward()
    model.extra = nn.Linear(3, 3).requires_grad_(False)
    classification_loss(model, examples(rank)).backward()
    model.extra.requires_grad_(True)
    with pytest.raises(FSDPStateError, match=r"parameter 'extra\.weight'"):
        classification_loss(model, examples(rank))


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_what_is_wrapped_already(rank: int, door: str) -> None:
    """An error, whatever the two are, and nothing has changed."""
    model = _sharded(door, make_classifier())
    before = whole_gradients(model), [*map(id, model.parameters())]
    for again in (FSDP, fully_shard, DistributedDataParallel):
        with pytest.raises(FSDPError, match="unit"):
            again(model)
    for again in (FSDP, fully_shard):
        with pytest.raises(FSDPValueError, match="parameter 'weight'"):
            again(next(m for m in model.modules() if isinstance(m, nn.Linear)))
    assert before == (whole_gradients(model), [*map(id, model.parameters())])
    for torchs in (
        fsdp.fully_shard(make_classifier()),
        fsdp.FullyShardedDataParallel(make_classifier(), device_id=torch.device("cpu")),
    ):
        parent = nn.Sequential(torchs, nn.Linear(3, 3))
        with pytest.raises(FSDPValueError, match="module '0': expected modules that torch"):
            FSDP(parent) if door == "wrapper" else fully_shard(parent)
