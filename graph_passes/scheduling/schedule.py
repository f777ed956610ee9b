"""Schedule: place all collectives of a graph, by a cost model and within limits.

Candidates are: every gather just in time; every gather as early as it fits; both with reductions
issued at once and waited for late; and the unscheduled graph. The fastest candidates are refined on
the simulated clock, and the fastest result is used. So, in the model, a schedule is never slower
than the unscheduled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby

from torch import fx

from graph_passes.cost_model import CostModel
from graph_passes.scheduling.bucketing import Bucketed, alone, bucket, coarsen, spread
from graph_passes.scheduling.placement import (
    nothing_to_gain,
    place_as_early_as_possible,
    place_just_in_time,
    place_waits,
    refine,
)
from graph_passes.scheduling.plan import GraphPlan, PlanError, PlannedTransfer, indices_by_name
from graph_passes.scheduling.problem import (
    Chain,
    Dissection,
    Problem,
    Transfer,
    dissect,
    problem_of,
)
from graph_passes.scheduling.simulation import (
    Limits,
    Placement,
    Schedule,
    by_gap,
    is_within,
    total_ms,
    unscheduled,
)

_REFINED = 2
"""Number of candidates to refine: the search is most of the planner's time."""
_CLEARLY = 0.99
"""A later candidate, which is less robust, must be this much faster."""


@dataclass(frozen=True)
class Options:
    """Decisions to take, limits and costs.

    Attributes:
        prefetch: whether to issue gathers ahead of their use.
        sink_waits: whether to wait for reductions late.
        bucket: whether to launch small neighbours together.
        limits: bounds on memory and collectives in flight.
        cost: milliseconds of compute and collectives.
    """

    prefetch: bool = True
    sink_waits: bool = True
    bucket: bool = True
    limits: Limits = field(default_factory=Limits)
    cost: CostModel = field(default_factory=CostModel)


def pose(
    graph: fx.Graph, cost: CostModel, live_bytes_of: Callable[[fx.Graph], Sequence[int]] | None
) -> tuple[Dissection, Problem]:
    """Put a graph into unscheduled order, and return its parts and the problem with its memory.

    Args:
        graph: changed in place.
        cost: milliseconds of compute and collectives.
        live_bytes_of: bytes alive at every node of a graph; ``None``: memory is left out.
    """
    parts = dissect(graph)
    problem = problem_of(graph, cost, parts)
    apply(graph, unscheduled(problem), parts)
    if live_bytes_of is None:
        return parts, problem
    live = dict(zip(graph.nodes, live_bytes_of(graph), strict=True))
    return parts, replace(problem, base_bytes=tuple(live[node] for node in parts.steps))


def decide(problem: Problem, options: Options) -> tuple[Schedule, dict[int, int]]:
    """Place all transfers; return the schedule, and the launch by index of the transfer.

    Raises:
        BudgetError: a memory budget that the unscheduled graph does not keep.
    """
    limits = options.limits.resolved(problem)
    if options.bucket:
        merged = bucket(problem)
        schedule = spread(problem, merged, _best(merged.problem, options, limits))
        if is_within(problem, schedule, limits):
            return schedule, _launches(merged)
    single = alone(problem)
    return spread(problem, single, _best(problem, options, limits)), _launches(single)


def quick(problem: Problem, options: Options) -> Schedule:
    """Return a schedule without a search: gathers just in time, reductions waited for late.

    Raises:
        BudgetError: as ``decide``.
    """
    limits = options.limits.resolved(problem)
    gaps = place_just_in_time(problem, limits) if options.prefetch else {}
    return _with_waits(problem, gaps, options, limits)


def _launches(bucketed: Bucketed) -> dict[int, int]:
    return {i: launch for launch, members in enumerate(bucketed.members) for i in members}


def _best(problem: Problem, options: Options, limits: Limits) -> Schedule:
    """Return the best schedule of the coarsened problem; no slower than the unscheduled graph."""
    coarse = coarsen(problem)
    return coarse.original(_best_of_candidates(coarse.problem, options, limits))


