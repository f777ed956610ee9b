"""Planner: the pass that places all collectives of a graph, from a cost model or from a plan.

Before, in whatever order tracing left:

    ag(0) wait(0) compute(0) ag(1) wait(1) compute(1) ...
    rs(1) wait(1) compute(0) rs(0) wait(0)

After:

    ag(0) ag(1) wait(0) compute(0) ag(2) wait(1) compute(1) ...
    rs(1) compute(0) wait(1) rs(0) wait(0)

Where formats may be left away (``only_where_exposed``), it also decides which collectives travel in
theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from torch import fx

from graph_passes.graph_pass import GraphPass
from graph_passes.graph_utils import collectives
from graph_passes.markers import (
    choose_format,
    has_optional_format,
    mark_of,
    set_graph,
    set_launch,
)
from graph_passes.scheduling.following import follow, launches_of, without_plan
from graph_passes.scheduling.format_choice import FASTER, FormatChoice, choose_formats
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
from graph_passes.scheduling.problem import Dissection, Problem, dissect, problem_of
from graph_passes.scheduling.schedule import Options, apply, decide, pose
from graph_passes.scheduling.simulation import Schedule, total_ms
from graph_passes.wire_format import WireFormat


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
        exposed_without_ms: by index of the transfer, its exposed time without any format that need
            not be; empty where there are none, or a plan has decided.
    """

    problem: Problem
    schedule: Schedule
    plan: GraphPlan
    options: Options
    peak_bytes: int | None = None
    exposed_without_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Placed:
    """A graph's parts and problem, where its collectives are, and what formats were chosen by."""

    parts: Dissection
    problem: Problem
    schedule: Schedule
    launches: dict[int, int]
    exposed_ms: Mapping[fx.Node, float] = field(default_factory=dict)

    @cached_property
    def plan(self) -> GraphPlan:
        """The same as data."""
        return plan_of(self.parts, self.problem, self.schedule, self.launches)


Places = Callable[[Problem], tuple[Schedule, dict[int, int]]]
"""A plan's places in a problem, and the launch of each transfer."""


class Agreement(Protocol):
    """What makes ranks do the same."""

    def __call__(self, plan: GraphPlan) -> GraphPlan:
        """What all ranks do in such a graph, for which this one has decided this."""

    def are_followed(self, plans: Sequence[GraphPlan]) -> bool:
        """Whether all ranks follow these; if not, ``cache_key`` is another one from now on."""

    def cache_key(self) -> str:
        """Which plans are followed, where code that was compiled for others must not be taken."""


