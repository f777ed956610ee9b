"""Planner: the pass that places all collectives of a graph, from a cost model or from a plan.

Before, in whatever order tracing left:

    ag(0) wait(0) compute(0) ag(1) wait(1) compute(1) ...
    rs(1) wait(1) compute(0) rs(0) wait(0)

After:

    ag(0) ag(1) wait(0) compute(0) ag(2) wait(1) compute(1) ...
    rs(1) compute(0) wait(1) rs(0) wait(0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graph_passes.graph_pass import GraphPass
from graph_passes.graph_utils import collectives
from graph_passes.markers import set_launch
from graph_passes.scheduling.limits import BudgetError, too_small
from graph_passes.scheduling.plan import (
    GraphPlan,
    Plan,
    PlanError,
    digest_of,
    phase_of,
    plan_of,
    schedule_from,
)
from graph_passes.scheduling.problem import Dissection, Problem
from graph_passes.scheduling.schedule import Options, apply, decide, pose
from graph_passes.scheduling.simulation import Schedule


@dataclass(frozen=True)
class Planned:
    """Result of planning one graph.

    Attributes:
        problem: what there was to decide.
        schedule: what was decided.
        plan: the same as data.
        options: from which it follows.
        peak_bytes: most bytes alive in the graph as it is now, on top of what outlives it;
            ``None`` where nothing predicts them.
    """

    problem: Problem
    schedule: Schedule
    plan: GraphPlan
    options: Options
    peak_bytes: int | None = None


class Planner(GraphPass):
    """Place all collectives, so that they run while something else is computed.

    Args:
        options: cost model, limits, and which decisions to take; by default ``Options()``.
        live_bytes_of: bytes alive at every node of a graph; ``None``: they are not limited.
        plan: places to take instead of deciding; graphs that it does not know are an error.
        observe: called with what was done to each graph.
    """

    name = "planner"
    is_bitwise = True
    required = (
        "it alone keeps the memory budget and applies a plan; disable prefetch, sink_waits and "
        "bucket for the order without any of its decisions"
    )

    def __init__(
        self,
        options: Options | None = None,
        live_bytes_of: Callable[[fx.Graph], Sequence[int]] | None = None,
        plan: Plan | None = None,
        observe: Callable[[Planned], None] | None = None,
    ) -> None:
        self.options = options or Options()
        self.live_bytes_of = live_bytes_of
        self.plan = plan
        self.observe = observe

    def cache_key(self) -> str:
        """Everything that a decision follows from."""
        return f"{self.options!r} {self.plan.digest() if self.plan else ''}"

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder a graph in place.

        Raises:
            BudgetError: the memory budget is too small for the graph as it is.
            PlanError: the plan was made for another graph, or cannot be applied.
        """
        if next(collectives(graph), None) is None:
            return
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        if self.plan is None:
            schedule, launches = self._place(graph, parts, problem)
        else:
            schedule, launches = _from_plan(self.plan, parts, problem)
            apply(graph, schedule, parts)
        self._mark_launches(parts, launches)
        if self.observe is not None:
            plan = plan_of(parts, problem, schedule, launches)
            peak = self._peak(graph)
            self.observe(Planned(problem, schedule, plan, self.options, peak))

    def _peak(self, graph: fx.Graph) -> int | None:
        """Most bytes alive in a graph as it is now."""
        return max(self.live_bytes_of(graph), default=0) if self.live_bytes_of else None

    def _place(
        self, graph: fx.Graph, parts: Dissection, problem: Problem
    ) -> tuple[Schedule, dict[int, int]]:
        """Decide and apply; again with less, where the graph itself then exceeds a given budget.

        The problem knows memory during steps, the graph also in between.
        """
        budget = self.options.limits.memory_budget_bytes
        options = self.options
        peak = None
        while True:
            try:
                schedule, launches = decide(problem, options)
            except BudgetError:
                if peak is None:
                    raise
                raise BudgetError(too_small(peak, budget)) from None
            apply(graph, schedule, parts)
            peak = self._peak(graph)
            if budget is None or peak is None or peak <= budget:
                return schedule, launches
            allowed = (options.limits.memory_budget_bytes or budget) - (peak - budget)
            limits = replace(options.limits, memory_budget_bytes=max(1, allowed))
            options = replace(options, limits=limits)

    @staticmethod
    def _mark_launches(parts: Dissection, launches: dict[int, int]) -> None:
        sizes: dict[int, int] = {}
        for launch in launches.values():
            sizes[launch] = sizes.get(launch, 0) + 1
        for index, launch in launches.items():
            set_launch(parts.chains[index].collective, launch if sizes[launch] > 1 else None)


def _from_plan(plan: Plan, parts: Dissection, problem: Problem) -> tuple[Schedule, dict[int, int]]:
    digest = digest_of(parts)
    for graph_plan in plan.graphs:
        if graph_plan.digest == digest:
            return schedule_from(graph_plan, problem)
    raise PlanError(_unknown_graph(plan, parts, digest))


def _unknown_graph(plan: Plan, parts: Dissection, digest: str) -> str:
    phase = phase_of(parts)
    known = [f"{g.phase} {g.digest[:12]} ({g.num_steps} steps)" for g in plan.graphs]
    return (
        f"plan: expected a plan for this {phase} graph ({digest[:12]}, {len(parts.steps)} steps, "
        f"{len(parts.chains)} collectives), got plans for {', '.join(known) or 'no graph'}. The "
        "model, its shapes, the world size, the compiler or the passes differ: make the plan anew."
    )


__all__ = ["Planned", "Planner"]
