"""Formats for exposed collectives only: what the planner chooses, and what that costs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from problems import random_limits, random_problem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, CollectivePrecision, ShardingStrategy, record_plans
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.cost_model import Device
from graph_passes.markers import Mark
from graph_passes.report import GraphReport, report_of
from graph_passes.scheduling import planner
from graph_passes.scheduling.bucketing import bucket
from graph_passes.scheduling.planner import FormatChoice, choose_formats, with_formats
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.schedule import Options, decide
from graph_passes.scheduling.simulation import (
    Limits,
    lower_bound_ms,
    simulate,
    total_ms,
    unscheduled,
)
from graph_passes.wire_format import Coding, WireFormat

CHOICE = "int8/64?"


def _gather(unit: int, ms: float, need: int) -> Transfer:
    mark = Mark(f"u{unit}", "all_gather", "forward", 0, wire=CHOICE)
    return Transfer(mark, "g", ms, 0.0, 100, 0, need, 100, tensor_bytes=100)


def _formatted(problem: Problem, coding_ms: float, held_bytes: int = 0) -> Problem:
    """A third of the time; what computes encodes and decodes for ``coding_ms`` each."""
    transfers = tuple(
        replace(
            t,
            ms=t.ms / 3,
            wire="int8/64",
            wire_bytes=t.wire_bytes // 3,
            encode_ms=coding_ms,
            decode_ms=coding_ms,
            held_bytes=t.held_bytes + held_bytes,
        )
        for t in problem.transfers
    )
    return replace(problem, transfers=transfers)


def _two_units() -> Problem:
    """The gather of the first unit is exposed, the one of the second is not."""
    transfers = (_gather(0, 6.0, 0), _gather(1, 6.0, 1))
    return Problem((20.0, 20.0), ("u0", "u1"), (0, 0), transfers)


OPTIONS = Options(bucket=False, limits=Limits(memory_budget_bytes=1000, max_in_flight=9))


def test_what_is_hidden_is_left_alone() -> None:
    problem = _two_units()
    choice = choose_formats(problem, _formatted(problem, 0.5), OPTIONS)
    assert choice.chosen == {0}
    assert choice.exposed_ms == (6.0, 0.0)
    assert choice.without_ms == 46.0
    chosen = with_formats(problem, _formatted(problem, 0.5), choice.chosen)
    assert total_ms(chosen, decide(chosen, OPTIONS)[0]) == 0.5 + 2.0 + 0.5 + 40.0


@pytest.mark.parametrize(("coding_ms", "chosen"), [(1.6, {0}), (1.8, set()), (2.5, set())])
@pytest.mark.parametrize("compute_ms", [20.0, 5.0])
def test_coding_counts(compute_ms: float, coding_ms: float, chosen: set[int]) -> None:
    """4 ms less on the link; a tenth of 6 ms must be left of them, once coded twice.

    Also of a short step, of which less would be enough.
    """
    problem = replace(_two_units(), compute_ms=(compute_ms, compute_ms))
    problem = replace(problem, transfers=problem.transfers[:1])
    assert choose_formats(problem, _formatted(problem, coding_ms), OPTIONS).chosen == chosen


@pytest.mark.parametrize(("held_bytes", "chosen"), [(0, {0}), (2000, set())])
def test_messages_need_memory(held_bytes: int, chosen: set[int]) -> None:
    """A gather beside one step: where its messages do not fit there, the format gains nothing."""
    problem = Problem((20.0, 20.0), ("u0", "u1"), (0, 0), (_gather(1, 30.0, 1),))
    formatted = _formatted(problem, 0.5, held_bytes)
    assert choose_formats(problem, formatted, OPTIONS).chosen == chosen


def test_a_gain_too_small_for_the_graph() -> None:
    """Of 1000 ms, 3 are less than what a model is wrong by."""
    problem = replace(_two_units(), compute_ms=(500.0, 500.0))
    assert choose_formats(problem, _formatted(problem, 0.5), OPTIONS).chosen == set()


def test_buckets_are_of_one_format() -> None:
    """A launch of several travels as it is, so none with a format joins it."""
    small = [replace(_gather(i, 0.1, 1), latency_ms=1.0) for i in range(3)]
    transfers = (*small[:2], replace(small[2], wire="int8/64"))
    problem = Problem((20.0, 20.0), ("u0", "u1"), (0, 0), transfers)
    assert bucket(problem).members == ((0, 1), (2,))


def test_coding_on_the_clock() -> None:
    """Both clocks agree; what is encoded beside a transfer of another counts once."""
    problem = _formatted(_two_units(), 0.5)
    for schedule in (decide(problem, OPTIONS)[0], unscheduled(problem)):
        timeline = simulate(problem, schedule)
        assert timeline.total_ms == pytest.approx(total_ms(problem, schedule))
        assert timeline.total_ms == pytest.approx(40.0 + 4 * 0.5 + timeline.exposed_ms)
        assert timeline.total_ms >= lower_bound_ms(problem)


@pytest.mark.parametrize("seed", range(20))
def test_never_slower(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng, rng.randint(1, 6), rng.randint(1, 3), backward=bool(seed % 2))
    formatted = _formatted(problem, rng.choice([0.01, 0.1, 0.5, 2.0]))
    options = Options(limits=replace(random_limits(rng, problem)))
    choice = choose_formats(problem, formatted, options)
    without = total_ms(problem, decide(problem, options)[0])
    chosen = with_formats(problem, formatted, choice.chosen)
    ms = total_ms(chosen, decide(chosen, options)[0])
    assert choice.without_ms == without
    for schedule in (unscheduled(formatted), decide(formatted, Options())[0]):
        on_the_clock = simulate(formatted, schedule).total_ms
        assert on_the_clock == pytest.approx(total_ms(formatted, schedule))
    assert ms <= without * (0.99 if choice.chosen else 1)


def test_milliseconds_of_coding() -> None:
    """Rates of a format, of its name, or of memory; bytes by hand: test_wire_format.py."""
    wire, coding = WireFormat("int8", 64, is_stochastic=True), Coding(60.0, 30.0)
    assert Device(bytes_per_ms=10.0).coding_ms(wire, coding) == (6.0, 3.0)
    by_name = Device(bytes_per_ms=1.0, encode_bytes_per_ms={"int8": 20.0, "int8/64": 1.0})
    assert by_name.coding_ms(wire, coding) == (3.0, 30.0)
    by_text = Device(bytes_per_ms=1.0, decode_bytes_per_ms={"int8/64~": 15.0, "int8": 1.0})
    assert by_text.coding_ms(wire, coding) == (60.0, 2.0)
    with pytest.raises(ValueError, match="decode_bytes_per_ms"):
        Device(decode_bytes_per_ms={"int8": 0.0})


# -- plans of a model on clusters ------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _reports(
    gbit_per_s: float, precision: CollectivePrecision | None, **kwargs: Any
) -> list[GraphReport]:
    """Plans of forward and backward on a link of this rate, beside which 400 Gbit/s are plenty."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dim = 512
    blocks = [_Block(dim) for _ in range(3)]
    model = FSDP(
        nn.Sequential(*blocks, nn.Linear(dim, 16)),
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        collective_precision=precision,
        **kwargs,
    )
    rates = {
        "link": {"latency_ms": 0.02, "bytes_per_ms": gbit_per_s * 1e9 / 8 / 1e3},
        "device": {"flops_per_ms": 1e9, "bytes_per_ms": 2e9},
    }
    backend = "fsdp_dynamo_aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend, options=rates)
    with record_plans() as log:
        compiled(torch.ones(256, dim)).sum().backward()
    return [report_of(planned) for planned in log]


