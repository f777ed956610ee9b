"""A plan followed by graphs of other shapes: the launches and their order are the plan's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
from problems import random_problem

from graph_passes.scheduling.plan import GraphPlan, PlanError, PlannedTransfer
from graph_passes.scheduling.problem import Problem
from graph_passes.scheduling.schedule import Options, decide, follow, launches_of, without_plan
from graph_passes.scheduling.simulation import Placement, Schedule


def _plan(problem: Problem, schedule: Schedule, launches: Mapping[int, int]) -> GraphPlan:
    transfers = []
    for place in schedule:
        transfer = problem.transfers[place.transfer]
        name = (transfer.mark.unit, transfer.mark.kind, transfer.mark.ordinal)
        launch = launches[place.transfer]
        transfers.append(PlannedTransfer(*name, place.issue, place.wait, launch, transfer.wire))
    return GraphPlan("backward", "", problem.num_steps, tuple(transfers))


def _decided(seed: int, steps_per_unit: int) -> tuple[Problem, GraphPlan]:
    problem = random_problem(random.Random(seed), 5, steps_per_unit, backward=True)
    return problem, _plan(problem, *decide(problem, Options()))


@pytest.mark.parametrize("seed", range(20))
def test_launches_are_the_plans(seed: int) -> None:
    """In a graph of other times and bytes, with as many steps or another number of them."""
    _, plan = _decided(seed, 3)
    for steps in (3, 2, 7):
        problem, _ = _decided(seed + 1000, steps)
        schedule, launches = follow(plan, problem)
        assert launches_of(_plan(problem, schedule, launches)) == launches_of(plan)
        for place in schedule:
            transfer = problem.transfers[place.transfer]
            assert transfer.ready <= place.issue <= place.wait <= transfer.need
    problem, plan = _decided(seed, 3)
    followed = _plan(problem, *follow(plan, problem))  # in its own graph nothing moves
    assert sorted(followed.transfers, key=repr) == sorted(plan.transfers, key=repr)


def _gathers(*needs: int) -> Problem:
    """Gathers of some units, which are needed before these steps of twelve."""
    problem = random_problem(random.Random(0), len(needs), 4, backward=False)
    transfers = zip(problem.transfers, needs, strict=True)
    return replace(problem, transfers=tuple(replace(t, need=need) for t, need in transfers))


def test_a_place_moves_to_where_the_graph_needs_it() -> None:
    late, early = _gathers(0, 8, 10), _gathers(0, 1, 10)
    at_last = tuple(Placement(i, t.need, t.need) for i, t in enumerate(late.transfers))
    schedule, _ = follow(_plan(late, at_last, {i: i for i in range(3)}), early)
    assert [place.issue for place in schedule] == [0, 1, 10]


def test_an_order_that_the_graph_does_not_allow() -> None:
    late, other = _gathers(0, 8, 10), _gathers(0, 8, 3)
    first, second, third = other.transfers
    other = replace(other, transfers=(first, replace(second, ready=5), third))
    at_last = tuple(Placement(i, t.need, t.need) for i, t in enumerate(late.transfers))
    with pytest.raises(PlanError, match="before it is needed"):
        follow(_plan(late, at_last, {i: i for i in range(3)}), other)


@pytest.mark.parametrize("seed", range(20))
def test_without_a_plan_graphs_of_other_times_have_the_same_launches(seed: int) -> None:
    found = set()
    for other in (seed, seed + 1000):
        problem, _ = _decided(other, 3)
        schedule, launches = without_plan(problem)
        found.add(launches_of(_plan(problem, schedule, launches)))
        assert len(set(launches.values())) == len(problem.transfers)
        assert [place.issue for place in schedule] == sorted(place.issue for place in schedule)
        for place in schedule:
            transfer = problem.transfers[place.transfer]
            assert transfer.ready <= place.issue <= place.wait == transfer.need
    assert len(found) == 1


def test_a_plan_for_other_collectives() -> None:
    assert len({launches_of(_decided(seed, 3)[1]) for seed in range(10)}) > 1  # they differ
    problem, plan = _decided(0, 3)
    for wrong in (
        replace(plan, transfers=plan.transfers[1:]),
        replace(plan, transfers=(*plan.transfers, plan.transfers[0])),
        replace(plan, transfers=(replace(plan.transfers[0], wire="int8/64"), *plan.transfers[1:])),
    ):
        with pytest.raises(PlanError):
            follow(wrong, problem)
