"""Stages and schedules of torch.distributed.pipelining with units inside, beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from fsdp_dynamo import FSDP, fully_shard, record_events

DIM, MICROBATCHES, BATCH = 6, 4, 8
SCHEDULES: dict[str, tuple[Any, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "GPipe": (ScheduleGPipe, ((0,), (1,))),
    "1F1B": (Schedule1F1B, ((0,), (1,))),
    "interleaved": (ScheduleInterleaved1F1B, ((0, 2), (1, 3))),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, ((0, 2), (1, 3))),
    "V-shaped zero bubble": (ScheduleZBVZeroBubble, ((0, 3), (1, 2))),
}
"""Schedules, and the stages of each of the two places in the pipeline."""


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


def _whole_backward() -> Callable[[], None]:
    """Nothing is left of a backward of weights: it has run with that of the inputs."""
    return lambda: None


def _run(rank: int, world_size: int, name: str, reshards: bool) -> tuple[list[str], Any, Any]:
    """What differs after two steps; reductions and gathers of the second, by stage and unit."""
    schedule_class, places = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    place, replica = mesh["stages"].get_local_rank(), mesh["shards"].get_local_rank()
    num_stages, layers = 2 * len(places[0]), _layers()
    size, stages, firsts = len(layers) // num_stages, [], []
    for index in places[place]:
        first = index * size
        module: Any = nn.Sequential(*layers[first : first + size])
        for layer in module:
            fully_shard(layer, mesh=mesh["shards"], reshard_after_forward=reshards)
        fully_shard(module, mesh=mesh["shards"], reshard_after_forward=reshards)
        device, group = torch.device("cpu"), mesh["stages"].get_group()
        whole = _whole_backward if "zero bubble" in name else None
        stage = PipelineStage(module, index, num_stages, device, group=group, dw_builder=whole)
        stages.append(stage)
        firsts.append(first)
    loss = nn.functional.mse_loss
    given = stages if len(stages) > 1 else stages[0]
    schedule = schedule_class(given, MICROBATCHES, loss_fn=loss)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    for step in range(2):
        x, y = _data(replica, step)
        with record_events() as log:
            inputs = [x] if 0 in places[place] else []
            targets = {"target": y} if num_stages - 1 in places[place] else {}
            schedule.step(*inputs, **targets)
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


def _run_split(
    rank: int, world_size: int, frozen: bool, backend: str | None = None
) -> tuple[str, list[float]]:
    """The cause of the error of a schedule that splits backwards, all stages on one rank; then
    how far gradients of inputs by torch.autograd.grad() are from the plain model's."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("stages", "shards"))
    group, layers, stages = mesh["stages"].get_group(), _layers()[:2], []
    plain = copy.deepcopy(layers[1])
    for index, layer in enumerate(layers):
        layer.requires_grad_(index == 0 or not frozen)
        fully_shard(layer, mesh=mesh["shards"])
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
        stages.append(PipelineStage(layer, index, 2, torch.device("cpu"), group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    x, y = _data(rank, 0)
    message = ""
    try:
        schedule.step(x, target=y)
    except RuntimeError as error:
        message = str(error.__cause__)
    for setting in ("is_last_backward", "requires_gradient_sync", "reshard_after_backward"):
        getattr(stages[1].submod, f"set_{setting}")(True)
    x.requires_grad_()
    wanted = torch.autograd.grad(plain(x).sum(), x)[0]
    return message, (torch.autograd.grad(stages[1].submod(x).sum(), x)[0] - wanted).tolist()


@pytest.mark.parametrize("backend", [None, "fsdp_dynamo_aot_eager", "fsdp_dynamo"])
def test_a_split_backward_is_refused(ranks: RankPool, backend: str | None) -> None:
    for message, difference in ranks.run(_run_split, 2, False, backend):
        assert "dw_builder" in message
        assert torch.tensor(difference).abs().max() < 1e-5


def test_a_split_backward_without_weights(ranks: RankPool) -> None:
    for message, _ in ranks.run(_run_split, 2, True):  # no weights, nothing to lose
        assert message == ""