class Planner(GraphPass):
    """Place all collectives, so that they run while something else is computed.

    Args:
        options: cost model, limits, and which decisions to take; by default ``Options()``.
        live_bytes_of: bytes alive at every node of a graph; ``None``: they are not limited.
        plan: places to take instead of deciding; graphs that it does not know are an error.
        observe: called with what was done to each graph.
        agree: called with what was decided; returns what all ranks do. The order of its launches is
            followed where it is another one.
    """

    name = "planner"
    is_bitwise = True  # but for formats that it may choose, where the user asked for them
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
        agree: Agreement | None = None,
    ) -> None:
        self.options = options or Options()
        self.live_bytes_of = live_bytes_of
        self.plan = plan
        self.observe = observe
        self.agree = agree
        self.last: GraphPlan | None = None  # what was done to the graph before

    def cache_key(self) -> str:
        """Everything that a decision follows from."""
        agreed = self.agree.cache_key() if self.agree else ""
        return f"{self.options!r} {self.plan.digest() if self.plan else ''} {agreed}"

    def __call__(self, graph: fx.Graph) -> None:
        """Reorder a graph in place.

        Raises:
            BudgetError: the memory budget is too small for the graph as it is.
            PlanError: the plan was made for another graph, or cannot be applied.
        """
        self.last = None
        if next(collectives(graph), None) is None:
            return
        placed = self._agreed(graph) if self.plan is None else self._given(graph, self.plan)
        self._mark(placed)
        self.last = placed.plan
        if self.observe is not None:
            exposed = tuple(
                placed.exposed_ms[chain.collective]
                for chain in placed.parts.chains
                if placed.exposed_ms
            )
            found = (placed.problem, placed.schedule, placed.plan, self.options, self._peak(graph))
            self.observe(Planned(*found, exposed))

    def _agreed(self, graph: fx.Graph) -> _Placed:
        """Places as decided, or as other ranks have decided, where their launches differ.

        Ranks whose graphs do not allow that have the same order of steps in common.
        """
        order = list(graph.nodes)
        placed = self._decided(graph)
        if self.agree is None:
            return placed
        agreed = self.agree(placed.plan)
        if launches_of(agreed) == launches_of(placed.plan):
            return placed
        _put_back(graph, order)
        try:
            return self._placed(graph, _formats_of(agreed, graph), partial(follow, agreed))
        except PlanError:
            _put_back(graph, order)
            return self._placed(graph, (), without_plan)

    def _given(self, graph: fx.Graph, plan: Plan) -> _Placed:
        """Places and formats of a plan that was made for this graph."""
        given = _plan_for(plan, dissect(graph))
        return self._placed(graph, _formats_of(given, graph), partial(schedule_from, given))

    def _placed(self, graph: fx.Graph, chosen: Collection[fx.Node], places: Places) -> _Placed:
        """The places of these collectives in their formats, and of all others in none."""
        _choose(graph, chosen)
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        schedule, launches = places(problem)
        apply(graph, schedule, parts)
        return _Placed(parts, problem, schedule, launches)

    def _decided(self, graph: fx.Graph) -> _Placed:
        """Places as decided, with the formats that make the graph faster than without them."""
        order = list(graph.nodes)
        choice, nodes = self._formats(graph)
        _put_back(graph, order)
        exposed = {} if choice is None else dict(zip(nodes, choice.exposed_ms, strict=True))
        if choice is not None and choice.chosen:
            _choose(graph, {nodes[i] for i in choice.chosen})
            try:
                placed = self._scheduled(graph)
            except BudgetError:  # messages take memory
                placed = None
            if placed is not None:
                ms = total_ms(placed.problem, placed.schedule)
                if ms < FASTER * choice.without_ms:
                    return replace(placed, exposed_ms=exposed)
            _choose(graph, ())
            _put_back(graph, order)
        return replace(self._scheduled(graph), exposed_ms=exposed)

    def _scheduled(self, graph: fx.Graph) -> _Placed:
        """The best places with the formats that the collectives have now."""
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        return _Placed(parts, problem, *self._place(graph, parts, problem))

    def _formats(self, graph: fx.Graph) -> tuple[FormatChoice | None, list[fx.Node]]:
        """The choice of formats that need not be, by index of a collective, and the collectives."""
        optional = {node for node in collectives(graph) if has_optional_format(node)}
        if not optional:
            return None, []
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        _choose(graph, optional)
        formatted = problem_of(graph, self.options.cost, parts)
        _choose(graph, ())
        choice = choose_formats(problem, formatted, self.options)
        return choice, [chain.collective for chain in parts.chains]

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
            if budget is None:
                return schedule, launches
            peak = self._peak(graph)
            if peak is None or peak <= budget:
                return schedule, launches
            allowed = (options.limits.memory_budget_bytes or budget) - (peak - budget)
            limits = replace(options.limits, memory_budget_bytes=max(1, allowed))
            options = replace(options, limits=limits)

    @staticmethod
    def _mark(placed: _Placed) -> None:
        """Let collectives say what they are launched with, and of which graph they are."""
        sizes = Counter(placed.launches.values())
        for index, launch in placed.launches.items():
            node = placed.parts.chains[index].collective
            set_launch(node, launch if sizes[launch] > 1 else None)
            set_graph(node, placed.plan.short_digest)


def _put_back(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put a graph into the order that it had: some collectives stay where they are in it."""
    *nodes, output = order
    for node in nodes:
        output.prepend(node)


def _choose(graph: fx.Graph, chosen: Collection[fx.Node]) -> None:
    """Let these collectives travel in their format, and no others that need not."""
    for node in collectives(graph):
        if has_optional_format(node):
            choose_format(node, node in chosen)


def _formats_of(plan: GraphPlan, graph: fx.Graph) -> set[fx.Node]:
    """Collectives whose optional format a plan wants."""
    wanted = Counter((t.unit, t.kind, t.ordinal, t.wire) for t in plan.transfers if t.wire)
    found = set()
    for node in collectives(graph):
        mark = mark_of(node)
        wire = None if mark is None else WireFormat.decode(mark.wire)
        if mark is not None and wire is not None:
            key = (mark.unit, mark.kind, mark.ordinal, wire.chosen().encode())
            if wanted[key] > 0:
                wanted[key] -= 1
                found.add(node)
    return found


def _plan_for(plan: Plan, parts: Dissection) -> GraphPlan:
    digest = digest_of(parts)
    for graph_plan in plan.graphs:
        if graph_plan.digest == digest:
            return graph_plan
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
