"""Optimizers whose step is compiled, and those that keep states of their own kind, on DTensors.

Rows divide here: of others, torch's caches of compiled code give a rank the code of another one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from fsdp_dynamo import fully_shard

Step = Callable[[torch.optim.Optimizer], Callable[[], object]]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "AdamW": {"amsgrad": True, "foreach": True},
}


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 6))
    return copy.deepcopy(plain), fully_shard(plain)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(-1, 2, 28).view(4, 7) * (rank + step + 1)


class _Beside:
    """A model beside one process's, each with an optimizer of its own."""

    def __init__(self, rank: int, world_size: int, make: Callable[[Any], Any]) -> None:
        self.rank, self.world_size = rank, world_size
        self.reference, self.model = _models()
        self.of_reference = make(self.reference.parameters())
        self.optimizer = make(self.model.parameters())

    def train(self, numbers: range, step: Callable[[], object]) -> float:
        """The largest difference of parameters after some steps."""
        for number in numbers:
            self.of_reference.zero_grad()
            self.optimizer.zero_grad()
            batches = [_batch(rank, number) for rank in range(self.world_size)]
            sum(self.reference(x).pow(2).mean() / self.world_size for x in batches).backward()  # type: ignore[union-attr]
            self.model(batches[self.rank]).pow(2).mean().backward()
            self.of_reference.step()
            step()
        pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
        return max(float((own.full_tensor() - one).abs().max()) for one, own in pairs)  # type: ignore[attr-defined]


def _compiled(rank: int, world_size: int, backend: str) -> dict[str, tuple[float, int, int]]:
    """Largest difference, graphs after two steps, and after four."""
    found = {}
    for name, kwargs in OPTIMIZERS.items():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend(backend)
        beside = _Beside(
            rank,
            world_size,
            lambda params, name=name, kwargs=kwargs: getattr(torch.optim, name)(
                params, lr=1e-2, **kwargs
            ),
        )
        step = torch.compile(beside.optimizer.step, backend=counter)
        beside.train(range(2), step)
        graphs = counter.frame_count
        found[name] = (beside.train(range(2, 4), step), graphs, counter.frame_count)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_step(ranks: RankPool, backend: str) -> None:
    for found in ranks.run(_compiled, 3, backend):
        for difference, first, last in found.values():
            assert difference < 1e-5
            assert 0 < first == last


def _compiled_reductions(rank: int, world_size: int) -> list[str]:
    """What differs, in compiled code, from one process's."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    whole = layer.weight.detach().clone()
    fully_shard(layer)
    row: Any = layer.weight.detach()
    functions: dict[str, Callable[[torch.Tensor], Any]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "max": torch.max,
        "norm": torch.linalg.vector_norm,
        "total norm": lambda w: torch.nn.utils.get_total_norm([w, 2 * w]),
        "whole": lambda w: 2 * w.full_tensor() if isinstance(w, DTensor) else 2 * w,
    }
    wrong = []
    for name, function in functions.items():
        got = torch.compile(function, backend="aot_eager")(row)
        got = got.full_tensor() if isinstance(got, DTensor) else got
        if not torch.allclose(got, function(whole)):
            wrong.append(name)
    torch._dynamo.reset()
    return wrong


def test_compiled_reductions_are_of_all_ranks(ranks: RankPool) -> None:
    for wrong in ranks.run(_compiled_reductions, 3):
        assert not wrong


class _OwnStates(torch.optim.Optimizer):
    """SGD with momentum whose states it makes as torchao's optimizers do theirs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["momentum"] = self._zeros(param)
            _step_with_own_state(param.detach(), param.grad, state["momentum"])

    def _zeros(self, param: torch.Tensor) -> torch.Tensor:
        if not isinstance(param, DTensor):
            return torch.zeros_like(param)
        return DTensor.from_local(
            torch.zeros_like(param.to_local()),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )


def _step_with_own_state(p: torch.Tensor, grad: torch.Tensor, momentum: torch.Tensor) -> None:
    new = momentum.float().lerp(grad.float(), 0.5)
    momentum.copy_(new)
    p.copy_(p - 0.1 * new)


def _own_states(rank: int, world_size: int, compiled: bool) -> tuple[float, float, bool, bool]:
    """Differences of parameters before and after resuming, of whole states, and their type."""
    with torch._dynamo.config.patch(recompile_limit=32):  # each shape has its own graph
        return _trained_and_resumed(rank, world_size, compiled)


def _trained_and_resumed(
    rank: int, world_size: int, compiled: bool
) -> tuple[float, float, bool, bool]:
    global _step_with_own_state
    eager = _step_with_own_state
    if compiled:
        _step_with_own_state = torch.compile(eager, backend="aot_eager", fullgraph=True)
    beside = _Beside(rank, world_size, _OwnStates)
    before = beside.train(range(3), beside.optimizer.step)
    whole = get_optimizer_state_dict(
        beside.model, beside.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    weight = next(iter(beside.reference.parameters()))
    own = beside.of_reference.state[weight]["momentum"]
    is_equal = torch.allclose(whole["state"]["0.weight"]["momentum"], own, atol=1e-6)
    parts = get_optimizer_state_dict(beside.model, beside.optimizer)
    is_of_param = type(parts["state"]["0.weight"]["momentum"]) is type(beside.model[0].weight.data)  # type: ignore[index,union-attr]
    beside.optimizer = _OwnStates(beside.model.parameters())
    set_optimizer_state_dict(beside.model, beside.optimizer, parts)
    after = beside.train(range(3, 6), lambda: beside.optimizer.step())
    _step_with_own_state = eager
    torch._dynamo.reset()
    return before, after, is_equal, is_of_param


@pytest.mark.parametrize("compiled", [False, True])
def test_states_that_an_optimizer_makes(ranks: RankPool, compiled: bool) -> None:
    for before, after, is_equal, is_of_param in ranks.run(_own_states, 3, compiled):
        assert before < 1e-6
        assert after < 1e-6
        assert is_equal
        assert is_of_param