def _best_of_candidates(problem: Problem, options: Options, limits: Limits) -> Schedule:
    """Return the best candidate, refined if options allow it and there is something to gain."""
    plain = _with_waits(problem, {}, options, limits)
    if not options.prefetch:
        return plain
    just_in_time = _with_waits(problem, place_just_in_time(problem, limits), options, limits)
    early = _with_waits(problem, place_as_early_as_possible(problem, limits), options, limits)
    candidates = [
        candidate
        for candidate in dict.fromkeys((just_in_time, early, plain, unscheduled(problem)))
        if is_within(problem, candidate, limits)
    ]
    if options.sink_waits and not nothing_to_gain(problem, candidates):
        promising = sorted(candidates, key=partial(total_ms, problem))[:_REFINED]
        candidates = [refine(problem, c, limits) for c in candidates if c in promising]
    best, best_ms = unscheduled(problem), float("inf")
    for candidate in candidates:
        ms = total_ms(problem, candidate)
        if ms < best_ms * _CLEARLY:
            best, best_ms = candidate, ms
    return best


def _with_waits(
    problem: Problem, gather_gaps: dict[int, int], options: Options, limits: Limits
) -> Schedule:
    """Place gathers at the given gaps (default: where they are needed), reductions by the options.

    Within a gap gathers come before reductions, since they are waited for earlier.
    """
    needed = {i: t.need for i, t in enumerate(problem.transfers) if t.is_gather}
    gaps = {**needed, **gather_gaps}
    if options.sink_waits:
        waits = place_waits(problem, gaps, limits)
    else:
        waits = {i: t.ready for i, t in enumerate(problem.transfers) if not t.is_gather}
    gathers = [Placement(i, gap, problem.transfers[i].need) for i, gap in gaps.items()]
    gathers.sort(key=lambda p: (p.issue, p.wait, p.transfer))
    reductions = [Placement(i, problem.transfers[i].ready, gap) for i, gap in waits.items()]
    reductions.sort(key=lambda p: (p.issue, p.transfer))
    return (*gathers, *reductions)


def apply(graph: fx.Graph, schedule: Schedule, parts: Dissection | None = None) -> None:
    """Put the nodes of a graph into the order of a schedule.

    Args:
        graph: changed in place; nothing is added or removed.
        schedule: one placement a transfer.
        parts: ``dissect(graph)``, if it is known already.
    """
    parts = parts or dissect(graph)
    _Emitter(graph, parts, schedule).run()


class _Emitter:
    def __init__(self, graph: fx.Graph, parts: Dissection, schedule: Schedule) -> None:
        self._output = next(iter(reversed(graph.nodes)))
        self._parts = parts
        self._schedule = schedule
        self._chain_of_result: dict[fx.Node, Chain] = {}
        for chain in parts.chains:
            for node in (chain.wait, *chain.after):
                self._chain_of_result[node] = chain
        self._done: set[fx.Node] = set()

    def run(self) -> None:
        steps, chains = self._parts.steps, self._parts.chains
        for gap, (issues, waits) in enumerate(by_gap(self._schedule, len(steps))):
            # Issued first, a dependent one would pull what it needs out of its launch.
            for placement in sorted(issues, key=lambda p: self._is_dependent(chains[p.transfer])):
                self._issue(chains[placement.transfer])
            for placement in waits:
                self._wait(chains[placement.transfer])
            if gap < len(steps):
                self._emit(steps[gap])

    def _needed(self, chain: Chain, node: fx.Node) -> list[Chain]:
        """Return the chains whose results a node of this chain reads."""
        found = [self._chain_of_result.get(source) for source in node.all_input_nodes]
        return [other for other in found if other is not None and other is not chain]

    def _is_dependent(self, chain: Chain) -> bool:
        return any(self._needed(chain, node) for node in (*chain.before, chain.collective))

    def _issue(self, chain: Chain) -> None:
        for node in (*chain.before, chain.collective):
            for other in self._needed(chain, node):
                self._wait(other)
            self._emit(node)

    def _wait(self, chain: Chain) -> None:
        self._issue(chain)  # not yet issued if a collective of the same gap depends on it
        for node in (chain.wait, *chain.after):
            self._emit(node)

    def _emit(self, node: fx.Node) -> None:
        if node not in self._done:
            self._done.add(node)
            self._output.prepend(node)


