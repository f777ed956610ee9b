"""An architecture: a model of other people, its batch, its loss and the modules that are units."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Batch = dict[str, Any]
Generator = torch.Generator

SEED = 7
VOCABULARY = 64
LENGTH = 16
BATCH = 2
NOISE = 0.02

SETTINGS = {
    "defaults": "training mode, dropout and caches as the configuration has them",
    "checkpointing": "activation checkpointing by the model's own switch",
    "autocast": "forward and loss below `torch.autocast` to bfloat16",
    "frozen": "embeddings and the first half of the blocks frozen before wrapping",
    "sdpa": "`attn_implementation` of transformers",
    "eager": "the same",
    "flex": "the same",
    "inductor": "hooks mode with Inductor, graph mode with `fsdp_dynamo`",
}
"""What may be asked of an architecture beside the mode, and what it means."""

ATTENTIONS = {"sdpa": "sdpa", "eager": "eager", "flex": "flex_attention"}
COMMON_SETTINGS = ("defaults", "autocast", "frozen", "inductor")


@dataclass(frozen=True)
class Architecture:
    """A model that is trained as its authors wrote it.

    Attributes:
        name: unique; lower case.
        family: the file it comes from.
        build: makes the model; the caller has set the seed. The argument is the implementation
            of attention asked for, ``None`` for the model's own choice.
        batch: keyword arguments of the forward, from a generator.
        loss: scalar loss of an output.
        blocks: classes of which each instance becomes a unit, by name; with none the whole model
            is one unit.
        settings: those of ``SETTINGS`` that apply.
        checkpoint: turns on the model's own activation checkpointing.
        packages: what has to be installed beside torch.
        note: what explains a difference that is not this project's.
    """

    name: str
    family: str
    build: Callable[[str | None], nn.Module]
    batch: Callable[[Generator], Batch]
    loss: Callable[[Any], torch.Tensor]
    blocks: tuple[str, ...] = ()
    settings: tuple[str, ...] = COMMON_SETTINGS
    checkpoint: Callable[[nn.Module], None] | None = None
    packages: tuple[str, ...] = ()
    note: str = ""

    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]

    def model(self, setting: str) -> nn.Module:
        """The model in a setting, with the same weights at each call."""
        torch.manual_seed(SEED)
        model = self.build(ATTENTIONS.get(setting)).train()
        perturb(model)
        if setting == "checkpointing" and self.checkpoint is not None:
            self.checkpoint(model)
        if setting == "frozen":
            freeze(model, self.block_classes(model))
        return model

    def batch_of(self, rank: int, step: int) -> Batch:
        """The batch of one rank and step."""
        return self.batch(torch.Generator().manual_seed(SEED + 100_003 * rank + step))

    def block_classes(self, model: nn.Module) -> set[type[nn.Module]]:
        """The classes of units: those named that occur, and the model's ``_no_split_modules``."""
        names = set(self.blocks or getattr(model, "_no_split_modules", None) or ())
        return {type(m) for m in model.modules() if type(m).__name__ in names}


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Add a little noise to all parameters.

    Gates and tokens that start at zero would otherwise hide the gradients behind them, and the
    gradient of a layer norm at zero is so large that the next step has no meaning.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)


def freeze(model: nn.Module, classes: set[type[nn.Module]]) -> None:
    """Freeze embeddings and the first half of the blocks; without both, the first layer."""
    below = [module for module in model.modules() if module is not model]
    blocks = [m for m in below if type(m) in classes]
    first: list[nn.Module] = [m for m in below if isinstance(m, nn.Embedding)]
    if not first and len(blocks) < 2:
        first = [next(m for m in below if next(m.parameters(recurse=False), None) is not None)]
    for module in (*first, *blocks[: len(blocks) // 2]):
        module.requires_grad_(False)


def own_loss(output: Any) -> torch.Tensor:
    """The loss that the model has computed from labels."""
    loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output.loss
    return loss


def projection(output: Any) -> torch.Tensor:
    """A fixed linear function of all float tensors of an output, however nested.

    Linear, since the mean square of what ends in a normalisation hardly has a gradient.
    """
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            flat = leaf.flatten().float()
            wave = torch.cos(torch.arange(flat.numel(), dtype=torch.float32))
            total = total + flat @ wave / flat.numel() ** 0.5
    return total


def tokens(generator: Generator, *shape: int, least: int = 3, vocabulary: int = VOCABULARY) -> Any:
    """Random token numbers above those of padding, beginning and end."""
    return torch.randint(least, vocabulary, shape or (BATCH, LENGTH), generator=generator)


def image(generator: Generator, size: int = 32, channels: int = 3, batch: int = BATCH) -> Any:
    """A batch of random images."""
    return torch.rand(batch, channels, size, size, generator=generator)


def classes_of(generator: Generator, number: int, batch: int = BATCH) -> Any:
    """Random labels of a classification."""
    return torch.randint(0, number, (batch,), generator=generator)
