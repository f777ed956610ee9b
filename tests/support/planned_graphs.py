"""Small scheduling problems with a given schedule, for what is said of them."""

from __future__ import annotations

from graph_passes.markers import CollectiveKind, Mark
from graph_passes.scheduling.plan import GraphPlan, PlannedTransfer
from graph_passes.scheduling.planner import Planned
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.schedule import Options
from graph_passes.scheduling.simulation import Limits, Placement

NO_LIMIT = Limits(memory_budget_bytes=10**9, max_in_flight=9)

Place = tuple[str, CollectiveKind, float, int, int, int, int]
"""Unit, kind, milliseconds, ready, need, issue, wait."""


def make_planned(
    *places: Place,
    limits: Limits = NO_LIMIT,
    compute: tuple[float, ...] = (2.0,) * 4,
    launches: tuple[int, ...] | None = None,
    phase: str = "forward",
) -> Planned:
    """One step a unit u0, u1, ...; each transfer sends and holds 100 bytes; placed as given."""
    transfers = tuple(
        Transfer(Mark(unit, kind, "forward", 0), "g", ms, 0.5, 100, ready, need, 100)
        for unit, kind, ms, ready, need, _, _ in places
    )
    units = tuple(f"u{i}" for i in range(len(compute)))
    problem = Problem(compute, units, (1000,) * len(compute), transfers)
    schedule = tuple(Placement(i, place[5], place[6]) for i, place in enumerate(places))
    launch_of = launches or tuple(range(len(places)))
    planned = tuple(
        PlannedTransfer(p[0], p[1], 0, p[5], p[6], launch_of[i]) for i, p in enumerate(places)
    )
    plan = GraphPlan(phase, "digest", len(compute), planned)
    return Planned(problem, schedule, plan, Options(limits=limits), peak_bytes=1234)
