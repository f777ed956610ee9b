"""Regions without gradients around, between and in units, in all three modes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import pytest
import torch
from loops import different, gradients, whole_gradients
from models import average_gradients
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FORWARDS = (
    "teacher",
    "unit first",
    "operator first",
    "nested",
    "to the end",
    "by hand",
    "checkpointed",
)


class Regions(nn.Module):
    """Units, and a weight of the root, in and beside regions without gradients."""

    def __init__(self, forward: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.which = forward
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((3,), 1.5))

    def _target(self, x: torch.Tensor, region: AbstractContextManager[object]) -> torch.Tensor:
        with region:
            return self.b(x) * self.scale

    def _checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x * self.scale) + self._target(x, torch.no_grad())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.which == "teacher":
            y = self.a(x)
            with torch.no_grad():
                target = self.b(x)
            return y - target
        if self.which == "unit first":
            y = self.a(x)
            return (y * self.scale - self._target(x, torch.no_grad())).sin() + self.c(y)
        if self.which == "operator first":
            with torch.no_grad():
                target = self.b((x * self.scale).sin()) * self.scale
            return self.a(target) * self.scale
        if self.which == "nested":
            with torch.no_grad():
                target = self.b(x * self.scale)
                with torch.enable_grad():
                    y = self.a(target * self.scale) * self.scale
                y_target = self.c(x) * self.scale
            return y + y_target * self.scale
        if self.which == "to the end":
            y = self.a(x) * self.scale
            with torch.no_grad():
                return torch.cat([self.b(y) * self.scale, y])
        if self.which == "by hand":
            y, before = self.a(x) * self.scale, torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            target = self.b(y) * self.scale
            torch.set_grad_enabled(before)
            return y * target
        y = checkpoint(self._checkpointed, x, use_reentrant=False)
        return y * self.scale


@pytest.mark.parametrize(
    ("mode", "forwards"),
    [("eager", FORWARDS), ("hooks", FORWARDS[1:]), ("graph", FORWARDS[1:])],
    ids=["eager", "hooks", "graph"],
)
@on_ranks(2)
def test_gradients_and_the_mode_afterwards(rank: int, mode: str, forwards: tuple[str, ...]) -> None:
    for forward in forwards:
        torch._dynamo.reset()
        _assert_equals_plain(rank, mode, forward)


def _assert_equals_plain(rank: int, mode: str, forward: str) -> None:
    plain = Regions(forward)
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    run = in_mode(model, mode)
    x = torch.arange(6.0).view(2, 3) / 6 + rank
    # Frozen and in evaluations, too; compiled, for two of them, since regions differ little there.
    is_thorough = mode == "eager" or forward in ("unit first", "nested")
    for frozen in (False, True) if is_thorough else (False,):
        plain.requires_grad_(not frozen)
        model.requires_grad_(not frozen)
        outputs = []
        for call in (plain, run):
            outputs.append(call(x))
            assert torch.is_grad_enabled()
            if not frozen and outputs[-1].requires_grad:
                outputs[-1].square().sum().backward()
            if is_thorough:
                with torch.no_grad():
                    outputs.append(call(x))
                assert torch.is_grad_enabled()
        half = len(outputs) // 2
        torch.testing.assert_close(outputs[:half], outputs[half:], msg=forward)
    average_gradients(plain)
    assert different(whole_gradients(model), gradients(plain)) == [], forward
