"""Interface of peers: the setting that they get, the trainee that they return."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from benchmarks.workloads.catalogue import Batch, Workload

LEARNING_RATE = 3e-4


@dataclass(frozen=True)
class Setting:
    """Setting that all peers of a run share.

    Attributes:
        workload: the task.
        device: where the model trains; each rank has one.
        param_dtype: data type of compute and of all-gathers; ``None`` for the model's own.
        wrap: one unit per block (``workload.block_classes``); otherwise the model is one unit.
        checkpoint: recompute blocks' activations in backward.
    """

    workload: Workload
    device: torch.device
    param_dtype: torch.dtype | None = None
    wrap: bool = True
    checkpoint: bool = False

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that become units of their own; none if the model is one unit."""
        if not self.wrap:
            return []
        return [m for m in model.modules() if isinstance(m, self.workload.block_classes)]

    def model(self) -> nn.Module:
        """A fresh model on the device, the same for every peer."""
        with self.device:
            model = self.workload.seeded_model()
        if self.checkpoint:
            checkpoint_blocks(model, self.workload.block_classes)
        return model


def checkpoint_blocks(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Wrap every instance of the classes in (non-reentrant) activation checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        apply_activation_checkpointing,
    )

    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, classes))


class Trainee:
    """A model under one peer, with its optimizer.

    A step is ``forward``, ``backward``, ``update``, which can be timed one by one.
    """

    def __init__(self, model: nn.Module, workload: Workload) -> None:
        self.model = model
        self.workload = workload
        self.optimizer = self.make_optimizer(model)

    @staticmethod
    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that every peer gets."""
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def train_step(self, batch: Batch) -> None:
        """Run one whole step."""
        self.backward(self.forward(batch))
        self.update()

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss of one batch."""
        return self.workload.loss(self.model, batch)

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients, reduced over the ranks."""
        loss.backward()

    def update(self) -> None:
        """Optimizer step; gradients are dropped."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Peer:
    """One row of a comparison.

    Attributes:
        key: name on command lines.
        title: name in tables.
        train: makes the trainee.
        why_not: reason why it cannot run in a setting, or ``None``.
        communicates: ``False`` for the compute floor.
        ours: whether it is one of this project's modes.
    """

    key: str
    title: str
    train: Callable[[Setting], Trainee]
    why_not: Callable[[Setting], str | None] = lambda _: None
    communicates: bool = True
    ours: bool = False


def wrapped(wrap: Callable[[nn.Module, Setting], nn.Module]) -> Callable[[Setting], Trainee]:
    """Trainee of a peer that is a function from model to model."""
    return lambda setting: Trainee(wrap(setting.model(), setting), setting.workload)


def missing_package(name: str, advice: str) -> Callable[[Setting], str | None]:
    """``why_not`` of a peer that needs a package."""

    def why_not(_: Setting) -> str | None:
        if importlib.util.find_spec(name) is None:
            return f"package '{name}' is not installed: {advice}"
        return None

    return why_not


def keyed(family: str, backend: str | None) -> str:
    """Key of a family's peer with a backend; eager peers have the family's own."""
    return family if backend is None else f"{family}_{backend}"


def titled(name: str, what: str, backend: str | None) -> str:
    """Title of a peer that may be compiled; ``what`` says what is compiled."""
    return name if backend is None else f"{name}, {what} ({backend})"


def compiled(
    model: nn.Module,
    backend: str | None,
    fullgraph: bool = False,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """The model compiled as a whole, or itself where there is no backend."""
    if backend is None:
        return model
    made = torch.compile(model, backend=backend, fullgraph=fullgraph, options=options or None)
    return cast(nn.Module, made)


def compile_each(blocks: list[nn.Module], backend: str) -> None:
    """Compile blocks in place, as torch's own recipes do."""
    for block in blocks:
        block.compile(backend=backend)
