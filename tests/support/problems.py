"""Random scheduling problems."""

from __future__ import annotations

import random

from graph_passes.markers import Mark
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import Limits, peak_bytes, unscheduled


def random_problem(
    rng: random.Random, num_units: int, steps_per_unit: int, backward: bool, max_transfers: int = 99
) -> Problem:
    """Gathers a unit, in a backward reductions too; random times and bytes."""
    num_steps = num_units * steps_per_unit
    compute = tuple(rng.uniform(0.1, 3) for _ in range(num_steps))
    transfers = []
    for unit in range(num_units):
        begin, end = unit * steps_per_unit, (unit + 1) * steps_per_unit
        transfers.append(_transfer(rng, unit, "all_gather", 0, begin))
        if backward:
            transfers.append(_transfer(rng, unit, "reduce_scatter", end, num_steps))
    units = tuple(f"u{step // steps_per_unit}" for step in range(num_steps))
    base = tuple(rng.randint(0, 200) for _ in range(num_steps))
    return Problem(compute, units, base, tuple(transfers[:max_transfers]))


def _transfer(rng: random.Random, unit: int, kind: str, ready: int, need: int) -> Transfer:
    mark = Mark(f"u{unit}", kind, "forward", 0)  # type: ignore[arg-type]
    ms, num_bytes = rng.uniform(0.2, 6), rng.randint(1, 100)
    return Transfer(mark, "g", ms, 0.05, num_bytes, ready, need, num_bytes)


def random_limits(rng: random.Random, problem: Problem) -> Limits:
    """Some memory, some places in flight; resolved."""
    least = peak_bytes(problem, unscheduled(problem))
    budget = None if rng.random() < 0.3 else least + rng.randint(0, 150)
    return Limits(budget, max_in_flight=rng.randint(1, 3)).resolved(problem)
