"""Passes on small graphs built by hand: the order before and after, and the spec."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_passes.graph_utils import collectives, is_collective, is_wait, wait_of
from graph_passes.labels import Label, label_boundaries
from graph_passes.markers import COLLECTIVE, UNIT, CollectiveKind, Mark, mark_of
from graph_passes.pipeline import Pipeline
from graph_passes.prefetch import prefetch_all_gathers
from graph_passes.reshard import tag_reshard_after_forward
from graph_passes.simplify import drop_noop_views
from graph_passes.sink_waits import sink_waits
from graph_passes.spec import SpecError, inventory, verify_graph

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


def test_prefetch() -> None:
    graph = forward_graph(3)
    before = inventory(graph)
    prefetch_all_gathers(graph)
    verify_graph(graph, "prefetch", before)
    assert_expected_inline(
        render(graph),
        """\
_to_copy.default
all_gather u0
wait all_gather u0
_to_copy.default
all_gather u1
mm.default u0
wait all_gather u1
_to_copy.default
all_gather u2
mm.default u1
wait all_gather u2
mm.default u2""",
    )


def test_prefetch_leaves_what_depends_on_compute() -> None:
    """An all-gather of something computed cannot move above it."""
    builder = Builder()
    x = builder.input("x")
    first = builder.compute("u0", x, builder.gather("u0", builder.input("s0")))
    second = builder.compute("u1", x, builder.gather("u1", first))
    builder.graph.output((second,))
    prefetch_all_gathers(builder.graph)
    verify_graph(builder.graph, "prefetch")
    assert render(builder.graph).splitlines()[2:4] == ["mm.default u0", "all_gather u1"]


def test_sink_waits() -> None:
    graph = backward_graph(4)
    sink_waits(graph)
    verify_graph(graph, "sink_waits")
    assert_expected_inline(
        render(graph),
        """\
mm.default u3
reduce_scatter u3
mm.default u2
reduce_scatter u2
mm.default u1
reduce_scatter u1
wait reduce_scatter u3
div.Tensor
mm.default u0
reduce_scatter u0
wait reduce_scatter u2
div.Tensor
wait reduce_scatter u1
div.Tensor
wait reduce_scatter u0
div.Tensor""",
    )


def test_sink_waits_stops_at_a_dependent_reduction() -> None:
    builder = Builder()
    first = builder.reduce("u1", builder.input("tangents_1"))
    second = builder.reduce("u0", first)
    third = builder.reduce("u2", second)
    builder.graph.output((third,))
    before = render(builder.graph)
    sink_waits(builder.graph)
    verify_graph(builder.graph, "sink_waits")
    assert render(builder.graph) == before


def test_noop_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3)
    product = graph.call_function(aten.mm.default, (x, x))
    product.meta["val"] = torch.empty(2, 3)
    node = product
    for target in (aten.t.default, aten.t.default, aten.detach.default):
        node = graph.call_function(target, (node,))
        node.meta["val"] = torch.empty(2, 3)
    view = graph.call_function(aten.view.default, (node, [6]))
    view.meta["val"] = torch.empty(6)
    again = graph.call_function(aten.view.default, (view, [6]))
    again.meta["val"] = torch.empty(6)
    used = graph.call_function(aten.relu.default, (again,))
    kept = graph.call_function(aten.detach.default, (x,))
    graph.output((used, kept))
    drop_noop_views(graph)
    graph.lint()
    names = [n.target.__name__ for n in graph.nodes if n.op == "call_function"]
    assert names == ["mm.default", "view.default", "relu.default", "detach.default"]


def test_reshard_tags() -> None:
    """The chain of a unit is recomputed; the root's gather is saved, its views are not."""
    builder = Builder()
    x = builder.input("x")
    weights = []
    for unit in ("u0", ""):
        cast = builder.graph.call_function(aten._to_copy.default, (builder.input(f"s{unit}"),))
        weights.append(builder.gather(unit, cast))
    transposed = [builder.graph.call_function(aten.t.default, (w,)) for w in weights]
    out = builder.compute("u0", builder.compute("", x, transposed[1]), transposed[0])
    builder.graph.output((out,))
    assert tag_reshard_after_forward(builder.graph) == ["u0"]
    tags = {n: n.meta.get("recompute") for n in builder.graph.nodes}
    recompute, save = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    assert [tags[w] for w in weights] == [recompute, save]
    assert [tags[w.args[0]] for w in weights] == [recompute, save]
    assert [tags[t] for t in transposed] == [recompute, recompute]
    assert tags[weights[0].args[0].args[0]] is recompute
    assert tags[out] is None


def test_spec_refuses() -> None:
    unmarked = forward_graph(1)
    next(collectives(unmarked)).meta.clear()
    with pytest.raises(SpecError, match="expected a mark, got none"):
        Pipeline().run(unmarked)
    waitless = forward_graph(1)
    node = next(collectives(waitless))
    wait = wait_of(node)
    wait.replace_all_uses_with(node)
    waitless.erase_node(wait)
    with pytest.raises(SpecError, match="expected one wait as its only user"):
        verify_graph(waitless, "test")

    def lose(graph: fx.Graph) -> None:
        gather = next(collectives(graph))
        waiting = wait_of(gather)
        waiting.replace_all_uses_with(gather.args[0])
        graph.erase_node(waiting)
        graph.erase_node(gather)

    with pytest.raises(SpecError, match="after 'lose': expected the same collectives"):
        Pipeline(passes=(lose,)).run(forward_graph(2))


def test_cache_key_follows_the_passes() -> None:
    assert Pipeline().cache_key() == Pipeline().cache_key()
    assert Pipeline().cache_key() != Pipeline(passes=(sink_waits,)).cache_key()


@pytest.mark.parametrize("unit", ["", "blocks.3"])
def test_marks_and_labels_survive_as_text(unit: str) -> None:
    mark = Mark(unit, "all_gather", "backward", 2, reshards=True)
    assert Mark.decode(mark.encode()) == mark
    label = Label(unit, "reduce_scatter", "backward", ("", "a"), ("b", ""))
    assert Label.decode(label.encode()) == label
    assert Label.decode(Label(unit, "all_gather", "forward", (), ()).encode()).after == ()
    with pytest.raises(ValueError, match="expected a collective's kind"):
        Mark.decode("gather|forward|0|0|u")


def test_labels() -> None:
    graph = backward_graph(2)
    sink_waits(graph)
    labels = list(label_boundaries(graph).values())
    assert [(label.unit, label.before, label.after) for label in labels] == [
        ("u1", ("u1",), ("u0",)),
        ("u0", (), ()),
        ("u1", (), ()),
        ("u0", (), ()),
    ]
    assert {label.phase for label in labels} == {"backward"}
