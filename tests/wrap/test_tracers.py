"""What makes a program of a model, other than Dynamo, on a sharded one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, gradients, whole_gradients
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPError, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

X = torch.ones(3, 4)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


TRACERS: dict[str, Callable[[nn.Module], Any]] = {
    "export": lambda model: torch.export.export(model, (X,)),
    "strict export": lambda model: torch.export.export(model, (X,), strict=True),
    "jit.trace": lambda model: torch.jit.trace(model, (X,)),
    "jit.script": torch.jit.script,
    "fx": torch.fx.symbolic_trace,
}


@pytest.mark.parametrize("door", ["wrapper", "fully_shard", "one unit"])
@on_ranks(2)
def test_an_error_and_training_goes_on(rank: int, door: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(_Block(), nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    policy = None if door == "one unit" else ModuleWrapPolicy({_Block})
    if door == "wrapper":
        model = FSDP(model, auto_wrap_policy=policy)
    else:
        fully_shard(model, policy=policy)
    for trace in (*TRACERS.values(), *TRACERS.values()):
        with pytest.raises(FSDPError, match="get_model_state_dict"):
            trace(model)
        for call in (plain, model):
            call(X).square().sum().backward()
        assert different(whole_gradients(model), gradients(plain)) == []
