"""One model in many shardings, for state dicts that go from one to another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import Block, batch, loss_of, wrap
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, CollectivePrecision, ShardingStrategy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def sharded(plain: nn.Module, how: str) -> nn.Module:
    """Units of other sizes, both front doors, all strategies, compiled."""
    if how == "plain":
        return plain
    if how == "one unit":
        return FSDP(plain)
    if how == "blocks":
        return wrap(plain)
    if how == "composable":
        return fully_shard(plain, policy=ModuleWrapPolicy({Block}))
    if how == "compiled":
        return torch.compile(wrap(plain), backend="fsdp_dynamo_aot_eager")
    if how == "around a compiled one":
        return FSDP(torch.compile(plain, backend="eager"))
    if how == "not sharded":
        return wrap(plain, sharding_strategy=ShardingStrategy.NO_SHARD)
    if how == "in int8":
        return wrap(plain, collective_precision=CollectivePrecision("int8", "int4"))
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    if how == "replicas":
        return wrap(plain, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    assert how == "hierarchy"
    hierarchy = ShardingStrategy.HIERARCHICAL_SHARD
    return wrap(plain, sharding_strategy=hierarchy, device_mesh=mesh)


def pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's groups of {0, 1} {2, 3}, a node or a replica, and of {0, 2} {1, 3}, across."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return mine[0], mine[1]


def fit_tokens(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range = range(1)
) -> list[float]:
    """Steps on this rank's batches; returns the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def unsharded(state: dict[str, Any]) -> dict[str, Any]:
    """With the full tensors of DTensors, which the caller's ranks gather."""
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}


def whole_run(
    model: nn.Module, optimizers: torch.optim.Optimizer | list[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Whole values and states of a model and its optimizers on every rank, by torch's function."""
    options = StateDictOptions(full_state_dict=True)
    values, optim = get_state_dict(model, optimizers, options=options)
    states = {
        f"{fqn}/{name}": torch.as_tensor(value)
        for fqn, state in optim["state"].items()
        for name, value in state.items()
    }
    return {**{name: value.detach() for name, value in values.items()}, **states}


def assert_same(got: Any, expected: Any) -> None:
    """Same keys, types and values, bit by bit."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
