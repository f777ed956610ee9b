"""Blocks that are compiled first and become units afterwards, as scripts for FSDP2 do it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, batch, loss_of, make_transformer, train
from pool import on_ranks
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, FSDPError, fully_shard
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


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_hooks_run_around_compiled_blocks(rank: int, way: str) -> None:
    """All blocks share the graph of a training step; a copy's evaluation has one more."""
    torch._dynamo.reset()
    plain, model = (make_transformer(num_blocks=NUM_BLOCKS) for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    WAYS[way](model.blocks, counter)
    sharded: Any = FSDP(model) if way == "wrapper" else fully_shard(model)
    losses, _ = train(sharded, rank, steps=3)
    assert losses == pytest.approx(
        train(DistributedDataParallel(plain), rank, steps=3)[0], rel=1e-5
    )
    if way == "compile()":
        loss, of_copy = (loss_of(net, batch(rank, 9)) for net in (sharded, copy.deepcopy(sharded)))
        torch.testing.assert_close(of_copy, loss)
    assert counter.frame_count <= 2


@on_ranks(2)
def test_units_inside_a_whole_graph_of_another_backend(rank: int) -> None:
    model = make_transformer(num_blocks=2)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    fully_shard(compiled, policy=ModuleWrapPolicy({Block}))
    with pytest.raises(FSDPError, match='expected backend="fsdp_dynamo"'):
        loss_of(compiled, batch(rank, 0))
