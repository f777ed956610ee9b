"""The loop of scripts for FSDP2: DTensors are clipped, saved and loaded as in its tutorial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from models import Transformer, batch, loss_of
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_dynamo

FullyShard = Callable[..., Any]


def _sharded(fully_shard: FullyShard, seed: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    model = Transformer(num_blocks=2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def _steps(model: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Losses and norms."""
    seen = []
    for step in steps:
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), norm.full_tensor().item()]
    return seen


def _whole_states(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    states = optimizer.state_dict()["state"]
    return {
        number: {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
        for number, state in states.items()
    }


def _load(model: Any, values: Any, states: Any) -> torch.optim.Optimizer:
    """Whole tensors, distributed as the parameters are, and assigned; then an optimizer of them."""
    own = model.state_dict()
    sharded = {
        name: nn.Parameter(distribute_tensor(whole, own[name].device_mesh, own[name].placements))
        for name, whole in values.items()
    }
    model.load_state_dict(sharded, assign=True)
    optimizer = torch.optim.SGD(_groups(model), lr=0.1, momentum=0.9)
    groups = optimizer.state_dict()["param_groups"]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    placed = {
        number: {
            name: distribute_tensor(value, params[number].device_mesh, params[number].placements)
            if value.dim()
            else value
            for name, value in state.items()
        }
        for number, state in states.items()
    }
    optimizer.load_state_dict({"state": placed, "param_groups": groups})
    return optimizer


def _run(fully_shard: FullyShard, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _sharded(fully_shard, seed=7)
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.placements == (Shard(0),)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
    optimizer = torch.optim.SGD(_groups(model), lr=0.1, momentum=0.9)
    seen = _steps(model, optimizer, rank, range(2))
    values = {name: value.full_tensor() for name, value in model.state_dict().items()}
    states = _whole_states(optimizer)

    model = _sharded(fully_shard, seed=8)
    optimizer = _load(model, values, states)
    seen += _steps(model, optimizer, rank, range(2, 4))
    return seen, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


@on_ranks(3)
def test_as_fsdp2(rank: int) -> None:
    expected, theirs = _run(upstream.fully_shard, rank)
    got, ours = _run(fsdp_dynamo.fully_shard, rank)
    assert got == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
