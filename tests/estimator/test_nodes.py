"""The estimator's ``HIERARCHICAL_SHARD``: bytes by hand, memory as in docs and as in a real run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, CollectivePrecision, ShardingStrategy, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.estimator import Cluster, ElementSizes, Prediction, predict, take_inventory
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FULL, HIERARCHICAL = ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD
NODES, PER_NODE, BLOCKS, DIM = 2, 2, 4, 64
WORLD = NODES * PER_NODE
NUMEL = (BLOCKS + 1) * DIM * DIM
"""No unit has padding on four ranks."""
FP32 = ElementSizes(param_bytes=4, reduce_bytes=4, master_bytes=4, optimizer_bytes=8)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIM, DIM)
        self.layers = nn.ModuleList(_Layer() for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x.tanh()


def _build() -> tuple[nn.Module, Mapping[str, Any]]:
    return _Stack(), {"tokens": torch.zeros(2, 8, dtype=torch.int64)}


def _predicted(
    strategy: ShardingStrategy, sizes: ElementSizes = FP32, nodes: int = NODES
) -> Prediction:
    cluster = Cluster(nodes * PER_NODE, PER_NODE, 1e5, math.inf, 100.0, 1000.0, 0.0, 10**9)
    return predict(take_inventory(_build, [], torch.float32), cluster, strategy, sizes)


def test_bytes_of_a_step() -> None:
    """Between nodes: half of each secondary shard, and half of each node's mean. Inside: halves of
    whole flat parameters, of all in the forward, of the blocks again, of all gradients."""
    found, full = _predicted(HIERARCHICAL), _predicted(FULL)
    blocks = BLOCKS * DIM * DIM
    between = 2 * NUMEL * 4 // PER_NODE // NODES
    inside = (2 * NUMEL + blocks) * 4 // PER_NODE
    assert (found.between_bytes, found.wire_bytes) == (between, between + inside)
    sent = (2 * NUMEL + blocks) * 4 * 3 // 4  # one of three messages goes to the other node
    assert (full.between_bytes, full.wire_bytes) == (sent // 3, sent)
    hybrid = _predicted(ShardingStrategy.HYBRID_SHARD)
    assert hybrid.between_bytes == found.between_bytes


def test_replicas_on_all_ranks() -> None:
    """Of an all-reduce over all ranks, a ring passes each part between nodes once and back."""
    found = _predicted(ShardingStrategy.NO_SHARD)
    assert found.wire_bytes == 2 * NUMEL * 4 * (WORLD - 1) // WORLD
    assert found.between_bytes == 2 * NUMEL * 4 * (NODES - 1) // WORLD


@pytest.mark.parametrize("strategy", [FULL, ShardingStrategy.NO_SHARD])
def test_formats_that_are_refused_count_for_nothing(strategy: ShardingStrategy) -> None:
    precision = CollectivePrecision(reduce_scatter="int8", all_reduce="int8")
    sizes = replace(FP32, precision=precision)
    assert _predicted(strategy, sizes) == _predicted(strategy)
    assert _predicted(strategy, sizes, nodes=1) != _predicted(strategy, nodes=1)


def test_formats_are_those_between_nodes() -> None:
    sizes = replace(FP32, precision=CollectivePrecision("bfloat16", "bfloat16"))
    plain, found = _predicted(HIERARCHICAL), _predicted(HIERARCHICAL, sizes)
    assert found.between_bytes == plain.between_bytes // 2
    assert plain.wire_bytes - found.wire_bytes == plain.between_bytes // 2


def test_one_node_is_full_shard() -> None:
    found, full = _predicted(HIERARCHICAL, nodes=1), _predicted(FULL, nodes=1)
    assert replace(found, strategy=FULL) == full
    assert full.between_bytes == 0


def test_slow_links_pay() -> None:
    """Where the link between nodes is the limit, fewer bytes on it are less time."""
    found, full = _predicted(HIERARCHICAL), _predicted(FULL)
    assert found.step_ms < full.step_ms
    assert found.bound_ms <= found.step_ms


@on_ranks(WORLD)
def test_memory_is_that_of_a_real_step(rank: int) -> None:
    """The formula of docs/fewer-bytes.md, what is predicted, and bytes of tensors are equal."""
    memory, full = _predicted(HIERARCHICAL).memory, _predicted(FULL).memory
    shards, secondary = NUMEL // WORLD, NUMEL // PER_NODE
    unsharded = 3 * DIM * DIM  # the root and two units
    assert memory["shards"] == full["shards"] == 4 * shards
    assert memory["optimizer"] == 8 * shards
    assert memory["unsharded"] == 4 * (unsharded + secondary)
    assert memory["gradients"] == full["gradients"]

    model = FSDP(
        _Stack(),
        sharding_strategy=HIERARCHICAL,
        device_mesh=init_device_mesh("cpu", (NODES, PER_NODE)),
        auto_wrap_policy=ModuleWrapPolicy({_Layer}),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]
    with record_events() as log:
        loss = model(torch.randint(DIM, (2, 8))).sum()
        kept = [f.kept_shard.tensor.untyped_storage().nbytes() for f in flats if f.kept_shard]
        loss.backward()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    assert sum(flat.sharded.untyped_storage().nbytes() for flat in flats) == memory["shards"]
    assert sum(local_of(state).nbytes for state in states) == memory["optimizer"]
    assert sum(kept) == 4 * secondary
    assert log.peak_unsharded_bytes() + sum(kept) == memory["unsharded"]
    assert not any(flat.kept_shard for flat in flats)
