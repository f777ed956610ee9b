"""Libraries whose FSDP1 code runs with ``torch.distributed.fsdp`` replaced by ``fsdp_dynamo``.

Both import it where they use it, so the replacement holds while ``_swapped()`` is open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DistributedType,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import FSDPStrategy
from loops import classification_loss, clip, examples, make_classifier
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_dynamo

_UPSTREAM = "torch.distributed.fsdp"
_NAMES = ("api", "fully_sharded_data_parallel", "sharded_grad_scaler", "wrap")
MAX_NORM = 0.3

Losses = list[float]


@contextmanager
def _swapped() -> Iterator[None]:
    """Let imports of upstream's package give this one: what is missing is an ImportError."""
    modules = {f"{_UPSTREAM}.{name}": import_module(f"fsdp_dynamo.{name}") for name in _NAMES}
    with (
        mock.patch.dict(sys.modules, {_UPSTREAM: fsdp_dynamo, **modules}),
        mock.patch.object(dist, "fsdp", fsdp_dynamo),
    ):
        yield


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def with_ddp(rank: int) -> Losses:
    """Six batches, two a step, clipped."""
    model = DistributedDataParallel(make_classifier())
    optimizer, losses = _sgd(model), []
    for step in range(6):
        with nullcontext() if step % 2 else model.no_sync():
            loss = classification_loss(model, examples(rank, step))
            (loss / 2).backward()
        losses.append(loss.item())
        if step % 2:
            clip(model, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# -- lightning's Fabric ----------------------------------------------------------------------------


class _OnCPU(FSDPStrategy):  # type: ignore[misc]
    """Lightning's own; only the device is another one."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")


def with_fabric(rank: int, folder: str, form: str, options: dict[str, Any]) -> Losses:
    """The same batches; the last two after everything was saved and loaded into a new model."""
    with _swapped(), mock.patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        strategy = _OnCPU(
            auto_wrap_policy={nn.Sequential, nn.Linear},
            cluster_environment=LightningEnvironment(),
            process_group_backend="gloo",
            state_dict_type=form,
            **options,
        )
        fabric = Fabric(
            accelerator=CPUAccelerator(), devices=dist.get_world_size(), strategy=strategy
        )
        fabric.launch()
        model, optimizer = _set_up(fabric)
        losses = _trained(fabric, model, optimizer, rank, range(4))
        fabric.save(f"{folder}/{form}", {"model": model, "optimizer": optimizer, "step": 4})
        model, optimizer = _set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        fabric.load(f"{folder}/{form}", state)
        assert state["step"] == 4
        return losses + _trained(fabric, model, optimizer, rank, range(4, 6))


def _set_up(fabric: Any) -> tuple[Any, Any]:
    model = fabric.setup_module(make_classifier())
    assert isinstance(model._forward_module, fsdp_dynamo.FSDP)
    return model, fabric.setup_optimizers(_sgd(model))


def _trained(fabric: Any, model: Any, optimizer: Any, rank: int, steps: range) -> Losses:
    losses = []
    for step in steps:
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = classification_loss(model, examples(rank, step))
            fabric.backward(loss / 2)
        losses.append(loss.item())
        if step % 2:
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# -- accelerate ------------------------------------------------------------------------------------


def with_accelerate(rank: int, folder: str, form: str, options: dict[str, Any]) -> Losses:
    """The same with an Accelerator, its plugin for FSDP1, and its functions for checkpoints."""
    environment = {"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": str(rank), "RANK": str(rank)}
    try:
        with _swapped(), mock.patch.dict(os.environ, environment):
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=1,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Linear"],
                state_dict_type=form,
                **options,
            )
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            # It asks for a device other than the CPU before it lets FSDP be used.
            for state in (AcceleratorState, PartialState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            accelerator.state.fsdp_plugin = plugin
            model = accelerator.prepare(make_classifier())
            optimizer = accelerator.prepare(_sgd(model))
            assert isinstance(model, fsdp_dynamo.FSDP)
            losses = _accelerated(accelerator, model, optimizer, rank, range(4))
            save_fsdp_model(plugin, accelerator, model, folder)
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
            _accelerated(accelerator, model, optimizer, rank, range(2))  # to be undone
            load_fsdp_model(plugin, accelerator, model, folder)
            load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
            return losses + _accelerated(accelerator, model, optimizer, rank, range(4, 6))
    finally:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()


def _accelerated(
    accelerator: Accelerator, model: Any, optimizer: Any, rank: int, steps: range
) -> Losses:
    losses = []
    for step in steps:
        with accelerator.accumulate(model):
            loss = classification_loss(model, examples(rank, step))
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return losses
