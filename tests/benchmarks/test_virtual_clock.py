"""The clock of recorded programs: a few steps each, by the rules of streams and events."""

from __future__ import annotations

import pytest
import torch
from pool import RankPool
from torch import nn

from benchmarks.streams.clock import Rates, Timeline, run
from benchmarks.streams.program import COMPUTING, HostWait, Launch, Program, Record, Wait
from benchmarks.streams.recording import record_program
from fsdp_dynamo import fully_shard

RATES = Rates(
    flops_per_s=1.0,
    memory_bytes_per_s=1.0,
    link_bytes_per_s=1.0,
    collective_s=0.0,
    launch_s=0.0,
    num_ranks=2,
)
SIDE = "side"


def _work(seconds: int, stream: str = COMPUTING) -> Launch:
    return Launch("work", stream, (), (), flops=seconds)


def _gather(seconds: int, stream: str = SIDE) -> Launch:
    return Launch("gather", stream, (), (), "all_gather", 2 * seconds, group="communicator")


def _ends(program: Program, rates: Rates = RATES) -> list[float]:
    return [end for *_, end in run(program, rates).intervals]


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        pytest.param([_work(2), _work(3)], [2, 5], id="a stream is in order"),
        pytest.param([_work(2), _work(3, SIDE)], [2, 3], id="streams are not"),
        pytest.param(
            [_work(2), Record(1, COMPUTING), _work(5), Wait(SIDE, 1), _work(3, SIDE)],
            [2, 7, 5],
            id="an event is what was enqueued before it",
        ),
        pytest.param(
            [_work(2), _work(1, SIDE), Wait(SIDE, 1), _work(1, SIDE)],
            [2, 1, 2],
            id="an event that was never recorded holds nothing back",
        ),
        pytest.param(
            [_work(2), Record(1, COMPUTING), Wait(SIDE, 1), _work(1)],
            [2, 3],
            id="a wait does not hold the host or other streams back",
        ),
        pytest.param(
            [_work(2), Record(1, COMPUTING), HostWait(1, "synchronize"), _work(1, SIDE)],
            [2, 3],
            id="the host's wait holds back what it enqueues later",
        ),
        pytest.param([_gather(2), _gather(2, "other")], [2, 4], id="a communicator is in order"),
    ],
)
def test_rules(program: Program, ends: list[float]) -> None:
    assert _ends(program) == ends


def test_the_host_may_be_what_is_slow() -> None:
    slow = Rates(1.0, 1.0, 1.0, 0.0, launch_s=3.0, num_ranks=2)
    assert _ends([_work(1), _work(1)], slow) == [4, 7]


def test_costs_of_a_scaled_model() -> None:
    """Half of each dimension: an eighth of the products, a quarter of the bytes."""
    rates = Rates(1.0, 1.0, 1.0, collective_s=0.5, launch_s=0.0, num_ranks=4, scale=2)
    product = Launch("mm", COMPUTING, (), (), num_bytes=1, flops=3)
    copy = Launch("copy", COMPUTING, (), (), num_bytes=3)
    reduced = Launch("all_reduce", SIDE, (), (), "all_reduce", 1, group="communicator")
    assert [rates.seconds(one) for one in (product, copy, reduced)] == [24, 12, 0.5 + 6]


def test_exposed_is_what_the_computation_waits() -> None:
    program = [
        _gather(2), Record(1, SIDE), _gather(3), Record(2, SIDE),
        Wait(COMPUTING, 1), _work(1), Wait(COMPUTING, 2), _work(4),
    ]  # fmt: skip
    timeline = run(program, RATES)
    assert (timeline.total_s, timeline.exposed_s, timeline.communication_s) == (9, 4, 5)


# -- overlap ---------------------------------------------------------------------------------------

NUM_UNITS, WIDTH = 6, 64


def _step(rank: int, world_size: int, peer: str, steps: int) -> Timeline:
    """A clock for the last of some steps, recorded from the first one on."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)])
    options = {} if peer == "fsdp2" else {"use_dtensor": False}
    shard = torch.distributed.fsdp.fully_shard if peer == "fsdp2" else fully_shard
    for layer in model:
        shard(layer, **options)
    shard(model, **options)
    tokens = 2 * WIDTH
    with record_program() as recorder:
        for _ in range(steps):
            begin = len(recorder.program)
            model(torch.ones(tokens, WIDTH)).sum().backward()
    flops = 2 * tokens * WIDTH * WIDTH
    num_bytes = WIDTH * WIDTH * 4
    # A product takes as long as two gathers; nothing else takes any time.
    rates = Rates(flops, 1e30, num_bytes, 0.0, launch_s=1e-6, num_ranks=world_size)
    return run(recorder.program[begin:], rates)


def _steps(rank: int, world_size: int) -> dict[str, float]:
    cases = {"fsdp2": ("fsdp2", 3), "first step": ("ours", 1), "steady": ("ours", 3)}
    return {name: _step(rank, world_size, *case).exposed_s for name, case in cases.items()}


def test_only_the_ends_are_exposed(ranks: RankPool) -> None:
    """A gather at the beginning and a reduction at the end, in the first step, too."""
    for exposed in ranks.run(_steps, 2):
        assert exposed["steady"] == pytest.approx(1.0, abs=1e-2)
        assert exposed["first step"] == pytest.approx(1.0, abs=1e-2)
        assert exposed["steady"] <= exposed["fsdp2"] + 1e-6
