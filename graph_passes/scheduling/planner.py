"""Planner: the pass that places all collectives of a graph, from a cost model or from a plan.

Before, in whatever order tracing left:

    ag(0) wait(0) compute(0) ag(1) wait(1) compute(1) ...
    rs(1) wait(1) compute(0) rs(0) wait(0)

After:

    ag(0) ag(1) wait(0) compute(0) ag(2) wait(1) compute(1) ...
    rs(1) compute(0) wait(1) rs(0) wait(0)

Where formats are optional (``only_where_exposed``), it also decides which collectives use theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Protocol

from torch import fx

from graph_passes.graph_pass import GraphPass
from graph_passes.graph_utils import collectives, is_gather, wait_of
from graph_passes.markers import (
    choose_format,
    has_optional_format,
    mark_of,
    set_graph,
    set_launch,
)
from graph_passes.memory.liveness import storages
from graph_passes.scheduling.plan import (
    GraphPlan,
    Plan,
    PlanError,
    digest_of,
    phase_of,
    plan_of,
    schedule_from,
)
from graph_passes.scheduling.problem import Dissection, Problem, Transfer, dissect, problem_of
from graph_passes.scheduling.schedule import (
    Options,
    apply,
    decide,
    follow,
    launches_of,
    pose,
    quick,
    without_plan,
)
from graph_passes.scheduling.simulation import BudgetError, Schedule, simulate, too_small, total_ms
from graph_passes.wire_format import WireFormat


@dataclass(frozen=True)
class Planned:
    """Result of planning one graph.

    Attributes:
        problem: what there was to decide.
        schedule: what was decided.
        plan: the schedule as data.
        options: options from which it follows.
        peak_bytes: predicted peak of the scheduled graph, on top of what outlives it; ``None``
            without a prediction.
        exposed_without_ms: exposed time of each transfer without any optional format; empty if
            there are none, or a plan decided.
    """

    problem: Problem
    schedule: Schedule
    plan: GraphPlan
    options: Options
    peak_bytes: int | None = None
    exposed_without_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Placed:
    """A graph whose collectives were placed; ``exposed_ms`` is that without optional formats."""

    parts: Dissection
    problem: Problem
    schedule: Schedule
    launches: dict[int, int]
    exposed_ms: Mapping[fx.Node, float] = field(default_factory=dict)

    @cached_property
    def plan(self) -> GraphPlan:
        return plan_of(self.parts, self.problem, self.schedule, self.launches)


Places = Callable[[Problem], tuple[Schedule, dict[int, int]]]
"""Maps a problem to places, and to the launch of each transfer."""


class Agreement(Protocol):
    """Agreement of all ranks on one plan."""

    def __call__(self, plan: GraphPlan) -> GraphPlan:
        """Return the plan that all ranks follow in a graph, given this rank's."""

    def are_followed(self, plans: Sequence[GraphPlan]) -> bool:
        """Return whether all ranks follow these plans; if not, ``cache_key`` changes."""

    def cache_key(self) -> str:
        """Return a text that tells code compiled for other plans apart."""


class Planner(GraphPass):
    """Place all collectives, so that they run while something else is computed.

    Args:
        options: cost model, limits, and decisions to take; by default ``Options()``.
        live_bytes_of: bytes alive at every node of a graph; ``None``: no memory limit.
        plan: places to use; a graph that it does not know is an error. ``None``: decide.
        observe: called with the result for each graph.
        agree: maps this rank's plan to the plan that all ranks follow; if its launches differ, its
            order is followed.
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
        """Return everything that a decision follows from."""
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
        """Place collectives as decided, or as all ranks do if their launches differ.

        If the graph does not allow the order of all ranks, it gets the order of steps
        (``without_plan``), which is the same in every such graph.
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
        """Place collectives as a plan for this graph says."""
        given = _plan_for(plan, dissect(graph))
        return self._placed(graph, _formats_of(given, graph), partial(schedule_from, given))

    def _placed(self, graph: fx.Graph, chosen: Collection[fx.Node], places: Places) -> _Placed:
        """Place collectives; only the ``chosen`` ones use their optional formats."""
        _choose(graph, chosen)
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        schedule, launches = places(problem)
        apply(graph, schedule, parts)
        return _Placed(parts, problem, schedule, launches)

    def _decided(self, graph: fx.Graph) -> _Placed:
        """Place collectives as decided; use optional formats only if the graph gets faster."""
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
        """Find the best places with the current formats."""
        parts, problem = pose(graph, self.options.cost, self.live_bytes_of)
        return _Placed(parts, problem, *self._place(graph, parts, problem))

    def _formats(self, graph: fx.Graph) -> tuple[FormatChoice | None, list[fx.Node]]:
        """Choose optional formats; return the choice, and the collectives that it indexes."""
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
        return max(self.live_bytes_of(graph), default=0) if self.live_bytes_of else None

    def _place(
        self, graph: fx.Graph, parts: Dissection, problem: Problem
    ) -> tuple[Schedule, dict[int, int]]:
        """Decide and apply; decide again with a smaller budget while the graph exceeds the user's.

        The problem knows the memory during steps only, the graph also between them.
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
        """Mark collectives with their launch and with the digest of their graph."""
        sizes = Counter(placed.launches.values())
        for index, launch in placed.launches.items():
            node = placed.parts.chains[index].collective
            set_launch(node, launch if sizes[launch] > 1 else None)
            set_graph(node, placed.plan.short_digest)


def _put_back(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Restore the order of a graph: dependent collectives are pinned by it."""
    *nodes, output = order
    for node in nodes:
        output.prepend(node)


