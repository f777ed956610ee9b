"""Small graphs of marked collectives, built by hand."""

from __future__ import annotations

import torch
from torch import fx

from graph_passes.cost_model import CostModel
from graph_passes.graph_utils import is_collective, is_wait, op_name
from graph_passes.markers import COLLECTIVE, UNIT, CollectiveKind, Mark, mark_of

ops = torch.ops._c10d_functional
aten = torch.ops.aten


class Builder:
    """Builds a graph of marked collectives and compute."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str) -> fx.Node:
        return self.graph.placeholder(name)

    def _collective(self, unit: str, kind: CollectiveKind, node: fx.Node) -> fx.Node:
        mark = Mark(unit, kind, "forward", 0, reshards=unit != "")
        node.meta["custom"] = {COLLECTIVE: mark.encode()}
        wait = self.graph.call_function(ops.wait_tensor.default, (node,))
        wait.meta["custom"] = {COLLECTIVE: mark.encode()}
        return wait

    def gather(self, unit: str, shard: fx.Node) -> fx.Node:
        node = self.graph.call_function(ops.all_gather_into_tensor.default, (shard, 2, "g"))
        return self._collective(unit, "all_gather", node)

    def reduce(self, unit: str, grad: fx.Node) -> fx.Node:
        node = self.graph.call_function(ops.reduce_scatter_tensor.default, (grad, "avg", 2, "g"))
        return self._collective(unit, "reduce_scatter", node)

    def compute(self, unit: str, *args: fx.Node) -> fx.Node:
        node = self.graph.call_function(aten.mm.default, args)
        node.meta["custom"] = {UNIT: unit}
        return node


def render(graph: fx.Graph) -> str:
    """One line a node that matters: kind and unit."""
    lines = []
    for node in graph.nodes:
        mark = mark_of(node)
        if is_collective(node):
            lines.append(f"{mark.kind} {mark.unit}" if mark else "unmarked")
        elif is_wait(node):
            lines.append(f"wait {mark.kind} {mark.unit}" if mark else "wait")
        elif node.op == "call_function":
            lines.append(f"{node.target.__name__} {node.meta.get('custom', {}).get(UNIT, '')}")
    return "\n".join(line.strip() for line in lines)


def two_units() -> fx.Graph:
    """Two units with compute of the root in between; each is gathered where it is used."""
    build = Builder()
    x, first, second = (build.input(name) for name in ("x", "first", "second"))
    y = build.compute("layers.0", x, build.gather("layers.0", first))
    z = build.compute("", y, y)
    build.graph.output((build.compute("layers.1", z, build.gather("layers.1", second)),))
    return build.graph


def forward_graph(num_units: int) -> fx.Graph:
    builder = Builder()
    x = builder.input("x")
    shards = [builder.input(f"shard{i}") for i in range(num_units)]
    for i, shard in enumerate(shards):
        cast = builder.graph.call_function(aten._to_copy.default, (shard,))
        x = builder.compute(f"u{i}", x, builder.gather(f"u{i}", cast))
    builder.graph.output((x,))
    return builder.graph


def backward_graph(num_units: int) -> fx.Graph:
    builder = Builder()
    grad = builder.input("tangents_1")
    weights = [builder.input(f"w{i}") for i in range(num_units)]
    results = []
    for i in reversed(range(num_units)):
        grad = builder.compute(f"u{i}", grad, weights[i])
        reduced = builder.reduce(f"u{i}", grad)
        results.append(builder.graph.call_function(aten.div.Tensor, (reduced, 2)))
    builder.graph.output(tuple(results))
    return builder.graph


class Even(CostModel):
    """Every product takes 1 ms, every collective 0.5 ms, nothing else takes time."""

    def compute_ms(self, node: fx.Node) -> float:
        return 1.0 if op_name(node) == "aten::mm" else 0.0

    def collective_ms(self, node: fx.Node) -> float:
        return 0.5
