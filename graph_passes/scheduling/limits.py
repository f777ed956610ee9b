"""Limits of a schedule: memory, and places in flight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Schedule, live_bytes, peak_bytes, unscheduled


class BudgetError(ValueError):
    """A memory budget that not even the unscheduled graph keeps."""


def too_small(least_bytes: int, budget_bytes: int | None, where: str = "") -> str:
    """Message of a ``BudgetError``."""
    return (
        f"memory_budget_bytes: expected at least {least_bytes:,} for this graph{where}, got "
        f"{budget_bytes or 0:,}. Raise the budget, wrap smaller units, or checkpoint activations."
    )


@dataclass(frozen=True)
class Limits:
    """Bounds of a schedule.

    Attributes:
        memory_budget_bytes: what may be alive during any step; ``None``: the unscheduled graph's
            peak, the largest unsharded flat parameter, and the largest unsharded gradient or once
            more the parameter: one is gathered ahead while the gradient of another is on its way.
        max_in_flight: gathers issued ahead of their use, and reductions not yet waited for, at
            most; 1 or more each.
        margin: how much longer than the model says a gather is taken to last when its place is
            chosen, so that a model that is somewhat wrong still hides it.

    Raises:
        ValueError: a number outside those bounds.
    """

    memory_budget_bytes: int | None = None
    max_in_flight: int = 3
    margin: float = 1.5

    def __post_init__(self) -> None:
        if self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected 1 or more, got {self.max_in_flight!r}")
        if self.margin < 1:
            raise ValueError(f"margin: expected 1 or more, got {self.margin!r}")
        if self.memory_budget_bytes is not None and self.memory_budget_bytes <= 0:
            raise ValueError(
                f"memory_budget_bytes: expected more than 0, got {self.memory_budget_bytes!r}"
            )

    def resolved(self, problem: Problem) -> Limits:
        """These limits with the budget of a problem filled in.

        Raises:
            BudgetError: the unscheduled graph does not keep the budget.
        """
        least = peak_bytes(problem, unscheduled(problem))
        if self.memory_budget_bytes is None:
            gathers = [t.held_bytes for t in problem.transfers if t.is_gather]
            gradients = [t.payload_bytes for t in problem.transfers if not t.is_gather]
            ahead = max(gathers, default=0)
            on_its_way = max([ahead, *gradients]) if gathers else 0
            return replace(self, memory_budget_bytes=max(1, least + ahead + on_its_way))
        if self.memory_budget_bytes < least:
            step = live_bytes(problem, unscheduled(problem)).index(least)
            where = f" without any prefetch (its peak is in unit '{problem.units[step]}')"
            raise BudgetError(too_small(least, self.memory_budget_bytes, where))
        return self


def is_within(problem: Problem, schedule: Schedule, limits: Limits) -> bool:
    """Whether a schedule keeps resolved limits."""
    budget = limits.memory_budget_bytes
    if budget is not None and peak_bytes(problem, schedule) > budget:
        return False
    return max(_in_flight(problem, schedule), default=0) <= limits.max_in_flight


def _in_flight(problem: Problem, schedule: Schedule) -> list[int]:
    """During each step, the larger of gathers and reductions in flight."""
    counts = {True: [0] * (problem.num_steps + 1), False: [0] * (problem.num_steps + 1)}
    for placement in schedule:
        of_kind = counts[problem.transfers[placement.transfer].is_gather]
        of_kind[placement.issue] += 1
        of_kind[placement.wait] -= 1
    gathers = reductions = 0
    result = []
    for more_gathers, more_reductions in zip(counts[True], counts[False], strict=True):
        gathers += more_gathers
        reductions += more_reductions
        result.append(max(gathers, reductions))
    return result


class Room:
    """Memory and places in flight that are left at each step while gathers are being placed."""

    def __init__(self, problem: Problem, limits: Limits) -> None:
        budget = limits.memory_budget_bytes
        assert budget is not None  # resolved
        self._free = [budget - base for base in problem.base_bytes]
        self._places = [limits.max_in_flight] * problem.num_steps

    def earliest(self, transfer: Transfer, wanted: int) -> int:
        """The earliest gap from ``wanted`` on from which the transfer fits until its need."""
        for step in range(transfer.need - 1, wanted - 1, -1):
            if self._free[step] < transfer.held_bytes or self._places[step] < 1:
                return step + 1
        return wanted

    def take(self, transfer: Transfer, gap: int) -> None:
        """Reserve what the transfer holds from a gap to its need."""
        for step in range(gap, transfer.need):
            self._free[step] -= transfer.held_bytes
            self._places[step] -= 1


__all__ = ["BudgetError", "Limits"]
