"""The graph mode: one graph, marks, what is saved for the backward, no recompiles."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Block, batch, loss_of, make_transformer, nothing_cached, train, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import FSDP, ShardingStrategy
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.graph_mode import backends
from fsdp_dynamo.graph_mode.compile_cache import marks_key
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_utils import collectives, is_backward
from graph_passes.markers import UNIT, mark_of
from graph_passes.pipeline import Pipeline

BACKENDS = ["fsdp_dynamo_aot_eager", "fsdp_dynamo"]


def _inspect(rank: int, world_size: int, backend: str, strategy: ShardingStrategy) -> Any:
    """Marks of the final graphs, numels saved for the backward, graphs and recompiles."""
    seen: list[tuple[bool, list[tuple[str, str]], int]] = []
    run = Pipeline.run

    def watch(self: Pipeline, graph: torch.fx.Graph) -> None:
        run(self, graph)
        marks = [mark_of(node) for node in collectives(graph)]
        keys = [(m.kind, m.unit) if m else ("unmarked", "") for m in marks]
        inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        numels = [v.numel() for v in inputs if isinstance(v, torch.Tensor)]
        seen.append((is_backward(graph), keys, max(numels)))

    Pipeline.run = watch  # type: ignore[method-assign]
    counters.clear()
    try:
        with nothing_cached():
            wrapped = wrap(make_transformer(num_blocks=3, dim=32), sharding_strategy=strategy)
            model = torch.compile(wrapped, fullgraph=True, backend=backend)
            train(model, rank, steps=2)
            first = counters["stats"]["unique_graphs"]
            train(model, rank, steps=3)
    finally:
        Pipeline.run = run  # type: ignore[method-assign]
    block = next(u for u in wrapped._fsdp_root.units if u.fqn == "blocks.0")
    return seen, first, counters["stats"]["unique_graphs"], block.flats[0].layout.padded_numel


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs(ranks: RankPool, backend: str) -> None:
    blocks = [f"blocks.{i}" for i in range(3)]
    for seen, first, at_end, numel in ranks.run(_inspect, 2, backend, ShardingStrategy.FULL_SHARD):
        assert first == at_end == 1
        assert [backward for backward, _, _ in seen] == [False, True]
        (_, forward, _), (_, backward, largest) = seen
        assert forward == [("all_gather", unit) for unit in ["", *blocks]]
        gathers = [unit for kind, unit in backward if kind == "all_gather"]
        reduces = [unit for kind, unit in backward if kind == "reduce_scatter"]
        assert gathers == blocks[::-1]
        assert reduces == [*blocks[::-1], ""]
        assert largest < numel  # no unsharded flat parameter of a block is saved


def test_shard_grad_op_saves_instead(ranks: RankPool) -> None:
    for seen, _, _, numel in ranks.run(_inspect, 2, BACKENDS[0], ShardingStrategy.SHARD_GRAD_OP):
        (_, forward, _), (_, backward, largest) = seen
        assert len(forward) == 4
        assert [kind for kind, _ in backward] == ["reduce_scatter"] * 4
        assert largest == numel


def _gradients(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """Gradients are views of one tensor, on the original parameters, and equal the eager ones."""
    models = [wrap(make_transformer(num_blocks=2)) for _ in range(2)]
    compiled = torch.compile(models[1], fullgraph=True, backend=BACKENDS[0])
    loss_of(models[0], batch(rank, 0)).backward()
    loss_of(compiled, batch(rank, 0)).backward()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    grads = [(local_of(a.grad), local_of(b.grad)) for a, b in pairs]
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in grads)
    unit = models[1]._fsdp_root.units[1]
    storages = {
        o.grad.untyped_storage().data_ptr()
        for o in unit.originals()
        if o.grad is not None and o.grad.numel()
    }
    leaf_untouched = all(
        f.sharded.grad is None for u in models[1]._fsdp_root.units for f in u.flats
    )
    return close, len(storages) == 1, leaf_untouched


def test_gradients_land_in_the_original_parameters(ranks: RankPool) -> None:
    assert ranks.run(_gradients, 2) == [(True, True, True)] * 2


def test_backends_are_registered() -> None:
    from torch._dynamo import list_backends

    assert set(BACKENDS) <= set(list_backends())
    assert backends.fsdp_dynamo.__name__ == "fsdp_dynamo"
    assert Block.__name__ == "Block"


def _marked(units: list[str]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for unit in units:
        node = graph.call_function(torch.relu, (node,))
        node.meta["custom"] = {UNIT: unit}
    graph.output(node)
    return torch.fx.GraphModule({}, graph)


def test_units_are_part_of_the_cache_key() -> None:
    """Graphs that differ only in the order of equal blocks must not share generated code."""
    digests = [marks_key(_marked(list(units))) for units in ("ab", "ba", "ab")]
    assert digests[0] == digests[2] != digests[1]


class _Rows(nn.Module):
    """Keeps some rows, splits them by a size that depends on data, and looks at them as others."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x[x.sum(-1) > 0.0]
        y = self.head(self.block(rows)).reshape(-1, 2).reshape(-1, 8)
        return y.sum()


def _data_dependent(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain = _Rows()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    compiled = in_mode(model, "graph")
    expected, got = [], []
    for step in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        expected.append(plain(x).item())
        loss = compiled(x)
        loss.backward()
        got.append(loss.item())
    return expected, got


def test_sizes_that_depend_on_data(ranks: RankPool) -> None:
    for expected, got in ranks.run(_data_dependent, 2):
        assert got == pytest.approx(expected, rel=1e-5)