# -- following -------------------------------------------------------------------------------------
# Plans for graphs of other shapes: the plan's order, with places as close as the graph allows.
#
# Ranks must have in common the order of launches, the collectives of each launch, and their
# formats. If batches differ between ranks, so do times, and each rank would decide differently. So
# one rank decides, and the others follow.


Launches = tuple[tuple[tuple[str, str, int, str], ...], ...]


def launches_of(plan: GraphPlan) -> Launches:
    """Return the launches in order, each with its collectives and formats."""
    return tuple(
        tuple((t.unit, t.kind, t.ordinal, t.wire) for t in launch) for launch in _in_order(plan)
    )


def follow(plan: GraphPlan, problem: Problem) -> tuple[Schedule, dict[int, int]]:
    """Place a plan's launches in its order, and return the launch of each transfer.

    Places are scaled to the number of steps, and changed where the graph does not allow them.

    Raises:
        PlanError: the graph has other collectives, or does not allow the order.
    """
    found = list(_found(plan, problem))
    # No launch may be later than the latest place of any launch behind it.
    latest = list(accumulate((min(t.need for _, _, t in one) for one in found[::-1]), min))[::-1]
    scale = problem.num_steps / max(1, plan.num_steps)
    schedule = []
    launches = {}
    gap = 0
    for members, most in zip(found, latest, strict=True):
        least = max(gap, *(transfer.ready for _, _, transfer in members))
        if least > most:
            raise PlanError(f"plan: {members[0][0].name}: expected a place before it is needed")
        gap = max(least, min(round(members[0][0].issue * scale), most))
        for planned, index, transfer in members:
            wait = min(max(round(planned.wait * scale), gap), transfer.need)
            schedule.append(Placement(index, gap, wait))
            launches[index] = planned.launch
    return tuple(schedule), launches


def without_plan(problem: Problem) -> tuple[Schedule, dict[int, int]]:
    """Return places and launches that follow from the order of steps alone.

    A gather is issued where the one before is needed, a reduction where its gradient is there; both
    are waited for where they are needed. Graphs of other shapes get the same launches.
    """
    before = 0
    schedule = []
    for index, transfer in enumerate(problem.transfers):
        issue = transfer.ready
        if transfer.is_gather:
            issue, before = min(max(issue, before), transfer.need), transfer.need
        schedule.append(Placement(index, issue, transfer.need))
    schedule.sort(key=lambda place: (place.issue, place.transfer))
    return tuple(schedule), {place.transfer: i for i, place in enumerate(schedule)}


def _found(
    plan: GraphPlan, problem: Problem
) -> Iterator[list[tuple[PlannedTransfer, int, Transfer]]]:
    """Yield the members of each launch, with their indices in a problem."""
    left = indices_by_name(problem)
    for launch in _in_order(plan):
        members = []
        for planned in launch:
            indices = left.get((planned.unit, planned.kind, planned.ordinal))
            if not indices or problem.transfers[indices[0]].wire != planned.wire:
                raise PlanError(f"plan: {planned.name}: expected it in the graph, in this format")
            index = indices.pop(0)
            members.append((planned, index, problem.transfers[index]))
        yield members
    if any(left.values()):
        raise PlanError("plan: expected every collective of the graph")


def _in_order(plan: GraphPlan) -> list[list[PlannedTransfer]]:
    """Return launches in the graph's order: by gap, and within a gap in the plan's order."""
    transfers = sorted(plan.transfers, key=lambda transfer: transfer.issue)
    return [list(launch) for _, launch in groupby(transfers, key=lambda t: t.launch)]


__all__ = ["Options", "apply", "decide", "pose", "quick"]
