"""``step_on_shards``: steps, states and state dicts as of one process, and what it refuses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import error_of
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_dynamo import fully_shard, step_on_shards

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"amsgrad": True, "foreach": True},
    "Adam": {"fused": True},
    "SGD": {"momentum": 0.9, "fused": True},
    "Adagrad": {},
    "Rprop": {},
}


class _Odd(nn.Module):
    """Rows that do not divide, none on some ranks, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, ranks: range | list[int]
) -> None:
    """Steps on the mean over some ranks' batches, at a rate that falls."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        optimizer.zero_grad()
        for rank in ranks:
            x = torch.linspace(-1, 1, 10).view(2, 5) * (step + rank + 1)
            (model(x).square().mean() / len(ranks)).backward()
        optimizer.step()
        scheduler.step()


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    values = {name: param.full_tensor() for name, param in model.named_parameters()}  # type: ignore[attr-defined]
    return {**values, **{f"{n} {k}": v for n, one in states.items() for k, v in one.items()}}


def _beside_one_process(rank: int, world_size: int, name: str) -> list[str]:
    """Values and states that differ from one process's, on and after resuming."""
    make, kwargs = getattr(torch.optim, name), {"lr": 0.05, **OPTIMIZERS[name]}
    reference, model = _Odd(), fully_shard(_Odd())
    expected = make(reference.parameters(), **kwargs)
    got = step_on_shards(make(model.parameters(), **kwargs))
    for steps in (range(2), range(2, 4)):
        _train(reference, expected, steps, range(world_size))
        _train(model, got, steps, [rank])
        saved = get_optimizer_state_dict(model, got)
        got = step_on_shards(make(model.parameters(), **kwargs))
        set_optimizer_state_dict(model, got, saved)
    found = []
    values = _whole(model, got)
    for key, param in reference.named_parameters():
        if not torch.allclose(values[key], param, atol=1e-6):
            found.append(key)
        for state, value in expected.state[param].items():
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and not torch.allclose(values[f"{key} {state}"], value, atol=1e-6):
                found.append(f"{key} {state}")
    for param in model.parameters():
        for state, value in got.state[param].items():
            is_dtensor = isinstance(value, DTensor)
            if is_dtensor is not (isinstance(value, torch.Tensor) and state != "step"):
                found.append(f"kind of {state}")
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_one_process(ranks: RankPool, world_size: int, name: str) -> None:
    assert ranks.run(_beside_one_process, world_size, name) == [[]] * world_size


@on_ranks(2)
def test_writes_are_noticed(rank: int) -> None:
    """A unit that stays unsharded is gathered again."""
    model: Any = fully_shard(_Odd(), reshard_after_forward=False)
    optimizer = step_on_shards(torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.ones(2, 5)
    losses = []
    for _ in range(2):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] != losses[1]


class _Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise ZeroDivisionError


@on_ranks(2)
def test_a_failed_step_changes_nothing(rank: int) -> None:
    model: Any = fully_shard(_Odd())
    optimizer = step_on_shards(_Failing(model.parameters()), is_elementwise=True)
    model(torch.ones(2, 5)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    held = optimizer.param_groups[0]["params"]
    assert all(one is own for one, own in zip(held, model.parameters(), strict=True))


@on_ranks(2)
def test_refusals(rank: int) -> None:
    model: Any = fully_shard(copy.deepcopy(_Odd()))
    error = error_of(lambda: step_on_shards(torch.optim.Muon([model.first.weight])))
    assert "expected an optimizer of torch that updates element by element" in error
    optimizer = step_on_shards(torch.optim.SGD(model.parameters()))
    assert "expected no closure" in error_of(lambda: optimizer.step(lambda: 0.0))
    optimizer.register_step_pre_hook(lambda *_: None)
    assert "expected no hooks of a step" in error_of(optimizer.step)
