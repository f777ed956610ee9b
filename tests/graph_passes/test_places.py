"""What a search for places starts from: views where they are used, and a coarser problem."""

from __future__ import annotations

import operator
import random

import pytest
from expecttest import assert_expected_inline
from graphs import Builder, Even, aten, render
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_limits, random_problem
from torch import fx

from graph_passes.scheduling.bucketing import coarsen
from graph_passes.scheduling.planner import Planner
from graph_passes.scheduling.problem import problem_of
from graph_passes.scheduling.schedule import Options, decide
from graph_passes.scheduling.simulation import is_within, peak_bytes, total_ms, unscheduled
from graph_passes.views import sink_views


def _late() -> fx.Graph:
    """A head and its norm's weight in one flat parameter; their views stand at the start."""
    b = Builder()
    x, first, last = b.input("x"), b.input("first"), b.input("last")
    flat = b.gather("head", last)
    pieces = b.graph.call_function(aten.split_with_sizes.default, (flat, [4, 4]))
    norm, head = [b.graph.call_function(operator.getitem, (pieces, i)) for i in (0, 1)]
    weight = b.graph.call_function(aten.view.default, (head, [2, 2]))
    turned = b.graph.call_function(aten.t.default, (weight,))
    x = b.compute("u0", x, b.gather("u0", first))
    x = b.compute("head", x, norm)
    b.graph.output((b.compute("head", x, weight), b.compute("head", x, turned)))
    return b.graph


def test_views_stand_where_they_are_used() -> None:
    graph = _late()
    assert problem_of(graph, Even()).transfers[0].need == 0
    sink_views(graph)
    graph.lint()
    assert problem_of(graph, Even()).transfers[0].need == 1
    Planner(Options(cost=Even(), bucket=False))(graph)
    assert_expected_inline(
        render(graph),
        """\
all_gather u0
all_gather head
wait all_gather u0
mm.default u0
wait all_gather head
split_with_sizes.default
getitem
mm.default head
getitem
view.default
mm.default head
t.default
mm.default head""",
    )


def test_a_view_that_nothing_uses_stays() -> None:
    b = Builder()
    flat = b.gather("u", b.input("shard"))
    b.graph.call_function(aten.view.default, (flat, [8]))
    x = b.compute("u", b.input("x"), flat)
    b.graph.output((x,))
    order = list(b.graph.nodes)
    sink_views(b.graph)
    assert list(b.graph.nodes) == order


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), units=st.integers(1, 6), backward=st.booleans())
def test_a_schedule_of_the_coarse_problem_is_one_of_the_other(
    seed: int, units: int, backward: bool
) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, units, rng.randint(1, 30), backward)
    coarse = coarsen(problem)
    assert coarse.problem.num_steps <= problem.num_steps
    assert sum(coarse.problem.compute_ms) == pytest.approx(sum(problem.compute_ms))
    assert coarse.original(unscheduled(coarse.problem)) == unscheduled(problem)
    limits = random_limits(rng, problem)
    schedule, _ = decide(coarse.problem, Options(limits=limits, bucket=False))
    original = coarse.original(schedule)
    assert total_ms(problem, original) == pytest.approx(total_ms(coarse.problem, schedule))
    assert peak_bytes(problem, original) <= peak_bytes(coarse.problem, schedule)
    assert is_within(problem, original, limits)


def test_many_steps_become_few() -> None:
    problem = random_problem(random.Random(0), 32, 100, backward=True)
    assert coarsen(problem).problem.num_steps <= 32 * 5