def _choose(graph: fx.Graph, chosen: Collection[fx.Node]) -> None:
    """Let these collectives use their optional formats, and no others."""
    for node in collectives(graph):
        if has_optional_format(node):
            choose_format(node, node in chosen)


def _formats_of(plan: GraphPlan, graph: fx.Graph) -> set[fx.Node]:
    """Return the collectives whose optional format a plan uses."""
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


# -- selective unshard -----------------------------------------------------------------------------
# Selective unshard: with memory to spare, some units stay unsharded between forward and backward.
#
# Resharding after forward costs an all-gather in the backward. Within a memory budget, the units
# are kept whose all-gather costs the most exposed time per byte held::
#
#     forward ... wait(k) compute(k) ........ | ........ compute'(k)     kept: alive in between
#     forward ... wait(k) compute(k)  freed   | ag(k) wait(k) compute'(k)
#
# Units are tried on the simulated clock, one after the other, until none fits or none gains.


LiveBytes = Callable[[fx.Graph], Sequence[int]]


@dataclass(frozen=True)
class _State:
    """Both graphs with the units that are kept so far."""

    forward_live: tuple[int, ...]
    backward: Problem
    ms: float


def choose_kept(
    forward: fx.Graph, backward: fx.Graph, options: Options, live_bytes_of: LiveBytes
) -> tuple[str, ...]:
    """Return the units to keep within ``options.limits.memory_budget_bytes``, best first.

    Args:
        forward: the forward with every unit resharded.
        backward: the backward; put into unscheduled order.
        options: the planner's; without a budget nothing is kept.
        live_bytes_of: bytes alive at every node of a graph.

    Raises:
        BudgetError: the budget is too small without anything kept.
    """
    budget = options.limits.memory_budget_bytes
    if budget is None:
        return ()
    last_use = _last_uses(forward)
    state = _start(forward, backward, options, live_bytes_of)
    if max(state.forward_live, default=0) > budget:
        raise BudgetError(too_small(max(state.forward_live), budget))
    kept: list[str] = []
    while True:
        best: tuple[float, str, _State] | None = None
        for unit in _candidates(state.backward, last_use):
            tried = _keep(state, unit, last_use[unit], options)
            if tried is None or max(tried.forward_live) > budget:
                continue
            gain = (state.ms - tried.ms) / max(1, _held(state.backward, unit))
            if gain > 0 and (best is None or gain > best[0]):
                best = (gain, unit, tried)
        if best is None:
            return tuple(kept)
        kept.append(best[1])
        state = best[2]


def _start(
    forward: fx.Graph, backward: fx.Graph, options: Options, live_bytes_of: LiveBytes
) -> _State:
    _, problem = pose(backward, options.cost, live_bytes_of)
    ms = total_ms(problem, quick(problem, options))
    return _State(tuple(live_bytes_of(forward)), problem, ms)


def _last_uses(forward: fx.Graph) -> dict[str, int]:
    """Return the position after which each unit that reshards is freed in the forward."""
    ends = {node: lifetime.end for lifetime in storages(forward) for node in lifetime.nodes}
    result: dict[str, int] = {}
    for node in collectives(forward):
        mark = mark_of(node)
        if mark is not None and is_gather(node) and mark.reshards:
            result[mark.unit] = max(ends[wait_of(node)], result.get(mark.unit, 0))
    return result


def _candidates(problem: Problem, last_use: dict[str, int]) -> list[str]:
    units = [t.mark.unit for t in problem.transfers if t.is_gather and t.mark.unit in last_use]
    return list(dict.fromkeys(units))


def _held(problem: Problem, unit: str) -> int:
    return sum(t.held_bytes for t in problem.transfers if t.is_gather and t.mark.unit == unit)


