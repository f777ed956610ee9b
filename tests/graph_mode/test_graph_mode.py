"""The graph mode: one graph, marks, what is saved for the backward, no recompiles."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from loops import fit, make_classifier, shard
from models import nothing_cached
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import FSDP, ShardingStrategy
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.graph_mode.compile_cache import marks_key
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.graph_utils import collectives, is_backward
from graph_passes.markers import UNIT, mark_of
from graph_passes.pipeline import Pipeline


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@on_ranks(2)
def test_graphs(rank: int, strategy: ShardingStrategy) -> None:
    """Marks of the final graphs, what is saved for the backward, recompiles, and gradients."""
    seen: list[tuple[bool, list[tuple[str, str]], int]] = []
    run = Pipeline.run

    def watch(self: Pipeline, graph: torch.fx.Graph) -> None:
        run(self, graph)
        marks = [mark_of(node) for node in collectives(graph)]
        keys = [(m.kind, m.unit) if m else ("unmarked", "") for m in marks]
        inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
        numels = [v.numel() for v in inputs if isinstance(v, torch.Tensor)]
        seen.append((is_backward(graph), keys, max(numels)))

    def train(model: nn.Module) -> list[float]:
        return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(3))

    eager, wrapped = (shard(make_classifier(), sharding_strategy=strategy) for _ in range(2))
    counters.clear()
    with nothing_cached(), mock.patch.object(Pipeline, "run", watch):
        model = in_mode(wrapped, "graph")
        losses = train(model)
    assert losses == pytest.approx(train(eager), rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    assert [backward for backward, _, _ in seen] == [False, True]
    (_, forward, _), (_, backward, largest) = seen
    assert forward == [("all_gather", unit) for unit in ("", "0", "1")]
    gathers = [unit for kind, unit in backward if kind == "all_gather"]
    reduces = [unit for kind, unit in backward if kind == "reduce_scatter"]
    assert sorted(reduces) == ["", "0", "1"]
    unit = wrapped._fsdp_root.units[2]
    numel = unit.flats[0].layout.padded_numel
    if strategy is ShardingStrategy.FULL_SHARD:
        assert gathers == ["1"]  # no input of the first block needs a gradient
        assert largest < numel  # no unsharded flat parameter of a block is saved
    else:
        assert gathers == []
        assert largest == numel
    # Gradients are views of one tensor, on the original parameters.
    for one, other in zip(eager.parameters(), wrapped.parameters(), strict=True):
        torch.testing.assert_close(local_of(other.grad), local_of(one.grad), rtol=1e-5, atol=1e-7)
    grads = [o.grad for o in unit.originals() if o.grad is not None and o.grad.numel()]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1
    assert all(f.sharded.grad is None for u in wrapped._fsdp_root.units for f in u.flats)


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


@on_ranks(2)
def test_sizes_that_depend_on_data(rank: int) -> None:
    torch.manual_seed(0)
    plain = _Rows()
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    compiled = in_mode(model, "graph")
    for step in range(3):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        loss = compiled(x)
        loss.backward()
        assert loss.item() == pytest.approx(plain(x).item(), rel=1e-5)
