"""Parameters that no loss touched keep a gradient of None, as under DDP, and do not move."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from modes import INDUCTOR_MODES, MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, ShardingStrategy
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

WIDTH = 8


class _Block(nn.Module):
    """A layer with one expert of two in use, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.never = nn.Parameter(torch.ones(3, WIDTH))
        self.chosen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.relu(self.experts[self.chosen](x))
        return out


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)
        self.gate = nn.Parameter(torch.full((5,), 0.5))
        self.uses_gate = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return (x * self.gate.sum() if self.uses_gate else x).square().sum()

    def choose(self, expert: int, uses_gate: bool) -> None:
        for block in self.blocks:
            block.chosen = expert
        self.uses_gate = uses_gate


STEPS = [(0, False), (0, True), (1, True), (1, False)]
"""The expert in use, and whether the second rank uses the gate; the first one never does."""


def _train(
    model: Any, compiled: Any, rank: int, accumulates: bool
) -> tuple[list[set[str]], list[float]]:
    """By step, names of the parameters without a gradient; and losses."""
    plain = model.module
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    without, losses = [], []
    for step, (expert, uses_gate) in enumerate(STEPS):
        optimizer.zero_grad()
        plain.choose(expert, uses_gate and rank == 1)
        torch.manual_seed(10 * step + rank)
        if accumulates:
            with model.no_sync():
                compiled(torch.randn(4, WIDTH)).backward()
        loss = compiled(torch.randn(4, WIDTH))
        loss.backward()
        without.append({n for n, p in plain.named_parameters() if p.grad is None})
        optimizer.step()
        losses.append(loss.item())
    return without, losses


def _compare(
    rank: int, world_size: int, mode: str, strategy: str, accumulates: bool, regions: bool
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = _Model()
    reference = DistributedDataParallel(copy.deepcopy(plain), find_unused_parameters=True)
    model = FSDP(
        plain,
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=init_device_mesh("cpu", (2, 1)) if strategy.startswith("HYBRID") else None,
    )
    options = {"regions": True} if regions else {}
    got = _train(model, in_mode(model, mode, **options), rank, accumulates)
    held = {fqn for fqn, param in model.named_parameters() if param.to_local().numel()}
    expected = _train(reference, reference, rank, accumulates)
    # A rank that holds nothing of a parameter has no say.
    seen = [[names & held for names in one[0]] for one in (expected, got)]
    return (seen[0], expected[1]), (seen[1], got[1])


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulates", "regions"),
    [
        *((mode, "FULL_SHARD", accumulates, False) for mode in MODES for accumulates in (0, 1)),
        *((mode, "NO_SHARD", False, False) for mode in MODES),
        ("eager", "HYBRID_SHARD", True, False),
        ("graph", "FULL_SHARD", True, True),
        *(
            pytest.param(mode, "FULL_SHARD", True, mode.startswith("graph"), marks=pytest.mark.slow)
            for mode in INDUCTOR_MODES
        ),
    ],
)
def test_as_under_ddp(
    ranks: RankPool, mode: str, strategy: str, accumulates: bool, regions: bool
) -> None:
    for expected, got in ranks.run(_compare, 2, mode, strategy, accumulates, regions):
        assert got[0] == expected[0]
        assert any(expected[0])
        assert got[1] == pytest.approx(expected[1], rel=1e-5)


def _whole(rank: int, world_size: int, mode: str) -> dict[str, bool]:
    torch.manual_seed(0)
    model = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    calls: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    in_mode(model, mode)(torch.randn(4, WIDTH)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        without = {name for name, p in model.named_parameters() if p.grad is None}
    return {
        "whole": without == {n for n, _ in model.named_parameters() if _is_idle(n)},
        "hooks": not any(map(_is_idle, calls)) and bool(calls),
        "norm": bool(model.clip_grad_norm_(1.0).isfinite()),
    }


def _is_idle(name: str) -> bool:
    return "never" in name or "experts.1" in name or name == "gate"


@pytest.mark.parametrize("mode", MODES)
def test_whole_gradients_and_hooks(ranks: RankPool, mode: str) -> None:
    for found in ranks.run(_whole, 2, mode):
        assert [what for what, holds in found.items() if not holds] == []


def _zeros(rank: int, world_size: int, mode: str) -> bool:
    """A gradient that is zero everywhere is a gradient."""
    model = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    model.module.choose(0, uses_gate=True)
    with torch.no_grad():
        for param in model.module.head.parameters():
            param.zero_()
    in_mode(model, mode)(torch.zeros(4, WIDTH)).backward()
    grad = model.module.gate.grad
    assert grad is not None
    return bool(grad.abs().sum() == 0)


@pytest.mark.parametrize("mode", MODES)
def test_zeros_are_a_gradient(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_zeros, 2, mode) == [True, True]
