"""Blocks that are compiled first and become units afterwards, as scripts for FSDP2 do it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import error_of
from models import Block, batch, loss_of, make_transformer
from pool import RankPool
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

NUM_BLOCKS = 10  # more than Dynamo compiles of one frame


def _in_place(blocks: nn.ModuleList, backend: Any) -> None:
    for block in blocks:
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block)


def _replaced(blocks: nn.ModuleList, backend: Any) -> None:
    for name, block in blocks.named_children():
        blocks.register_module(name, torch.compile(block, backend=backend, fullgraph=True))
    for block in blocks:
        fully_shard(block)


def _wrapped(blocks: nn.ModuleList, backend: Any) -> None:
    for index, block in enumerate(blocks):
        blocks[index] = FSDP(torch.compile(block, backend=backend, fullgraph=True))


WAYS = {"compile()": _in_place, "torch.compile": _replaced, "wrapper": _wrapped}


def _run(rank: int, world_size: int, way: str) -> tuple[list[float], list[float], int, float]:
    """Losses, those of one process, graphs, and the loss of a copy that is not compiled."""
    torch._dynamo.reset()
    plain, model = (make_transformer(num_blocks=NUM_BLOCKS) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    WAYS[way](model.blocks, counter)
    sharded: Any = FSDP(model) if way == "wrapper" else fully_shard(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (sharded, plain)]
    got, expected = [], []
    for step in range(3):
        loss = loss_of(sharded, batch(rank, step))
        loss.backward()
        got.append(loss.item())
        losses = [loss_of(plain, batch(other, step)) for other in range(world_size)]
        (sum(losses) / world_size).backward()  # type: ignore[union-attr]
        expected.append(losses[rank].item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    last = loss_of(sharded, batch(rank, 9)).item()
    of_copy = loss_of(copy.deepcopy(sharded), batch(rank, 9)).item() if way == "compile()" else last
    return got, expected, counter.frame_count, of_copy - last


@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_around_compiled_blocks(ranks: RankPool, way: str) -> None:
    for got, expected, graphs, difference in ranks.run(_run, 2, way):
        assert got == pytest.approx(expected, rel=1e-5)
        assert graphs <= 2  # training, and the evaluation of a copy
        assert abs(difference) < 1e-5


def _whole_model(rank: int, world_size: int) -> str:
    model = make_transformer(num_blocks=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fully_shard(compiled, policy=ModuleWrapPolicy({Block}))
    return error_of(lambda: loss_of(compiled, batch(rank, 0)))


def test_units_inside_a_whole_graph_of_another_backend(ranks: RankPool) -> None:
    for text in ranks.run(_whole_model, 2):
        assert 'expected backend="fsdp_dynamo"' in text
