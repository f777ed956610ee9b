"""Passes on small graphs built by hand: the order before and after, and the spec."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import Builder, Even, backward_graph, forward_graph, render
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graph_passes.graph_utils import collectives, wait_of
from graph_passes.markers import Mark
from graph_passes.pipeline import Pipeline
from graph_passes.scheduling.plan import share_gathers
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.reshard import tag_reshard_after_forward
from graph_passes.scheduling.schedule import Options
from graph_passes.scheduling.simulation import Limits
from graph_passes.spec import SpecError, verify_graph
from graph_passes.text.listing import Label, label_boundaries
from graph_passes.views import drop_noop_views

aten = torch.ops.aten


def test_calls_of_a_unit_share_a_gather() -> None:
    """Also where a shard is cast before it; reductions and other units' gathers stay apart."""
    builder = Builder()
    first, second = builder.input("first"), builder.input("second")
    casts = [builder.graph.call_function(aten.relu.default, (first,)) for _ in range(2)]
    gathered = [builder.gather("a", cast) for cast in casts] + [builder.gather("b", second)]
    computed = [builder.compute("a", value) for value in gathered]
    builder.graph.output([builder.reduce("a", computed[0]) for _ in range(2)] + computed)
    share_gathers(builder.graph)
    verify_graph(builder.graph, "share_gathers")
    assert [mark for mark in render(builder.graph).splitlines() if "gather" in mark] == [
        "all_gather a",
        "wait all_gather a",
        "all_gather b",
        "wait all_gather b",
    ]
    assert [node.args[0] for node in computed[:2]] == [gathered[0]] * 2
    assert len([c for c in collectives(builder.graph) if "reduce" in str(c.target)]) == 2
    assert casts[0].users
    assert not casts[1].users


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
    def forget(graph: fx.Graph) -> None:
        next(collectives(graph)).meta["custom"] = {}

    with pytest.raises(SpecError, match=r"lost \{.all_gather"):
        Pipeline(passes=(forget,)).run(forward_graph(1))
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
    other = Planner(Options(limits=Limits(max_in_flight=7)))
    assert Pipeline().cache_key() != Pipeline(passes=(drop_noop_views,)).cache_key()
    assert Pipeline().cache_key() != Pipeline(passes=(other,)).cache_key()


@pytest.mark.parametrize("unit", ["", "blocks.3"])
def test_marks_and_labels_survive_as_text(unit: str) -> None:
    mark = Mark(unit, "all_gather", "backward", 2, reshards=True)
    for one in (mark, replace(mark, wire="int8/64~")):
        assert Mark.decode(one.encode()) == one
    label = Label(unit, "reduce_scatter", "backward", ("", "a"), ("b", ""))
    for one in (label, replace(label, wire="int8/64~")):
        assert Label.decode(one.encode()) == one
    assert Label.decode(Label(unit, "all_gather", "forward", (), ()).encode()).after == ()
    with pytest.raises(ValueError, match="expected a collective's kind"):
        Mark.decode("gather|forward|0|0||u")


def test_labels() -> None:
    graph = backward_graph(2)
    Planner(Options(cost=Even(), bucket=False))(graph)
    labels = list(label_boundaries(graph).values())
    assert [(label.unit, label.before, label.after) for label in labels] == [
        ("u1", ("u1",), ("u0",)),
        ("u0", (), ()),
        ("u1", (), ()),
        ("u0", (), ()),
    ]
    assert {label.phase for label in labels} == {"backward"}
