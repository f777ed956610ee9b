"""Sink waits: a reduction is issued as soon as its gradient is ready and waited for late.

Before::

    rs(k) wait(k) compute(k-1) rs(k-1) wait(k-1) compute(k-2) ...

After::

    rs(k) compute(k-1) rs(k-1) compute(k-2) rs(k-2) wait(k) ...

Until its wait a reduction holds the unsharded gradient and what arrives for it. The oldest is
waited for when memory or places in flight run out, and all at the end.
"""

from __future__ import annotations

from graph_passes.scheduling.limits import Limits
from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.simulation import Placement, live_bytes


def place_waits(problem: Problem, gather_gaps: dict[int, int], limits: Limits) -> dict[int, int]:
    """The gap of each reduction's wait.

    Args:
        problem: of one graph.
        gather_gaps: where the gathers are issued.
        limits: resolved for it.

    Returns:
        Gap by index of the transfer.
    """
    budget = limits.memory_budget_bytes
    assert budget is not None  # resolved
    gathers = tuple(Placement(i, gap, problem.transfers[i].need) for i, gap in gather_gaps.items())
    live = live_bytes(problem, gathers)
    begins: list[list[int]] = [[] for _ in range(problem.num_steps + 1)]
    for index, transfer in enumerate(problem.transfers):
        if not transfer.is_gather:
            begins[transfer.ready].append(index)
    in_flight: list[int] = []
    held = 0
    gaps: dict[int, int] = {}
    for gap in range(problem.num_steps + 1):
        in_flight += begins[gap]
        held += sum(problem.transfers[i].held_bytes for i in begins[gap])
        for index in list(in_flight):
            crowded = len(in_flight) > limits.max_in_flight or (
                gap < problem.num_steps and live[gap] + held > budget
            )
            if crowded or problem.transfers[index].need <= gap:
                in_flight.remove(index)
                held -= problem.transfers[index].held_bytes
                gaps[index] = gap
    return gaps
