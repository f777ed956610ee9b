"""Calls after a backward that raised and was caught: the model is as usable as before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modes import MODES, in_mode
from pool import RankPool
from torch import nn

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _use_no_sync(model: FSDP, run: nn.Module, x: torch.Tensor) -> None:
    with model.no_sync():
        run(0 * x).sum().mul(0.0).backward()


def _use_to(model: FSDP, run: nn.Module, x: torch.Tensor) -> None:
    model.to(torch.float64).to(torch.float32)


def _use_load(model: FSDP, run: nn.Module, x: torch.Tensor) -> None:
    model.load_state_dict(_model().state_dict())


def _use_clip(model: FSDP, run: nn.Module, x: torch.Tensor) -> None:
    model.clip_grad_norm_(1.0)


def _after_a_failure(rank: int, world_size: int, mode: str) -> list[str]:
    """What does not work, or leaves other gradients than one process, after a caught failure."""
    x = torch.arange(8.0).view(2, 4)
    plain = _model()
    plain(x).square().sum().backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    wrong = []
    for use in (_use_no_sync, _use_to, _use_load, _use_clip):
        model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        run = in_mode(model, mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fail(*_: Any) -> None:
            raise ValueError("in the backward")

        inputs = x.clone().requires_grad_()
        inputs.register_hook(fail)
        with pytest.raises(ValueError, match="in the backward"):
            run(inputs).square().sum().backward()
        optimizer.zero_grad()
        try:
            use(model, run, x)
            run(x).square().sum().backward()
        except Exception as error:
            wrong.append(f"{use.__name__}: {type(error).__name__} {error}")
            continue
        with FSDP.summon_full_params(model, with_grads=True):
            for name, p in model.named_parameters():
                if p.grad is None or not torch.allclose(p.grad, expected[name], 1e-5, 1e-6):
                    wrong.append(f"{use.__name__}: {name}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
def test_methods_after_a_caught_failure(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_after_a_failure, 2, mode) == [[], []]
