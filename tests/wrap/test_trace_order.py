"""The order in which a symbolic trace finds modules and parameters."""

from __future__ import annotations

import pytest
import torch
from models import Transformer
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPValueError
from fsdp_dynamo.wrap_policy import CustomPolicy, trace_execution


class Backwards(nn.Module):
    """Uses its children in another order than it holds them, one twice and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.first = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.tied = nn.Linear(2, 2)
        self.tied.weight = self.last.weight

    def forward(self, x: torch.Tensor, twice: bool = True) -> torch.Tensor:
        x = self.first(x) * self.scale
        if twice:
            x = self.first(x)
        out: torch.Tensor = self.tied(self.last(x))
        return out


def test_order_of_use() -> None:
    trace = trace_execution(Backwards(), {"twice": True})
    assert list(trace.modules) == ["first", "first.0", "first.1", "last", "tied"]
    assert list(trace.parameters) == [
        "first.0.weight",
        "first.0.bias",
        "first.1.weight",
        "first.1.bias",
        "scale",
        "last.weight",
        "last.bias",
        "tied.bias",
    ]


def test_a_forward_that_branches_on_values_is_refused() -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(FSDPValueError, match="does not depend on its inputs' values"):
        trace_execution(Branching())
    assert "blocks.0.qkv" in trace_execution(Transformer(num_blocks=1)).modules


@on_ranks(2)
def test_as_input_of_a_policy(rank: int) -> None:
    model = Backwards()
    trace = trace_execution(model, {"twice": True})
    policy = CustomPolicy(lambda m: trace.uses(m) and isinstance(m, nn.Linear | nn.Sequential))
    wrapped = FSDP(model, auto_wrap_policy=policy)
    wrapped(torch.ones(1, 2)).sum().backward()
    units = {unit.fqn for unit in wrapped._fsdp_root.units}
    assert {"last", "first", "tied"} <= units
    assert "unused" not in units
