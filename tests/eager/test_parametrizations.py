"""Parametrizations that a forward registers and removes, and forwards that change parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, gradients, whole_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 4


class _Scaled(nn.Module):
    """Saves what it is given for its backward."""

    def __init__(self, factor: torch.Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * (1 + self.factor)


class _Lora(nn.Module):
    """Adapts a parameter as PEFT's ``target_parameters`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.a, self.b = (nn.Parameter(torch.randn(*shape)) for shape in ((DIM, 1), (1, DIM)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_trained = self.base.weight.requires_grad
        scaled = _Scaled(self.a @ self.b)
        parametrize.register_parametrization(self.base, "weight", scaled)
        self.base.parametrizations.weight.original.requires_grad_(is_trained)
        try:
            with parametrize.cached():
                return self.base(self.base(x).tanh())
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class _Checkpointed(_Lora):
    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class _TakenOut(nn.Linear):
    """Puts the weight back by an assignment."""

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        del self.weight
        self.weight = weight
        return super().forward(x)


def _model(block: type[nn.Module], is_frozen: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block(), nn.Linear(DIM, DIM))
    for name, param in model.named_parameters():
        param.requires_grad_(not is_frozen or "base.weight" not in name)
    return model


def _sharded(door: str, model: nn.Module, block: type[nn.Module]) -> nn.Module:
    policy = ModuleWrapPolicy({block})
    if door == "wrapper":
        return FSDP(model, auto_wrap_policy=policy)
    if door == "one unit":
        return FSDP(model)
    strategy = ShardingStrategy.NO_SHARD if door == "whole" else None
    module: nn.Module = fully_shard(model, policy=policy, strategy=strategy)
    return module


@pytest.mark.parametrize(
    ("mode", "door", "block", "is_frozen"),
    [
        ("eager", "wrapper", _Lora, False),
        ("eager", "one unit", _Lora, True),
        ("eager", "whole", _Lora, False),
        ("eager", "fully_shard", _Checkpointed, False),
        ("eager", "fully_shard", _TakenOut, False),
        ("hooks", "fully_shard", _Lora, False),
        ("hooks", "wrapper", _Checkpointed, True),
    ],
)
@on_ranks(2)
def test_as_in_one_process(
    rank: int, mode: str, door: str, block: type[nn.Module], is_frozen: bool
) -> None:
    plain = _model(block, is_frozen)
    model = _sharded(door, copy.deepcopy(plain), block)
    keys = sorted(model.state_dict())
    run = in_mode(model, mode)
    for step in range(3):
        x = torch.ones(3, DIM) + step
        for call in (plain, run):
            call(x).square().sum().backward()
        assert different(whole_gradients(model), gradients(plain)) == []
    assert sorted(model.state_dict()) == keys
    assert [*model.buffers()] == []


@on_ranks(2)
def test_graph_mode_raises_as_torch_does(rank: int) -> None:
    """Dynamo traces no registration; what it traced is undone."""
    plain = _model(_Lora)
    model = _sharded("wrapper", copy.deepcopy(plain), _Lora)
    with pytest.raises(Exception, match="parametriz"):
        in_mode(model, "graph")(torch.ones(3, DIM))
    for call in (plain, model):
        call(torch.ones(3, DIM)).square().sum().backward()
    assert different(whole_gradients(model), gradients(plain)) == []


class _Refused(nn.Linear):
    change: Callable[[_Refused], None] | None = None

    def __init__(self) -> None:
        super().__init__(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.change is not None:
            type(self).change(self)
        return super().forward(x)


def _register(module: nn.Module) -> None:
    parametrize.register_parametrization(module, "weight", _Scaled(torch.ones(())))


def _bake(module: nn.Module) -> None:
    _register(module)
    parametrize.remove_parametrizations(module, "weight")


@pytest.mark.parametrize(("change", "has_grad"), [(_register, True), (_bake, False)])
@on_ranks(2)
def test_changes_that_would_be_lost(rank: int, change: Any, has_grad: bool) -> None:
    """An error, in each forward; afterwards the model is as it was."""
    model = _sharded("wrapper", _model(_Refused), _Refused)
    x = torch.ones(3, DIM)
    expected = model(x)
    _Refused.change = change
    try:
        for _ in range(2):
            with torch.set_grad_enabled(has_grad), pytest.raises(FSDPStateError, match="weight"):
                model(x)
    finally:
        _Refused.change = None
    if change is not _register:
        torch.testing.assert_close(model(x), expected)
