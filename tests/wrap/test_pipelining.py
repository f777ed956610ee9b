"""Stages and schedules of torch.distributed.pipelining with units inside, beside one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from fsdp_dynamo import FSDP, fully_shard, record_events

DIM, MICROBATCHES, BATCH = 6, 4, 8
SCHEDULES: dict[str, tuple[Any, int]] = {
    "GPipe": (ScheduleGPipe, 1),
    "1F1B": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
}


def _layers() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)) for _ in range(8)]


def _data(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    both = torch.randn(2, BATCH, DIM, generator=generator)
    return both[0], both[1]


def _expected(num_replicas: int) -> dict[str, torch.Tensor]:
    """Parameters after two steps of one process with all data."""
    model = nn.Sequential(*_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for replica in range(num_replicas):
            x, y = _data(replica, step)
            (nn.functional.mse_loss(model(x), y) / num_replicas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.named_parameters())


def _run(rank: int, world_size: int, name: str, reshards: bool) -> tuple[list[str], Any, Any]:
    """What differs after two steps; reductions and gathers of the second, by stage and unit."""
    schedule_class, stages_per_rank = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    place, replica = mesh["stages"].get_local_rank(), mesh["shards"].get_local_rank()
    num_stages, layers = 2 * stages_per_rank, _layers()
    size, stages, firsts = len(layers) // num_stages, [], []
    for index in range(place, num_stages, 2):
        first = index * size
        module: Any = nn.Sequential(*layers[first : first + size])
        for layer in module:
            fully_shard(layer, mesh=mesh["shards"], reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh["shards"], reshard_after_forward=reshards)
        device, group = torch.device("cpu"), mesh["stages"].get_group()
        stages.append(PipelineStage(module, index, num_stages, device, group=group))
        firsts.append(first)
    loss = nn.functional.mse_loss
    given = stages if stages_per_rank > 1 else stages[0]
    schedule = schedule_class(given, MICROBATCHES, loss_fn=loss)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(2):
        x, y = _data(replica, step)
        with record_events() as log:
            schedule.step(*([x] if place == 0 else []), **({"target": y} if place == 1 else {}))
        optimizer.step()
        optimizer.zero_grad()
    expected, wrong = _expected(2), []
    for stage, first in zip(stages, firsts, strict=True):
        with FSDP.summon_full_params(stage.submod):
            for key, param in stage.submod.named_parameters():
                number, _, rest = key.partition(".")
                key = f"{first + int(number)}.{rest}"
                if not torch.allclose(param, expected[key], rtol=1e-5, atol=1e-6):
                    wrong.append(key)
        assert isinstance(stage.submod, TorchFSDPModule)
    kinds = [event.kind for event in log]
    return wrong, kinds.count("reduce_scatter"), kinds.count("all_gather")


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_equals_one_process(ranks: RankPool, name: str) -> None:
    num_units = 4  # on each rank; the stages themselves hold no parameters of their own
    for reshards in (False, True):
        for wrong, reductions, gathers in ranks.run(_run, 4, name, reshards):
            assert wrong == []
            assert reductions == num_units
            assert reshards or gathers == num_units
