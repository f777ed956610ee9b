"""Three steps of a model: its losses, gradients and buffers, by plain names."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure.models.cell import Cell
from benchmarks.workloads.architectures.base import Architecture
from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STEPS = 3
LEARNING_RATE = 0.003
PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.")

Gradients = dict[str, Tensor | None]


@dataclass
class Trace:
    """What one training gave on this rank.

    Attributes:
        losses: by step.
        gradients: of all parameters, whole, by step; of the first and the last.
        buffers: after the last step.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[int, Gradients] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def plain_name(name: str) -> str:
    """A name in the plain model, without what wrappers and compilers add."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def reference(architecture: Architecture, cell: Cell, rank: int) -> Trace:
    """DDP in eager mode, or around the compiled plain model.

    Buffers are each rank's own, as they are with shards: DDP would broadcast them.
    """
    plain = architecture.model(cell.setting)
    if cell.mode == "plain_blocks":
        classes = architecture.block_classes(plain)
        for block in [module for module in plain.modules() if type(module) in classes]:
            block.compile(backend=cell.backend)
    elif cell.backend is not None:
        plain = torch.compile(plain, backend=cell.backend, fullgraph=cell.is_whole)  # type: ignore[assignment]
    ddp = DistributedDataParallel(plain, find_unused_parameters=True, broadcast_buffers=False)
    return _train(ddp, ddp.module, nullcontext, architecture, cell, rank)


def sharded(architecture: Architecture, cell: Cell, rank: int) -> Trace:
    """This library in the mode of a cell."""
    plain = architecture.model(cell.setting)
    classes = architecture.block_classes(plain)
    policy = ModuleWrapPolicy(classes) if classes else None
    model = FSDP(plain, auto_wrap_policy=policy)
    step: nn.Module = model
    if cell.backend is not None:
        step = torch.compile(model, backend=cell.backend, fullgraph=cell.is_whole)  # type: ignore[assignment]

    def whole() -> AbstractContextManager[None]:
        return FSDP.summon_full_params(model, writeback=False, with_grads=True)

    return _train(step, model, whole, architecture, cell, rank)


def _train(
    step: nn.Module,
    model: nn.Module,
    whole: Callable[[], AbstractContextManager[None]],
    architecture: Architecture,
    cell: Cell,
    rank: int,
) -> Trace:
    """Train; ``whole`` makes the gradients of ``model`` whole."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    trace = Trace()
    for index in range(STEPS):
        _seed(index)
        with _autocast(cell.setting):
            loss = architecture.loss(step(**architecture.batch_of(rank, index)))
        optimizer.zero_grad()
        loss.backward()
        if index in (0, STEPS - 1):
            with whole():
                trace.gradients[index] = _copied_gradients(model)
        optimizer.step()
        trace.losses.append(loss.item())
    trace.buffers = {plain_name(name): b.clone() for name, b in model.named_buffers()}
    return trace


def _copied_gradients(model: nn.Module) -> Gradients:
    return {
        plain_name(name): None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
    }


def _seed(step: int) -> None:
    """Seed all generators alike on all ranks: some models drop whole layers at random."""
    torch.manual_seed(step)
    random.seed(step)
    numpy.random.seed(step)


def _autocast(setting: str) -> AbstractContextManager[Any]:
    if setting != "autocast":
        return nullcontext()
    return torch.autocast("cpu", torch.bfloat16)


def agreed(failure: str) -> bool:
    """Whether no rank has a failure; every rank must call it."""
    found: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(found, failure)
    return not any(found)
