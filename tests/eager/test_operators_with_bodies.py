"""Operators whose bodies read several parameters of a unit, which share a storage."""

from __future__ import annotations

import copy

import pytest
import torch
from loops import different, error_of, gradients, whole_gradients
from models import average_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops import scan

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 4


@torch.compiler.nested_compile_region
def _region(block: _Block, x: torch.Tensor) -> torch.Tensor:
    return block.b(torch.tanh(block.a(x))) * block.w


class _Block(nn.Module):
    """Calls the operators that refuse inputs of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)
        self.b = nn.Linear(DIM, DIM)
        self.w = nn.Parameter(torch.randn(DIM))
        self.v = nn.Parameter(torch.randn(DIM))
        self.has_region = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def step(carry: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = torch.tanh(carry * self.v + y * self.w)
            return carry.clone(), carry * self.v

        w, v = self.w, self.v.clone()
        x = torch.cond(x.sum() > 0, lambda y: self.a(y) * w, lambda y: self.b(y) * v, (x,))
        x = scan(step, torch.zeros(DIM), x)[1]
        x = map_over(lambda y: self.a(y) * self.w, x)
        return _region(self, _region(self, x)) if self.has_region else x


class _Maps(nn.Module):
    """Names no operator as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _mapped(self, x)


def _mapped(block: _Maps, x: torch.Tensor) -> torch.Tensor:
    return map_over(lambda y: torch.tanh(block.a(y)), x)


class _ReadsBefore(_Block):
    """Hands over parameters that it has read in eager code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, v = self.w, self.v
        torch._dynamo.graph_break()
        return torch.cond(x.sum() > 0, lambda y: y * w + v, lambda y: y - w * v, (x,))


def _model(kind: type[nn.Module] = _Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), kind(), nn.Linear(DIM, DIM))


def _sharded(door: str, model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({_Block, _Maps, _ReadsBefore})
    if door == "wrapper":
        return FSDP(model, auto_wrap_policy=policy)
    return fully_shard(model, policy=policy)


@pytest.mark.parametrize(
    ("kind", "mode", "door"),
    [
        (_Block, "eager", "wrapper"),
        (_Maps, "eager", "fully_shard"),
        (_Block, "hooks", "fully_shard"),
        (_Maps, "hooks", "wrapper"),
        (_Block, "graph", "fully_shard"),
    ],
)
@on_ranks(2)
def test_a_body_reads_several_parameters_of_a_unit(
    rank: int, kind: type[nn.Module], mode: str, door: str
) -> None:
    """Each takes its gradient through the operator; code that was compiled once runs again."""
    whole = _model(kind)
    whole[1].has_region = mode != "graph"  # whose parameters torch's region does not take
    model = _sharded(door, copy.deepcopy(whole))
    compiled = in_mode(model, mode)
    for step in range(2):
        torch.manual_seed(10 + step)
        x = torch.randn(3, DIM) * (1 if rank else -1)
        compiled(x).square().sum().backward()
        whole(x).square().sum().backward()
    average_gradients(whole)
    assert different(whole_gradients(model), gradients(whole)) == []


@pytest.mark.parametrize("mode", ["eager", "hooks"])
@on_ranks(2)
def test_parameters_read_before_the_operator_are_refused(rank: int, mode: str) -> None:
    model = in_mode(_sharded("fully_shard", _model(_ReadsBefore)), mode)
    text = error_of(lambda: model(torch.randn(3, DIM)))
    assert "unit '1'" in text
    assert "clone()" in text
