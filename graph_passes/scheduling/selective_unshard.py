"""Selective unshard: with memory to spare, some units stay unsharded between forward and backward.

Resharding after forward costs an all-gather in the backward. Where a memory budget leaves room, the
units are kept whose all-gather costs the most exposed time for the bytes that they hold::

    forward ... wait(k) compute(k) ........ | ........ compute'(k)     kept: alive in between
    forward ... wait(k) compute(k)  freed   | ag(k) wait(k) compute'(k)

Tried on the simulated clock, one unit after the other, until nothing fits or nothing is gained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from graph_passes.graph_utils import collectives, wait_of
from graph_passes.markers import mark_of
from graph_passes.memory.liveness import storages
from graph_passes.scheduling.limits import BudgetError, too_small
from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.schedule import Options, pose, quick
from graph_passes.scheduling.simulation import total_ms

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
    """The units to keep within ``options.limits.memory_budget_bytes``, best first.

    Args:
        forward: as it is with every unit resharded.
        backward: the same; put into unscheduled order.
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
    """For every unit that reshards, the position behind which it is freed in the forward."""
    ends = {node: lifetime.end for lifetime in storages(forward) for node in lifetime.nodes}
    result: dict[str, int] = {}
    for node in collectives(forward):
        mark = mark_of(node)
        if mark is not None and mark.kind == "all_gather" and mark.reshards:
            result[mark.unit] = max(ends[wait_of(node)], result.get(mark.unit, 0))
    return result


def _candidates(problem: Problem, last_use: dict[str, int]) -> list[str]:
    units = [t.mark.unit for t in problem.transfers if t.is_gather and t.mark.unit in last_use]
    return list(dict.fromkeys(units))


def _held(problem: Problem, unit: str) -> int:
    return sum(t.held_bytes for t in problem.transfers if t.is_gather and t.mark.unit == unit)


def _keep(state: _State, unit: str, last_use: int, options: Options) -> _State | None:
    """The state with one unit more kept; ``None`` where the backward has no room for it."""
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
