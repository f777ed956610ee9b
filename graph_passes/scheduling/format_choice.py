"""Choice of formats: which collectives travel in fewer bits, where the planner decides.

A format shortens a transfer and lengthens what computes::

    as it is    compute   |======== transfer ========| compute'     exposed in the middle
    formatted   compute + |=== transfer ===| + compute'             + encodes, decodes

Where the transfer is hidden, only the second remains. So formats go to the collectives whose format
makes the simulated step shorter, those that expose the most time first; the schedule is decided
anew with them, and they are kept only if that one is faster than the best without any.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.schedule import Options, decide
from graph_passes.scheduling.simulation import Schedule, simulate, total_ms

_ROUNDS = 3
"""A schedule decided with formats may expose other collectives; so often they are looked at."""
_WORTH = 0.1
"""A format must save this part of what the collective takes without it."""
FASTER = 0.99
"""All formats of a graph together must bring its time below this part of that without any: they
cost accuracy, and the cost model errs too."""


@dataclass(frozen=True)
class FormatChoice:
    """Formats for one graph.

    Attributes:
        chosen: indices of the transfers that have theirs.
        without_ms: simulated time of the graph without any.
        exposed_ms: by index of the transfer, its exposed time without any.
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
        problem: without formats that need not be.
        formatted: the same with all of them; its transfers stand in the same order.
        options: of the schedules that are compared.

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
    """A problem in which some transfers have their format."""
    transfers = tuple(
        _in_format(one, other) if i in chosen else one
        for i, (one, other) in enumerate(zip(problem.transfers, formatted.transfers, strict=True))
    )
    return replace(problem, transfers=transfers)


def _in_format(one: Transfer, other: Transfer) -> Transfer:
    """The first as the second travels; it stays between the same steps."""
    return replace(other, ready=one.ready, need=one.need, is_dependent=one.is_dependent)


def _decided(problem: Problem, chosen: frozenset[int], options: Options) -> _Decided:
    schedule, _ = decide(problem, options)
    return _Decided(chosen, schedule, total_ms(problem, schedule))


def _improved(problem: Problem, formatted: Problem, best: _Decided) -> frozenset[int]:
    """Formats that shorten a schedule as it stands: more of them, less those without effect."""
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


__all__ = ["FASTER", "FormatChoice", "choose_formats", "with_formats"]
