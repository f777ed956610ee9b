"""Activation checkpointing against FSDP2 on the same model: losses, all-gathers, peak memory."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import different, gradients, whole_gradients
from models import Transformer, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from test_checkpointing_around_units import save_products
from torch import nn
from torch.distributed._composable.fsdp import fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from benchmarks.measure.step_profile import StepProfiler
from fsdp_dynamo import FSDP, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

NUM_BLOCKS = 3


def _checkpointed(selective: bool) -> Transformer:
    model = make_transformer(num_blocks=NUM_BLOCKS, dim=64)
    for i, block in enumerate(model.blocks):
        arguments = {"context_fn": save_products} if selective else {}
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
    model: nn.Module, owner: nn.Module, rank: int, autocast: bool = False
) -> tuple[list[float], int, dict[str, int]]:
    """Losses of three steps, and of a fourth the peak bytes and the collectives."""

    def loss_at(step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return loss_of(model, _tokens(rank, step))

    optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_at(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad()
    profiler = StepProfiler(owner, optimizer)
    with profiler.recording() as profile:
        loss_at(3).backward()
        profiler.note_gradients()
        optimizer.step()
    return losses, sum(profile.peak_bytes.values()), profile.counts()


@pytest.mark.parametrize(
    ("mode", "selective", "autocast"),
    [
        ("eager", False, True),
        ("eager", True, False),
        ("hooks", False, False),
        ("graph", False, True),
    ],
)
@on_ranks(2)
def test_against_fsdp2(rank: int, mode: str, selective: bool, autocast: bool) -> None:
    """The same losses, no surplus all-gathers, and a peak at most 5 % higher, beside messages in
    which small parameters are packed: in graph mode those of a gather and of a reduction."""
    reference = _fsdp2(selective)
    losses, peak, counts = _steps(reference, reference, rank, autocast)
    wrapped = wrap(_checkpointed(selective))
    own_losses, own_peak, own_counts = _steps(in_mode(wrapped, mode), wrapped, rank, autocast)
    assert own_losses == pytest.approx(losses, rel=1e-2 if autocast else 1e-5)
    assert own_counts["all_gather"] <= min(counts["all_gather"], 2 * NUM_BLOCKS + 1)
    blocks = _checkpointed(selective).blocks
    message = max(sum(4 * param.numel() for param in block.parameters()) for block in blocks)
    num_messages = 2 if mode == "graph" else 1
    assert own_peak <= 1.05 * peak + num_messages * message


class _Segments(nn.Module):
    """Two segments of reentrant checkpointing, what is computed between, and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Linear(2, 2)
        self.is_on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(self.first, x)
        return self.last(self.part(self.second, x.relu()))

    @torch.compiler.disable  # traced, it would be a region of the graph, and not reentrant
    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=True) if self.is_on else layer(x)


class _AllInSegments(_Segments):
    """No parameter is used outside of the segments."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first, self.part(self.second, x).relu())


class _Branches(_Segments):
    """Two outputs; the gradient of the one outside of the segment comes first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first, x).relu() + self.join(self.part(self.second, x), self.last(x))

    def join(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sigmoid() * y.sigmoid()


def _set_checkpointing(model: nn.Module, is_on: bool) -> None:
    for module in model.modules():
        if isinstance(module, _Segments):
            module.is_on = is_on


_ORDER = [
    ("all_gather", "2"),
    ("all_gather", "1"),
    ("reduce_scatter", "2"),
    ("reduce_scatter", "1"),
    ("reduce_scatter", ""),
]


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        ("eager", list(itertools.product((_Segments, _AllInSegments, _Branches), (False, True)))),
        ("hooks", [(_Segments, False), (_Branches, True)]),
    ],
    ids=["eager", "hooks"],
)
@on_ranks(2)
def test_reentrant_segments_of_a_unit(
    rank: int, mode: str, cases: list[tuple[type[_Segments], bool]]
) -> None:
    """One reduction, one gather, also where checkpointing differs by step, or by rank."""
    for cls, apart in cases:
        _assert_segments_are_right(rank, cls, mode, [True, True, False, False, True], apart)
    if mode == "eager":  # it begins in a later step
        _assert_segments_are_right(rank, _Segments, mode, [False, True])


def _assert_segments_are_right(
    rank: int, cls: type[_Segments], mode: str, pattern: list[bool], apart: bool = False
) -> None:
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(6, 6), cls(), cls())
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({_Segments}))
    net = in_mode(model, mode)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    for is_on in pattern:
        _set_checkpointing(model, is_on != (apart and rank == 1))
        plain(x).sum().backward()
        with record_events() as log:
            net(x).sum().backward()
        keys = log.keys("all_gather", "reduce_scatter")
        assert [key[:2] for key in keys if key[2] == "backward"] == _ORDER
        assert different(whole_gradients(model), gradients(plain), rtol=1e-5) == []


class _Routed(nn.Module):
    """Uses one of its layers on rank 0, both on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.routed = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.routed(x) if dist.get_rank() else y


@on_ranks(2)
def test_ranks_that_use_other_layers_reduce_in_one_order(rank: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), _Routed(), _Routed(), _Routed())
    sharded = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({_Routed}))
    with record_events() as log:
        sharded(torch.ones(3, 6)).sum().backward()
    keys: list[Any] = [None, None]
    dist.all_gather_object(keys, log.keys("all_gather", "reduce_scatter"))
    assert keys[0] == keys[1]
