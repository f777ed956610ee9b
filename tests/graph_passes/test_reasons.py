"""Why a collective is where it is: reasons by hand, and of decided schedules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from planned_graphs import Place, make_planned

from fsdp_dynamo.observe.explanation import reason_of, suggestion_for
from graph_passes.markers import CollectiveKind
from graph_passes.report import report_of
from graph_passes.scheduling.plan import GraphPlan, PlannedTransfer
from graph_passes.scheduling.planner import Planned
from graph_passes.scheduling.schedule import decide
from graph_passes.scheduling.simulation import Limits


def _reasons(planned: Planned) -> list[str]:
    """By transfer, in the order in which they were given."""
    graph = report_of(planned)
    found = {(t.unit, t.kind): reason_of(graph, t) for t in graph.transfers}
    return [found[(t.unit, t.kind)] for t in planned.plan.transfers]


def test_hidden_and_dependency_of_a_gather() -> None:
    planned = make_planned(
        ("u0", "all_gather", 1.0, 0, 0, 0, 0),
        ("u1", "all_gather", 1.0, 0, 1, 0, 1),
        ("u2", "all_gather", 3.0, 1, 2, 1, 2),
    )
    assert _reasons(planned) == [
        "dependency: its input is not ready earlier (start of the graph)",
        "hidden: nothing of it is exposed",
        "dependency: its input is not ready earlier",
    ]


def test_dependency_of_a_reduction() -> None:
    planned = make_planned(
        ("u1", "reduce_scatter", 3.0, 1, 2, 1, 2), ("u3", "reduce_scatter", 1.0, 4, 4, 4, 4)
    )
    assert _reasons(planned) == [
        "dependency: its result is needed there",
        "dependency: its result is needed there (end of the graph)",
    ]


def test_memory() -> None:
    late = ("u3", "all_gather", 3.0, 0, 3, 2, 3)
    waited = ("u0", "reduce_scatter", 3.0, 1, 4, 1, 2)
    tight = Limits(memory_budget_bytes=1130, max_in_flight=9)
    assert _reasons(make_planned(late, limits=replace(tight, memory_budget_bytes=1100))) == [
        "not planned: moving it by one unit would save 1.000 ms"
    ]
    # a neighbour holds the memory of step 1 already, and so does the other one of step 2
    held = ("u2", "all_gather", 1.0, 0, 2, 1, 2)
    graph = report_of(make_planned(held, late, limits=tight))
    assert [(t.reason, t.bytes_short) for t in graph.transfers] == [("hidden", 0), ("memory", 70)]
    assert reason_of(graph, graph.transfers[1]) == (
        "memory: one unit earlier would exceed the budget by 70 B"
    )
    assert suggestion_for(graph, graph.transfers[1]).startswith("memory_budget_bytes=1200,")
    graph = report_of(make_planned(waited, ("u3", "all_gather", 0.5, 0, 3, 2, 3), limits=tight))
    assert reason_of(graph, graph.transfers[0]) == (
        "memory: one unit later would exceed the budget by 70 B"
    )


def test_in_flight() -> None:
    planned = make_planned(
        ("u2", "all_gather", 1.0, 0, 2, 1, 2),
        ("u3", "all_gather", 3.0, 0, 3, 2, 3),
        limits=Limits(memory_budget_bytes=10**9, max_in_flight=1),
    )
    assert _reasons(planned)[1] == "in flight: max_in_flight=1 collectives are already in flight"
    graph = report_of(planned)
    assert suggestion_for(graph, graph.transfers[1]) == "max_in_flight=2"


def test_order_of_gathers() -> None:
    """The second could only go earlier in front of the first, which would then be late."""
    planned = make_planned(
        ("u2", "all_gather", 2.0, 1, 2, 1, 2), ("u3", "all_gather", 3.0, 0, 3, 1, 3)
    )
    assert _reasons(planned) == [
        "hidden: nothing of it is exposed",
        "order: it would overtake that of u2 on the link and gain nothing",
    ]


def test_order_of_a_reduction() -> None:
    """Issued at once it would make the gather behind it late."""
    planned = make_planned(
        ("u2", "all_gather", 2.0, 1, 2, 1, 2), ("u0", "reduce_scatter", 5.0, 1, 4, 2, 4)
    )
    assert _reasons(planned) == [
        "hidden: nothing of it is exposed",
        "order: it would overtake that of u2 on the link and gain nothing",
    ]


def test_bandwidth() -> None:
    planned = make_planned(
        ("u1", "all_gather", 5.0, 0, 1, 0, 1),
        ("u2", "all_gather", 5.0, 0, 2, 1, 2),
        ("u3", "reduce_scatter", 5.0, 4, 4, 4, 4),
        ("u2", "reduce_scatter", 4.0, 3, 4, 3, 4),
    )
    reasons = _reasons(planned)
    assert reasons[1] == "bandwidth: the link is busy with u1; moving it would gain nothing"
    assert reasons[2] == "bandwidth: the link is busy with u2; moving it would gain nothing"
    graph = report_of(planned)
    assert "fewer bytes" in suggestion_for(graph, graph.transfers[1])


def test_a_move_that_was_not_planned() -> None:
    planned = make_planned(("u3", "all_gather", 1.0, 0, 3, 3, 3))
    assert _reasons(planned) == ["not planned: moving it by one unit would save 1.000 ms"]
    planned = make_planned(("u0", "reduce_scatter", 1.0, 1, 4, 1, 1))
    assert _reasons(planned) == ["not planned: moving it by one unit would save 1.000 ms"]


def _random_place(rng: random.Random, unit: int, kind: CollectiveKind, num: int) -> Place:
    ready, need = (0, unit) if kind == "all_gather" else (unit + 1, num)
    return (f"u{unit}", kind, rng.uniform(0.6, 6.0), ready, need, ready, ready)


@pytest.mark.parametrize("seed", range(30))
def test_reasons_of_decided_schedules(seed: int) -> None:
    """A reason is never at odds with the numbers beside it; little is left that would save time."""
    rng = random.Random(seed)
    num = rng.randint(2, 8)
    kinds: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
    places = [_random_place(rng, unit, kind, num) for unit in range(num) for kind in kinds]
    compute = tuple(rng.uniform(0.1, 4.0) for _ in range(num))
    limits = Limits(rng.choice([None, 1400]), max_in_flight=rng.randint(1, 3))
    planned = make_planned(*places, compute=compute, limits=limits)
    options = replace(planned.options, limits=limits.resolved(planned.problem))
    schedule, launches = decide(planned.problem, options)
    marks = [planned.problem.transfers[p.transfer].mark for p in schedule]
    plan = tuple(
        PlannedTransfer(mark.unit, mark.kind, 0, p.issue, p.wait, launches[p.transfer])
        for mark, p in zip(marks, schedule, strict=True)
    )
    graph = report_of(Planned(planned.problem, schedule, GraphPlan("f", "d", num, plan), options))
    for one in graph.transfers:
        assert (one.reason == "hidden") == (one.exposed_ms <= 1e-6)
        assert (one.reason == "memory") == (one.bytes_short > 0)
        assert (one.reason == "not planned") == (one.saves_ms > 0)
        assert one.saves_ms <= 0.25 * graph.simulated_ms
    assert graph.bound_ms <= graph.simulated_ms + 1e-9
    assert graph.exposed_ms == pytest.approx(graph.simulated_ms - graph.compute_ms)
