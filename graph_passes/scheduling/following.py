"""A plan that was made for a graph of other shapes: its order, with places as near as they may be.

What ranks must have in common is the order in which collectives are launched, which of them
together, and their formats. Where batches differ between ranks, so do times, and each would decide
otherwise; so one decides, and the others follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, groupby

from graph_passes.scheduling.plan import GraphPlan, PlanError, PlannedTransfer, indices_by_name
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Placement, Schedule

Launches = tuple[tuple[tuple[str, str, int, str], ...], ...]


def launches_of(plan: GraphPlan) -> Launches:
    """What ranks must have in common: launches in order, of each its collectives and formats."""
    return tuple(
        tuple((t.unit, t.kind, t.ordinal, t.wire) for t in launch) for launch in _in_order(plan)
    )


def follow(plan: GraphPlan, problem: Problem) -> tuple[Schedule, dict[int, int]]:
    """Places of a plan's launches in its order, and the launch of each transfer.

    A plan's places are scaled to the number of steps, and moved where the graph does not allow
    them.

    Raises:
        PlanError: the graph has other collectives, or does not allow the order.
    """
    found = list(_found(plan, problem))
    # No later than whatever comes behind it can be.
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
    """Places, and a launch for each transfer, that follow from nothing but the order of steps.

    A gather is issued where the one before is needed, a reduction where its gradient is there; both
    are waited for where they are needed. Graphs of other shapes have the same launches.
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
    """The members of each launch, with their indices in a problem."""
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
    """Launches in the order in which the graph has them: by gap, in a gap as the plan has them."""
    transfers = sorted(plan.transfers, key=lambda transfer: transfer.issue)
    return [list(launch) for _, launch in groupby(transfers, key=lambda t: t.launch)]
