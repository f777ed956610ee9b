"""Parameters that no loss touched keep a gradient of None, as under DDP, and do not move."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from loops import whole, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.streams.program import HostWait
from benchmarks.streams.recording import record_program
from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard
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


STEPS = [(0, False), (1, True), (0, False)]
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


@pytest.mark.parametrize(
    ("mode", "strategy", "accumulates", "regions"),
    [
        ("eager", "FULL_SHARD", True, False),
        ("eager", "NO_SHARD", False, False),
        ("eager", "HYBRID_SHARD", True, False),
        ("hooks", "FULL_SHARD", True, False),
        ("graph", "FULL_SHARD", True, True),
    ],
)
@on_ranks(2)
def test_as_under_ddp(
    rank: int, mode: str, strategy: str, accumulates: bool, regions: bool
) -> None:
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
    without, losses = _train(model, in_mode(model, mode, **options), rank, accumulates)
    held = {fqn for fqn, param in model.named_parameters() if param.to_local().numel()}
    expected, expected_losses = _train(reference, reference, rank, accumulates)
    assert any(expected)
    # A rank that holds nothing of a parameter has no say.
    assert [names & held for names in without] == [names & held for names in expected]
    assert losses == pytest.approx(expected_losses, rel=1e-5)


def _sharded_model() -> Any:
    torch.manual_seed(0)
    model = _Model()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_zeros", [False, True])
@on_ranks(2)
def test_the_host_waits_once_or_never(rank: int, mode: str, has_zeros: bool) -> None:
    """For all units at the end of a backward, to learn whether a rank had a gradient."""
    model = _sharded_model()
    model.set_reduce_scatter_unused_params(has_zeros)
    model.choose(0, uses_gate=rank == 1)
    run = in_mode(model, mode)
    run(torch.ones(4, WIDTH)).backward()
    model.zero_grad()
    with record_program() as recorder:
        run(torch.ones(4, WIDTH)).backward()
    stops = [step.name for step in recorder.program if isinstance(step, HostWait)]
    assert stops == ([] if has_zeros else ["tolist"])
    grads = whole_gradients(model)
    idle = {n for n, _ in model.named_parameters() if "never" in n or "experts.1" in n}
    assert grads["gate"].any()
    assert idle & grads.keys() == (idle if has_zeros else set())
    assert not any(grads[name].any() for name in idle & grads.keys())


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_whole_gradients_and_hooks(rank: int, mode: str) -> None:
    """Neither sees a parameter that is not used; of one that is, zeros are a gradient."""
    torch.manual_seed(0)
    model = FSDP(_Model(), auto_wrap_policy=ModuleWrapPolicy({_Block}))
    run = in_mode(model, mode)
    names = {name for name, _ in model.named_parameters()}
    calls: set[str] = set()
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: calls.add(name))
    for uses_gate in (False, True):
        model.zero_grad()
        calls.clear()
        model.module.choose(0, uses_gate)
        if uses_gate:
            with torch.no_grad():
                for param in model.module.head.parameters():
                    param.zero_()
        run(torch.randn(4, WIDTH)).backward()
        idle = {n for n in names if "never" in n or "experts.1" in n}
        used = names - idle - (set() if uses_gate else {"gate"})
        grads = whole_gradients(model)
        assert grads.keys() == used
        assert calls
        assert calls <= used
        assert model.clip_grad_norm_(1.0).isfinite()
    assert not grads["gate"].any()


@on_ranks(2)
def test_hooks_run_in_one_order_on_all_ranks(rank: int) -> None:
    """They may call collectives: also for a parameter that only one rank has used."""
    model = _sharded_model()
    model.choose(0, uses_gate=rank == 1)
    norms: dict[str, float] = {}

    def add(name: str, param: torch.Tensor) -> None:
        assert param.grad is not None
        norms[name] = float(whole(param.grad).norm())

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(add, name))
    model(torch.ones(4, WIDTH)).backward()
    grads = whole_gradients(model)
    assert norms == pytest.approx({name: float(grad.norm()) for name, grad in grads.items()})
    assert norms["gate"]


@on_ranks(2)
def test_a_backward_that_sums_before_the_last_is_decided(rank: int) -> None:
    """What another rank has used joins the sum that a later backward has begun."""
    model = _sharded_model()
    found = []
    for is_last in (True, False):
        model.zero_grad()
        model.choose(0, uses_gate=rank == 1)
        model.set_is_last_backward(is_last)
        model(torch.ones(4, WIDTH)).backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(False)
        model(torch.ones(4, WIDTH)).backward()
        model.set_requires_gradient_sync(True)
        model(torch.ones(4, WIDTH)).backward()
        found.append(whole_gradients(model))
    torch.testing.assert_close(found[1], found[0])
    assert found[0]["gate"].any()
