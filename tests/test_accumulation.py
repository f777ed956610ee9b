"""Sums of unsharded gradients are reduced once, in whatever order forwards and backwards come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from ways import in_way

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Step = Callable[[], torch.Tensor]


def _pending_together(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    (forward() + forward()).backward()


def _pending_one_by_one(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    first, second = forward(), forward()
    first.backward()
    second.backward()


def _backward_twice(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()


def _another_sum_meanwhile(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    loss = forward()
    unsynced()
    loss.backward()
    forward().backward()


def _a_forward_without_backward(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    forward()
    kept = forward()
    forward().backward()
    del kept


PROGRAMS = (
    _pending_together,
    _pending_one_by_one,
    _backward_twice,
    _another_sum_meanwhile,
    _a_forward_without_backward,
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _expected(program: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = _model()
    program(lambda: plain(x).square().sum(), lambda: plain(2 * x).square().sum().backward())
    return {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def _wrong(rank: int, world_size: int, way: str) -> list[str]:
    x = torch.arange(8.0).view(2, 4) / 8  # the same on all ranks, so the mean is one rank's
    wrong = []
    for program in PROGRAMS:
        model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        step = in_way(model, way)

        def unsynced(model: FSDP = model, step: Any = step) -> None:
            with model.no_sync():
                step(2 * x).square().sum().backward()

        try:
            program(lambda step=step: step(x).square().sum(), unsynced)
        except RuntimeError as error:
            wrong.append(f"{program.__name__}: {error}")
            continue
        expected = _expected(program, x)
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                if not torch.allclose(parameter.grad, expected[name], 1e-5, 1e-6):
                    wrong.append(f"{program.__name__}: {name}")
    return wrong


@pytest.mark.parametrize("way", ["eager", "hooks", "graph"])
def test_a_sum_is_added_once(ranks: RankPool, way: str) -> None:
    assert ranks.run(_wrong, 2, way) == [[], []]
