"""``step_on_shards``: steps, states and state dicts as of one process, and what it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


class _Counting(torch.optim.Optimizer):
    """Momentum beside the states, by parameter, and a number of steps, as many are written."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.5 * state.get("mean", 0.0) + param.grad
                momentum = self.momentum.setdefault(param, torch.zeros_like(param))
                momentum.mul_(0.9).add_(state["mean"])
                param.add_(momentum, alpha=-group["lr"] / state["steps"])


def _other_memory(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        value: Any = state.get("exp_avg")
        if isinstance(value, DTensor):
            value._local_tensor = torch.ones_like(value._local_tensor)


def _swapped(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        if "exp_avg" in state:
            torch.utils.swap_tensors(state["exp_avg"], torch.ones_like(state["exp_avg"]))


def _dropped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.pop(optimizer.param_groups[0]["params"][0])


CHANGES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "nothing": lambda _: None,
    "other memory in states": _other_memory,
    "swapped states": _swapped,
    "a dropped state": _dropped,
    "a plain dict": lambda optimizer: setattr(optimizer, "state", dict(optimizer.state)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [torch.optim.Adam, _Counting])
@on_ranks(2)
def test_equals_steps_on_dtensors(rank: int, make: Any, change: str) -> None:
    """What a user changes between steps holds; what an optimizer keeps by parameter stays."""
    models: list[Any] = [fully_shard(_Odd()) for _ in range(2)]
    optimizers = [make(model.parameters(), lr=0.05) for model in models]
    step_on_shards(optimizers[1], is_elementwise=True)
    for step in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, range(step, step + 1), [rank])
            if step == 2:
                CHANGES[change](optimizer)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


@on_ranks(2)
def test_a_refused_gradient_is_not_used_later(rank: int) -> None:
    model: Any = fully_shard(_Odd())
    optimizer = step_on_shards(torch.optim.SGD(model.parameters(), lr=1.0))
    model(torch.ones(2, 5)).sum().backward()
    model.scale.grad._local_tensor = torch.ones(3)
    assert "assign a gradient of size" in error_of(optimizer.step)
    optimizer.zero_grad()
    before = [param.to_local().clone() for param in model.parameters()]
    optimizer.step()
    after = [param.to_local() for param in model.parameters()]
    assert all(map(torch.equal, before, after))


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