def _keep(state: _State, unit: str, last_use: int, options: Options) -> _State | None:
    """Return the state with one more unit kept; ``None`` if the backward has no room for it."""
    problem = state.backward
    gone = [t for t in problem.transfers if t.is_gather and t.mark.unit == unit]
    base = list(problem.base_bytes)
    for transfer in gone:
        for step in range(transfer.need):
            base[step] += transfer.held_bytes
    left = tuple(t for t in problem.transfers if t not in gone)
    smaller = replace(problem, transfers=left, base_bytes=tuple(base))
    try:
        ms = total_ms(smaller, quick(smaller, options))
    except BudgetError:
        return None
    held = sum(t.held_bytes for t in gone)
    live = [n + (held if i > last_use else 0) for i, n in enumerate(state.forward_live)]
    return _State(tuple(live), smaller, ms)


# -- format choice ---------------------------------------------------------------------------------
# Choice of optional formats: which collectives travel in fewer bits.
#
# A format shortens a transfer and lengthens the compute::
#
#     as it is    compute   |======== transfer ========| compute'     exposed in the middle
#     formatted   compute + |=== transfer ===| + compute'             + encodes, decodes
#
# If the transfer is hidden, only the cost remains. So collectives get their format if it shortens
# the simulated step, beginning with the most exposed. The schedule is decided anew with the
# formats, and they are kept only if it is faster than the best schedule without any.


_ROUNDS = 3
"""Limit of rounds: a schedule decided with formats may expose other collectives."""
_WORTH = 0.1
"""A format must save this part of the collective's time without it."""
FASTER = 0.99
"""Formats must bring a graph's time below this part of its time without: they cost accuracy."""


@dataclass(frozen=True)
class FormatChoice:
    """Formats for one graph.

    Attributes:
        chosen: indices of the transfers that use theirs.
        without_ms: simulated time of the graph without optional formats.
        exposed_ms: exposed time of each transfer without optional formats.
    """

    chosen: frozenset[int]
    without_ms: float
    exposed_ms: tuple[float, ...]


@dataclass(frozen=True)
class _Decided:
    chosen: frozenset[int]
    schedule: Schedule
    ms: float


def choose_formats(problem: Problem, formatted: Problem, options: Options) -> FormatChoice:
    """Choose formats for a graph; in the simulation it is never slower with them.

    Args:
        problem: the problem without optional formats.
        formatted: the same problem with all of them; transfers are in the same order.
        options: options of the schedules that are compared.

    Raises:
        BudgetError: as ``decide``, without any format.
    """
    best = without = _decided(problem, frozenset(), options)
    for _ in range(_ROUNDS):
        chosen = _improved(problem, formatted, best)
        if chosen == best.chosen:
            break
        tried = _decided(with_formats(problem, formatted, chosen), chosen, options)
        if tried.ms >= best.ms:
            break
        best = tried
    timings = simulate(problem, without.schedule).timings
    exposed = tuple(timings[i].exposed_ms for i in range(len(problem.transfers)))
    chosen = best.chosen if best.ms < FASTER * without.ms else frozenset()
    return FormatChoice(chosen, without.ms, exposed)


def with_formats(problem: Problem, formatted: Problem, chosen: Collection[int]) -> Problem:
    """Return a problem in which some transfers use their format."""
    transfers = tuple(
        _in_format(one, other) if i in chosen else one
        for i, (one, other) in enumerate(zip(problem.transfers, formatted.transfers, strict=True))
    )
    return replace(problem, transfers=transfers)


def _in_format(one: Transfer, other: Transfer) -> Transfer:
    """Return the formatted transfer between the same steps as the plain one."""
    return replace(other, ready=one.ready, need=one.need, is_dependent=one.is_dependent)


def _decided(problem: Problem, chosen: frozenset[int], options: Options) -> _Decided:
    schedule, _ = decide(problem, options)
    return _Decided(chosen, schedule, total_ms(problem, schedule))


def _improved(problem: Problem, formatted: Problem, best: _Decided) -> frozenset[int]:
    """Return better formats for a schedule: add those that save time, drop those that do not."""
    optional = [
        i
        for i, (one, other) in enumerate(zip(problem.transfers, formatted.transfers, strict=True))
        if one.wire != other.wire
    ]
    timings = simulate(with_formats(problem, formatted, best.chosen), best.schedule).timings
    order = sorted(optional, key=lambda i: (-timings[i].exposed_ms, i))
    chosen, ms = set(best.chosen), best.ms
    for adds, indices in ((True, order), (False, order[::-1])):
        for index in indices:
            if (index in chosen) is adds:
                continue
            other = chosen ^ {index}
            other_ms = total_ms(with_formats(problem, formatted, other), best.schedule)
            saves = (ms - other_ms) if adds else (other_ms - ms)
            if (saves > _WORTH * problem.transfers[index].ms) is adds:
                chosen, ms = other, other_ms
    return frozenset(chosen)


__all__ = ["Planned", "Planner"]
