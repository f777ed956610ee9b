"""Stages and schedules of torch.distributed.pipelining with units inside, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loops import different
from models import average_gradients
from pool import on_ranks
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


def _whole_backward() -> Callable[[], None]:
    """Nothing is left of a backward of weights: it has run with that of the inputs."""
    return lambda: None


@pytest.mark.parametrize(
    ("name", "reshards"),
    [
        ("GPipe", True),
        ("1F1B", False),
        ("interleaved", True),
        ("interleaved zero bubble", False),
        ("V-shaped zero bubble", True),
    ],
)
@on_ranks(4)
def test_equals_one_process(rank: int, name: str, reshards: bool) -> None:
    """After two steps; every unit is reduced once, and gathered once where it stays unsharded."""
    schedule_class, places = SCHEDULES[name]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))
    shards, group = mesh["shards"], mesh["stages"].get_group()
    own_stages, replica = places[mesh["stages"].get_local_rank()], shards.get_local_rank()
    plain, layers = nn.Sequential(*_layers()), _layers()
    num_stages = 2 * len(own_stages)
    size = len(layers) // num_stages
    whole = _whole_backward if "zero bubble" in name else None
    stages = []
    for index in own_stages:
        module: Any = nn.Sequential(*layers[index * size : (index + 1) * size])
        for layer in module:
            fully_shard(layer, mesh=shards, reshard_after_forward=reshards)
        fully_shard(module, mesh=shards, reshard_after_forward=reshards)
        assert isinstance(module, TorchFSDPModule)
        device = torch.device("cpu")
        stages.append(
            PipelineStage(module, index, num_stages, device, group=group, dw_builder=whole)
        )
    loss_fn = nn.functional.mse_loss
    given = stages if len(stages) > 1 else stages[0]
    schedule = schedule_class(given, MICROBATCHES, loss_fn=loss_fn)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (params, plain.parameters())]
    for step in range(2):
        x, y = _data(replica, step)
        with record_events() as log:
            inputs = [x] if 0 in own_stages else []
            targets = {"target": y} if num_stages - 1 in own_stages else {}
            schedule.step(*inputs, **targets)
        loss_fn(plain(x), y).backward()
        average_gradients(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    num_units = 4  # on each rank; the stages themselves hold no parameters of their own
    assert len(log.keys("reduce_scatter")) == num_units
    assert reshards or len(log.keys("all_gather")) == num_units
    for index, stage in zip(own_stages, stages, strict=True):
        with FSDP.summon_full_params(stage.submod):
            values = {name: p.clone() for name, p in stage.submod.named_parameters()}
        part = plain[index * size : (index + 1) * size]
        expected = {
            f"{i}.{n}": p for i, layer in enumerate(part) for n, p in layer.named_parameters()
        }
        assert different(values, expected, rtol=1e-5) == []


def _split(rank: int, frozen: bool, backend: str | None = None) -> tuple[Any, PipelineStage]:
    """A step of a schedule that splits backwards, all stages on one rank, and its last stage."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("stages", "shards"))
    group, stages = mesh["stages"].get_group(), []
    for index, layer in enumerate(_layers()[:2]):
        layer.requires_grad_(index == 0 or not frozen)
        fully_shard(layer, mesh=mesh["shards"])
        if backend is not None:
            layer.compile(backend=backend, fullgraph=True)
        stages.append(PipelineStage(layer, index, 2, torch.device("cpu"), group=group))
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=nn.functional.mse_loss)
    x, y = _data(rank, 0)
    return partial(schedule.step, x, target=y), stages[1]


@pytest.mark.parametrize("backend", [None, "fsdp_dynamo_aot_eager"])
@on_ranks(2)
def test_a_split_backward_is_refused(rank: int, backend: str | None) -> None:
    """Gradients of inputs by ``torch.autograd.grad()`` are right afterwards."""
    step, last = _split(rank, frozen=False, backend=backend)
    with pytest.raises(RuntimeError) as error:
        step()
    assert "dw_builder" in str(error.value.__cause__)
    for setting in ("is_last_backward", "requires_gradient_sync", "reshard_after_backward"):
        getattr(last.submod, f"set_{setting}")(True)
    x = _data(rank, 0)[0].requires_grad_()
    got, expected = (torch.autograd.grad(net(x).sum(), x) for net in (last.submod, _layers()[1]))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@on_ranks(2)
def test_a_split_backward_without_weights(rank: int) -> None:
    step, _ = _split(rank, frozen=True)
    step()
