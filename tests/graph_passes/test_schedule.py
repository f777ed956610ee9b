"""Schedules: order on small graphs, the spec on random ones, distance from the optimum."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from graphs import Builder, Even, backward_graph, forward_graph, render
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import random_limits, random_problem

from graph_passes.cost_model import CostModel, Device
from graph_passes.graph_utils import op_name
from graph_passes.scheduling.bucketing import bucket
from graph_passes.scheduling.plan import Plan, PlanError
from graph_passes.scheduling.planner import Planned, Planner
from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.schedule import Options, decide, pose
from graph_passes.scheduling.simulation import (
    BudgetError,
    Limits,
    is_within,
    lower_bound_ms,
    peak_bytes,
    simulate,
    total_ms,
    unscheduled,
)
from graph_passes.spec import inventory, verify_graph

EVEN = Options(cost=Even(), bucket=False)


def test_forward() -> None:
    graph = forward_graph(3)
    before = inventory(graph)
    Planner(EVEN)(graph)
    verify_graph(graph, "planner", before)
    assert_expected_inline(
        render(graph),
        """\
_to_copy.default
all_gather u0
_to_copy.default
all_gather u1
wait all_gather u0
mm.default u0
_to_copy.default
all_gather u2
wait all_gather u1
mm.default u1
wait all_gather u2
mm.default u2""",
    )


def test_backward() -> None:
    graph = backward_graph(4)
    Planner(replace(EVEN, limits=Limits(max_in_flight=2)))(graph)
    verify_graph(graph, "planner")
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


@pytest.mark.parametrize("switch", ["prefetch", "sink_waits"])
def test_each_decision_can_be_left_out(switch: str) -> None:
    graph = forward_graph(3) if switch == "prefetch" else backward_graph(3)
    options = replace(EVEN, **{switch: False})
    Planner(options)(graph)
    verify_graph(graph, "planner")
    lines = render(graph).splitlines()
    behind = [lines[i + 1] for i, line in enumerate(lines) if line.startswith(("all_", "reduce_"))]
    assert all(line.startswith("wait ") for line in behind)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), units=st.integers(1, 12), backward=st.booleans())
def test_random_problems(seed: int, units: int, backward: bool) -> None:
    """Every placement is legal and within the limits, and never slower than doing nothing."""
    rng = random.Random(seed)
    problem = random_problem(rng, units, rng.randint(1, 3), backward)
    limits = random_limits(rng, problem)
    schedule, launches = decide(problem, Options(limits=limits, bucket=rng.random() < 0.5))
    assert sorted(p.transfer for p in schedule) == list(range(len(problem.transfers)))
    assert set(launches) == set(range(len(problem.transfers)))
    for placement in schedule:
        transfer = problem.transfers[placement.transfer]
        assert transfer.ready <= placement.issue <= placement.wait <= transfer.need
    assert peak_bytes(problem, schedule) <= (limits.memory_budget_bytes or 0)
    timeline = simulate(problem, schedule)
    assert timeline.total_ms == pytest.approx(total_ms(problem, schedule))
    assert timeline.total_ms == pytest.approx(sum(problem.compute_ms) + timeline.exposed_ms)
    assert lower_bound_ms(problem) <= timeline.total_ms + 1e-9
    assert timeline.total_ms <= total_ms(problem, unscheduled(problem)) + 1e-9


def test_a_gathered_value_is_reduced_in_the_gap_of_a_launch() -> None:
    """Of gathers in one launch, the first is waited for at once, by a reduction of its result."""
    builder = Builder()
    tangent = builder.input("tangents_1")
    gathered = [builder.gather("u0", tangent) for _ in range(2)]
    reduced = builder.reduce("u0", gathered[0])
    builder.compute("u0", reduced, tangent)
    builder.compute("u0", tangent, tangent)
    gathered += [builder.gather("u0", tangent) for _ in range(2)]
    builder.graph.output((gathered[-1], reduced))
    before = inventory(builder.graph)
    Planner(Options(cost=Even(), limits=Limits(max_in_flight=3)))(builder.graph)
    verify_graph(builder.graph, "planner", before)


@settings(max_examples=100)
@given(data=st.data())
def test_random_graphs(data: st.DataObject) -> None:
    """The spec holds, nothing is lost, and compute keeps its order, whatever depends on what."""
    builder = Builder()
    tangent = builder.input("tangents_1")
    values, results = [tangent], []
    for number in range(data.draw(st.integers(1, 12))):
        unit = f"u{data.draw(st.integers(0, 3))}"
        kind = data.draw(st.sampled_from(["gather", "cast", "compute", "reduce", "use"]))
        source = data.draw(st.sampled_from(values))
        if kind in ("gather", "cast"):
            shard = builder.input(f"s{number}") if data.draw(st.booleans()) else source
            if kind == "cast":
                shard = builder.graph.call_function(torch.ops.aten._to_copy.default, (shard,))
            values.append(builder.gather(unit, shard))
        elif kind == "reduce":
            again = data.draw(st.sampled_from([source, *results]))  # as over replicas
            results.append(builder.reduce(unit, again))
            if data.draw(st.booleans()):
                args = (results.pop(), 2)
                results.append(builder.graph.call_function(torch.ops.aten.div.Tensor, args))
        else:  # now and then of a reduced gradient
            left = data.draw(st.sampled_from([*values, *results])) if kind == "use" else source
            values.append(builder.compute(unit, left, source))
    builder.graph.output((values[-1], *results))
    switches = {name: data.draw(st.booleans()) for name in ("prefetch", "sink_waits", "bucket")}
    limits = Limits(max_in_flight=data.draw(st.integers(1, 3)))
    before = inventory(builder.graph)
    products = [n for n in builder.graph.nodes if op_name(n) == "aten::mm"]
    Planner(Options(cost=Even(), limits=limits, **switches))(builder.graph)
    verify_graph(builder.graph, "planner", before)
    assert [n for n in builder.graph.nodes if op_name(n) == "aten::mm"] == products


def _optimum_ms(problem: Problem, limits: Limits, upper_ms: float) -> float:
    """Least total time on one link, by exhaustive search; ``upper_ms``: a time that is reachable.

    Depth first over gaps; at each gap any sequence of the gathers that may be issued, and any set
    of reductions in flight to wait for. Branches that cannot beat the best one found are cut off by
    a bound that needs no schedule: remaining compute, and remaining work on the link.
    """
    transfers, best_ms = problem.transfers, upper_ms + 1e-9
    seen: dict[tuple[object, ...], list[tuple[float, ...]]] = {}

    def fits(gap: int, unissued: frozenset[int], flying: dict[int, float]) -> bool:
        """Whether the step behind a gap keeps the limits."""
        gathers = [i for i in flying if transfers[i].is_gather]
        reductions = [i for i in flying if not transfers[i].is_gather]
        ready = [i for i in unissued if not transfers[i].is_gather and transfers[i].ready <= gap]
        live = sum(transfers[i].held_bytes for i in (*gathers, *reductions, *ready))
        num_in_flight = max(len(gathers), len(reductions))
        budget = limits.memory_budget_bytes or 0
        return problem.base_bytes[gap] + live <= budget and num_in_flight <= limits.max_in_flight

    def visit(
        gap: int, now: float, free: float, unissued: frozenset[int], flying: dict[int, float]
    ) -> None:
        """Everything that can be issued and waited for at a gap, then the step behind it."""
        nonlocal best_ms
        link_ms = sum(transfers[i].ms for i in unissued)
        bounds = [now + sum(problem.compute_ms[gap:]), *flying.values()]
        if max([*bounds, max(now, free) + link_ms if unissued else 0]) >= best_ms:
            return
        key = (gap, unissued, tuple(sorted(flying)))
        state = (now, free, *(flying[i] for i in sorted(flying)))
        others = seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in others):
            return
        others.append(state)
        for index in unissued:
            if transfers[index].ready <= gap:
                end = max(now, free) + transfers[index].ms
                visit(gap, now, end, unissued - {index}, {**flying, index: end})
        if any(transfers[i].need <= gap for i in unissued):
            return
        due = {i for i in flying if transfers[i].need <= gap}
        optional = [i for i in flying if i not in due and not transfers[i].is_gather]
        for count in range(len(optional) + 1):
            for more in itertools.combinations(optional, count):
                left = {i: end for i, end in flying.items() if i not in due | set(more)}
                after = max([now, *(end for i, end in flying.items() if i not in left)])
                if gap == problem.num_steps:
                    best_ms = min(best_ms, after)
                elif fits(gap, unissued, left):
                    visit(gap + 1, after + problem.compute_ms[gap], free, unissued, left)

    visit(0, 0.0, 0.0, frozenset(range(len(transfers))), {})
    return best_ms


@pytest.mark.slow
def test_close_to_the_optimum() -> None:
    """Within 10 % of an exhaustive search on at least 95 % of 500 random problems."""
    rng = random.Random(2026)
    num_close = 0
    for _ in range(500):
        shape = (rng.randint(2, 6), rng.randint(1, 2), rng.random() < 0.5)
        problem = random_problem(rng, *shape, max_transfers=8)
        limits = random_limits(rng, problem)
        schedule, _ = decide(problem, Options(limits=limits, bucket=False))
        assert is_within(problem, schedule, limits)
        ms = total_ms(problem, schedule)
        num_close += ms <= 1.1 * _optimum_ms(problem, limits, ms)
    assert num_close >= 475, num_close


def test_bucket_size_follows_the_link() -> None:
    """Merging goes on until the latency is a tenth of the time."""
    rng = random.Random(0)
    problem = random_problem(rng, 8, 1, backward=False)
    for latency_ms, num_buckets in ((0.0, 8), (0.1, 8), (1.0, 2), (50.0, 1)):
        transfers = tuple(
            replace(t, ms=2.0 + latency_ms, latency_ms=latency_ms, ready=0)
            for t in problem.transfers
        )
        merged = bucket(replace(problem, transfers=transfers))
        assert len(merged.problem.transfers) == num_buckets, latency_ms
        reductions = tuple(
            replace(t, mark=replace(t.mark, kind="reduce_scatter"), ready=i, need=8)
            for i, t in enumerate(transfers)
        )
        apart = bucket(replace(problem, compute_ms=(2.0,) * 8, transfers=reductions))
        assert len(apart.problem.transfers) == (1 if latency_ms == 50.0 else 8), latency_ms
        assert [i for members in merged.members for i in members] == list(range(8))


def test_budget_below_the_graph_itself() -> None:
    problem = random_problem(random.Random(0), 3, 2, backward=True)
    least = peak_bytes(problem, unscheduled(problem))
    decide(problem, Options(limits=Limits(memory_budget_bytes=least)))
    with pytest.raises(BudgetError, match=rf"expected at least {least:,} .* unit 'u\d'"):
        decide(problem, Options(limits=Limits(memory_budget_bytes=least - 1)))
    for bad in ({"max_in_flight": 0}, {"margin": 0.5}, {"memory_budget_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Limits(**bad)  # type: ignore[arg-type]


def _planned(graph_of: object = forward_graph) -> tuple[Planned, Plan]:
    seen: list[Planned] = []
    Planner(EVEN, observe=seen.append)(graph_of(3))  # type: ignore[operator]
    return seen[0], Plan({"link": "x"}, (), (seen[0].plan,))


def test_plan_is_data(tmp_path: object) -> None:
    """Saved, loaded and applied, a plan gives the same graph; a change is applied too."""
    _, plan = _planned()
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    loaded = Plan.load(path)
    assert loaded == plan
    assert loaded.digest() == plan.digest()
    decided, applied = forward_graph(3), forward_graph(3)
    Planner(EVEN)(decided)
    Planner(Options(), plan=loaded)(applied)
    assert render(applied) == render(decided)
    edited = _edited(plan, 2, issue=0)
    other = forward_graph(3)
    Planner(Options(), plan=edited)(other)
    verify_graph(other, "planner")
    assert render(other).splitlines()[:6:2] == ["_to_copy.default"] * 3


def _edited(plan: Plan, position: int, **changes: int) -> Plan:
    transfers = list(plan.graphs[0].transfers)
    transfers[position] = replace(transfers[position], **changes)
    graph = replace(plan.graphs[0], transfers=tuple(transfers))
    return replace(plan, graphs=(graph,))


def test_plans_that_do_not_fit() -> None:
    _, plan = _planned()
    with pytest.raises(PlanError, match="expected a plan for this forward graph"):
        Planner(plan=plan)(forward_graph(4))
    with pytest.raises(PlanError, match=r"unit 'u2'.*the graph would be cyclic"):
        Planner(plan=_edited(plan, 2, issue=3))(forward_graph(3))
    with pytest.raises(PlanError, match="the graph would be cyclic"):
        Planner(plan=_edited(plan, 2, issue=2, wait=1))(forward_graph(3))
    twice = replace(plan.graphs[0], transfers=plan.graphs[0].transfers[:1] * 3)
    with pytest.raises(PlanError, match="expected a collective of the graph, got none"):
        Planner(plan=replace(plan, graphs=(twice,)))(forward_graph(3))
    short = replace(plan.graphs[0], transfers=plan.graphs[0].transfers[:2])
    with pytest.raises(PlanError, match="got none for all_gather of unit 'u2'"):
        Planner(plan=replace(plan, graphs=(short,)))(forward_graph(3))
    for text in ("", "[]", "{}", '{"version": 99}', '{"version": 1, "graphs": 3}'):
        with pytest.raises(PlanError, match="plan: expected"):
            Plan.from_json(text)


@pytest.mark.parametrize(("gradient_bytes", "room"), [(50, 200), (100, 200), (200, 300)])
def test_default_budget_has_room_for_a_gather_and_a_gradient(
    gradient_bytes: int, room: int
) -> None:
    """Gradients in float32 beside parameters in bfloat16 are the larger of the two."""
    problem = random_problem(random.Random(0), 3, 2, backward=True)
    transfers = tuple(
        replace(t, held_bytes=100, payload_bytes=100 if t.is_gather else gradient_bytes)
        for t in problem.transfers
    )
    problem = replace(problem, transfers=transfers)
    resolved = Limits().resolved(problem)
    assert resolved.memory_budget_bytes == peak_bytes(problem, unscheduled(problem)) + room


@pytest.mark.parametrize("receives_apart", [True, False])
def test_what_a_reduction_holds(receives_apart: bool) -> None:
    """Its gradient, and with gloo what the other ranks send."""
    _, problem = pose(backward_graph(2), CostModel(receives_apart=receives_apart), None)
    reductions = [t for t in problem.transfers if not t.is_gather]
    assert reductions
    for one in reductions:
        assert one.held_bytes == one.payload_bytes + receives_apart * one.wire_bytes


def test_products_have_the_rate_of_their_dtype() -> None:
    device = Device(flops_per_ms=1e3, bytes_per_ms=1e9, flops_by_dtype={"bfloat16": 8e3})
    took = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        graph = torch.fx.Graph()
        one = graph.placeholder("one")
        product = graph.call_function(torch.ops.aten.mm.default, (one, one))
        for node in (one, product):
            node.meta["val"] = torch.empty(10, 10, dtype=dtype, device="meta")
        took[dtype] = CostModel(device).compute_ms(product)
    assert took == {torch.float32: 2.0, torch.bfloat16: 0.25, torch.float64: 2.0}
    with pytest.raises(ValueError, match=r"flops_by_dtype\['float16'\]: expected more than 0"):
        Device(flops_by_dtype={"float16": 0.0})
