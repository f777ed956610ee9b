"""Activation checkpointing against FSDP2 on the same model: losses, all-gathers, peak memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Transformer, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from ways import in_way

from benchmarks.step_profile import StepProfiler

NUM_BLOCKS = 4


def _save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Selective: matrix products are saved, everything else is computed again."""
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _context() -> Any:
    return create_selective_checkpoint_contexts(_save_products)


def _checkpointed(selective: bool) -> Transformer:
    model = make_transformer(num_blocks=NUM_BLOCKS, dim=64)
    for i, block in enumerate(model.blocks):
        arguments = {"context_fn": _context} if selective else {}
        model.blocks[i] = checkpoint_wrapper(block, **arguments)
    return model


def _fsdp2(selective: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    model = _checkpointed(selective)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tokens(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(31, (8, 64), generator=generator)


def _steps(
    model: nn.Module, owner: nn.Module, rank: int
) -> tuple[list[float], int, dict[str, int]]:
    """Losses of three steps, and of a fourth the peak bytes and the collectives."""
    optimizer = torch.optim.AdamW(owner.parameters(), lr=1e-3)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, _tokens(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    profiler = StepProfiler(owner, optimizer)
    with profiler.recording() as profile:
        loss_of(model, _tokens(rank, 3)).backward()
        profiler.note_gradients()
        optimizer.step()
    return losses, sum(profile.peak_bytes.values()), profile.counts()


def _compare(rank: int, world_size: int, way: str, selective: bool) -> Any:
    reference = _fsdp2(selective)
    expected = _steps(reference, reference, rank)
    wrapped = wrap(_checkpointed(selective))
    return expected, _steps(in_way(wrapped, way), wrapped, rank)


@pytest.mark.parametrize(
    ("way", "selective"),
    [("eager", False), ("eager", True), ("hooks", False), ("graph", False)],
)
def test_against_fsdp2(ranks: RankPool, way: str, selective: bool) -> None:
    """The same losses, no surplus all-gathers, and a peak at most 5 % higher."""
    for (losses, peak, counts), (got, own_peak, own) in ranks.run(_compare, 2, way, selective):
        assert got == pytest.approx(losses, rel=1e-5)
        assert own["all_gather"] <= counts["all_gather"]
        assert own["all_gather"] <= 2 * NUM_BLOCKS + 1
        assert own_peak <= 1.05 * peak
