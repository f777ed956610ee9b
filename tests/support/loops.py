"""What the loops in tests/scripts share: a small classifier, its batches, gradients and errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Batch = tuple[torch.Tensor, torch.Tensor]


def make_classifier() -> nn.Sequential:
    """Two blocks and a head; the same weights on every rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(*dims), nn.Tanh()) for dims in ((6, 12), (12, 12))]
    return nn.Sequential(*blocks, nn.Linear(12, 3))


def shard(model: nn.Module, **kwargs: Any) -> FSDP:
    """One unit for every ``nn.Sequential``, and the root."""
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **kwargs)


def examples(rank: int, step: int = 0, size: int = 4) -> Batch:
    """This rank's batch of a step: inputs and classes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(3, (size,), generator=generator)


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy."""
    x, y = batch
    return F.cross_entropy(model(x).float(), y)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """The plainest loop there is; returns the losses."""
    losses = []
    for step in steps:
        loss = classification_loss(model, examples(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fit_squares(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: Sequence[int], seeds: Iterable[int]
) -> list[float]:
    """A step on a random input for each seed; returns the losses, means of squares."""
    losses = []
    for seed in seeds:
        x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def clip(model: Any, max_norm: float) -> float:
    """Clip by the norm over all ranks; returns it."""
    if hasattr(model, "clip_grad_norm_"):
        return float(model.clip_grad_norm_(max_norm))
    return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the gradients of a sharded model, whole, by name."""
    with FSDP.summon_full_params(model, with_grads=True):
        named = model.named_parameters()
        return {name: p.grad.clone() for name, p in named if p.grad is not None}


def whole(value: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a DTensor, any other tensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name; the full ones where they are DTensors, of whatever library."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def different(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], rtol: float = 1e-4
) -> list[str]:
    """Names that one of the two lacks, or whose values differ."""
    missing = sorted(got.keys() ^ expected.keys())
    both = [name for name in got if name in expected]
    return missing + [n for n in both if not torch.allclose(got[n], expected[n], rtol, 1e-6)]


def error_of(action: Callable[[], object]) -> str:
    """Class and message of what it raises; empty if it raises nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
