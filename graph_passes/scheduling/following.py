"""A plan that was made for a graph of other shapes: its order, with places as near as they may be.

What ranks must have in common is the order in which collectives are launched, which of them
together, and their formats. Where batches differ between ranks, so do times, and each would decide
otherwise; so one decides, and the others follow.
"""

from __future__ import annotations

from itertools import groupby

from graph_passes.scheduling.plan import GraphPlan, PlanError, PlannedTransfer, indices_by_name
from graph_passes.scheduling.problem import Problem
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
    left = indices_by_name(problem)
    scale = problem.num_steps / max(1, plan.num_steps)
    schedule = []
    launches = {}
    gap = 0
    for planned in _in_order(plan):
        found = [(t, left.get((t.unit, t.kind, t.ordinal), [])) for t in planned]
        if not all(indices for _, indices in found):
            raise PlanError(f"plan: {planned[0].name}: expected a collective of the graph")
        members = [(t, indices.pop(0)) for t, indices in found]
        transfers = [problem.transfers[index] for _, index in members]
        gap = max(gap, round(planned[0].issue * scale), *(t.ready for t in transfers))
        if any(gap > t.need or t.wire != p.wire for t, p in zip(transfers, planned, strict=True)):
            raise PlanError(f"plan: {planned[0].name}: expected a place and format of the graph")
        for (one, index), transfer in zip(members, transfers, strict=True):
            wait = min(max(round(one.wait * scale), gap), transfer.need)
            schedule.append(Placement(index, gap, wait))
            launches[index] = one.launch
    if any(left.values()):
        raise PlanError("plan: expected every collective of the graph")
    return tuple(schedule), launches


def _in_order(plan: GraphPlan) -> list[list[PlannedTransfer]]:
    """Launches in the order in which the graph has them: by gap, in a gap as the plan has them."""
    transfers = sorted(plan.transfers, key=lambda transfer: transfer.issue)
    return [list(launch) for _, launch in groupby(transfers, key=lambda t: t.launch)]