INT8 = CollectivePrecision("int8", "int8", only_where_exposed=True)


def _nothing(problem: Problem, formatted: Problem, options: Options) -> FormatChoice:
    return replace(choose_formats(problem, formatted, options), chosen=frozenset())


@on_ranks(1)
def test_on_clusters(rank: int) -> None:
    """Never slower; exposed units have formats on a slow link, hidden ones none on a fast one."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=512)
    for gbit_per_s in (25, 400):
        without, chosen = _reports(gbit_per_s, None), _reports(gbit_per_s, INT8)
        ms, without_ms = (sum(g.simulated_ms for g in graphs) for graphs in (chosen, without))
        transfers = [t for graph in chosen for t in graph.transfers if t.unit]
        assert ms <= without_ms * (1 + 1e-9)
        if gbit_per_s == 25:
            assert ms < 0.75 * without_ms
            exposed = [t for t in transfers if t.exposed_without_ms > 0.1]
            assert len(exposed) >= 6
            assert all(t.wire for t in exposed)
            assert all(t.wire_bytes < 0.27 * t.tensor_bytes for t in exposed)
        else:
            hidden = [t for t in transfers if t.exposed_without_ms == 0]
            assert len(hidden) >= 5
            assert not any(t.wire for t in hidden)
            assert all(t.wire_bytes == t.tensor_bytes for t in hidden)


@on_ranks(1)
def test_a_graph_without_a_choice_is_planned_as_ever(rank: int) -> None:
    """Looking at formats leaves no trace: a mean over replicas goes where it went."""
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=8)
    kwargs = {
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh("cpu", (2, 4)),
    }
    with mock.patch.object(planner, "choose_formats", _nothing):
        without, chosen = _reports(400, None, **kwargs), _reports(400, INT8, **kwargs)
    assert len(without[1].transfers) == 4 * 2 + 3
    for before, after in zip(without, chosen, strict=True):
        transfers = [replace(t, exposed_without_ms=None) for t in after.transfers]
        assert transfers == list(before.transfers)
