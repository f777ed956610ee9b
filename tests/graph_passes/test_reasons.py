"""Why a collective is where it is: reasons by hand, and of decided schedules."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
from planned_graphs import NO_LIMIT, Place, make_planned

from fsdp_dynamo.observe.explanation import reason_of, suggestion_for
from graph_passes.markers import CollectiveKind
from graph_passes.report import report_of
from graph_passes.scheduling.plan import GraphPlan, PlannedTransfer
from graph_passes.scheduling.planner import Planned
from graph_passes.scheduling.schedule import decide
from graph_passes.scheduling.simulation import Limits

ONE_IN_FLIGHT = Limits(memory_budget_bytes=10**9, max_in_flight=1)
GATHER: CollectiveKind = "all_gather"
REDUCE: CollectiveKind = "reduce_scatter"


@pytest.mark.parametrize(
    ("limits", "places", "reasons"),
    [
        pytest.param(
            NO_LIMIT,
            [
                ("u0", GATHER, 1.0, 0, 0, 0, 0),
                ("u1", GATHER, 1.0, 0, 1, 0, 1),
                ("u2", GATHER, 3.0, 1, 2, 1, 2),
                ("u3", REDUCE, 1.0, 4, 4, 4, 4),
            ],
            ["dependency: .*start of the graph", "hidden", "dependency", "dependency: .*end of"],
            id="dependencies",
        ),
        pytest.param(
            NO_LIMIT,
            [("u1", REDUCE, 3.0, 1, 2, 1, 2)],
            ["dependency: its result"],
            id="of a reduction",
        ),
        pytest.param(
            ONE_IN_FLIGHT,
            [("u2", GATHER, 1.0, 0, 2, 1, 2), ("u3", GATHER, 3.0, 0, 3, 2, 3)],
            ["hidden", "in flight: max_in_flight=1"],
            id="in flight",
        ),
        pytest.param(  # it could only go earlier in front of the first, which would be late
            NO_LIMIT,
            [("u2", GATHER, 2.0, 1, 2, 1, 2), ("u3", GATHER, 3.0, 0, 3, 1, 3)],
            ["hidden", "order: .*u2"],
            id="order of gathers",
        ),
        pytest.param(  # issued at once it would make the gather behind it late
            NO_LIMIT,
            [("u2", GATHER, 2.0, 1, 2, 1, 2), ("u0", REDUCE, 5.0, 1, 4, 2, 4)],
            ["hidden", "order: .*u2"],
            id="order of a reduction",
        ),
        pytest.param(
            NO_LIMIT,
            [
                ("u1", GATHER, 5.0, 0, 1, 0, 1),
                ("u2", GATHER, 5.0, 0, 2, 1, 2),
                ("u3", REDUCE, 5.0, 4, 4, 4, 4),
                ("u2", REDUCE, 4.0, 3, 4, 3, 4),
            ],
            ["dependency", "bandwidth: .*u1", "bandwidth: .*u2", ""],
            id="bandwidth",
        ),
        pytest.param(
            NO_LIMIT,
            [("u3", GATHER, 1.0, 0, 3, 3, 3)],
            ["not planned: .*1.000 ms"],
            id="not planned",
        ),
        pytest.param(
            NO_LIMIT,
            [("u0", REDUCE, 1.0, 1, 4, 1, 1)],
            ["not planned: .*1.000 ms"],
            id="a reduction that was not planned",
        ),
    ],
)
def test_reasons(limits: Limits, places: list[Place], reasons: list[str]) -> None:
    graph = report_of(make_planned(*places, limits=limits))
    found = {(t.unit, t.kind): reason_of(graph, t) for t in graph.transfers}
    for place, reason in zip(places, reasons, strict=True):
        assert re.match(reason, found[place[:2]])


def test_memory() -> None:
    late = ("u3", GATHER, 3.0, 0, 3, 2, 3)
    tight = Limits(memory_budget_bytes=1130, max_in_flight=9)
    # a neighbour holds the memory of step 1 already, and so does the other one of step 2
    held = ("u2", GATHER, 1.0, 0, 2, 1, 2)
    graph = report_of(make_planned(held, late, limits=tight))
    assert [(t.reason, t.bytes_short) for t in graph.transfers] == [("hidden", 0), ("memory", 70)]
    assert reason_of(graph, graph.transfers[1]).endswith("exceed the budget by 70 B")
    assert suggestion_for(graph, graph.transfers[1]).startswith("memory_budget_bytes=1200,")
    waited = ("u0", REDUCE, 3.0, 1, 4, 1, 2)
    graph = report_of(make_planned(waited, ("u3", GATHER, 0.5, 0, 3, 2, 3), limits=tight))
    assert (graph.transfers[0].reason, graph.transfers[0].bytes_short) == ("memory", 70)


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
