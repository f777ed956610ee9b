"""The best schedule of a small problem by exhaustive search: an independent reference.

Depth first over gaps; at each gap any sequence of the gathers that may be issued, and any set of
reductions in flight to wait for. Branches that cannot beat the best one found are cut off by a
bound that needs no schedule: remaining compute, and remaining work on the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.simulation import Limits


@dataclass
class _Search:
    problem: Problem
    budget: int
    max_in_flight: int
    best_ms: float
    seen: dict[tuple[object, ...], list[tuple[float, ...]]] = field(default_factory=dict)


def optimum_ms(problem: Problem, limits: Limits, upper_ms: float) -> float:
    """Least total time within resolved limits, one link; ``upper_ms``: a time that is reachable."""
    budget = limits.memory_budget_bytes
    assert budget is not None
    search = _Search(problem, budget, limits.max_in_flight, upper_ms + 1e-9)
    unissued = frozenset(range(len(problem.transfers)))
    _visit(search, 0, 0.0, 0.0, unissued, {})
    return search.best_ms


def _visit(
    search: _Search,
    gap: int,
    now: float,
    free: float,
    unissued: frozenset[int],
    flying: dict[int, float],
) -> None:
    """Everything that can be issued and waited for at a gap, then the step behind it."""
    problem = search.problem
    compute_left = sum(problem.compute_ms[gap:])
    link_left = sum(problem.transfers[i].ms for i in unissued)
    ends = list(flying.values())
    if max([now + compute_left, max(now, free) + link_left if unissued else 0, *ends]) >= (
        search.best_ms
    ):
        return
    key = (gap, unissued, tuple(sorted(flying)))
    state = (now, free, *(flying[i] for i in sorted(flying)))
    if any(
        all(a <= b for a, b in zip(old, state, strict=True)) for old in search.seen.get(key, [])
    ):
        return
    search.seen.setdefault(key, []).append(state)
    for index in unissued:
        transfer = problem.transfers[index]
        if transfer.ready <= gap:
            end = max(now, free) + transfer.ms
            _visit(search, gap, now, end, unissued - {index}, {**flying, index: end})
    _leave(search, gap, now, free, unissued, flying)


def _leave(
    search: _Search,
    gap: int,
    now: float,
    free: float,
    unissued: frozenset[int],
    flying: dict[int, float],
) -> None:
    """Wait for what must be waited for and for any more, run the step."""
    problem = search.problem
    due = {i for i in flying if problem.transfers[i].need <= gap}
    if any(problem.transfers[i].need <= gap for i in unissued):
        return
    others = [i for i in flying if i not in due and not problem.transfers[i].is_gather]
    for count in range(len(others) + 1):
        for more in combinations(others, count):
            waited = due | set(more)
            left = {i: end for i, end in flying.items() if i not in waited}
            after = max([now, *(flying[i] for i in waited)])
            if gap == problem.num_steps:
                search.best_ms = min(search.best_ms, after)
                continue
            if _fits(search, gap, unissued, left):
                _visit(search, gap + 1, after + problem.compute_ms[gap], free, unissued, left)


def _fits(search: _Search, gap: int, unissued: frozenset[int], flying: dict[int, float]) -> bool:
    """Whether the step behind a gap keeps the limits."""
    problem = search.problem
    live = problem.base_bytes[gap]
    gathers = reductions = 0
    for index, transfer in enumerate(problem.transfers):
        if transfer.is_gather:
            if index in flying:
                live += transfer.held_bytes
                gathers += 1
        elif index in flying or (index in unissued and transfer.ready <= gap):
            live += transfer.held_bytes
            reductions += index in flying
    return live <= search.budget and max(gathers, reductions) <= search.max_in_flight
