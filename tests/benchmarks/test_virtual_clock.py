"""The clock of recorded programs: a few steps each, by the rules of streams and events."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from torch.distributed import fsdp as upstream
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from benchmarks import virtual_clock
from benchmarks.streams.clock import Rates, run
from benchmarks.streams.order import unordered
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


# -- recording -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_causal", "products"), [(False, 2 + 5), (True, (2 + 5) / 2)])
def test_work_of_attention(is_causal: bool, products: float) -> None:
    """Two products forward and five backward; a causal kernel leaves out half of them."""
    batch, heads, length, dim = 2, 3, 8, 16
    q, k, v = torch.ones(3, batch, heads, length, dim, requires_grad=True).unbind()
    with record_program() as recorder:
        F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()
    work = sum(step.flops for step in recorder.program if isinstance(step, Launch))
    assert work == products * 2 * batch * heads * length**2 * dim


def test_bytes_of_an_operator() -> None:
    """Views of one storage are counted each, and memory that is given is no work."""
    parts = [torch.ones(4), torch.ones(8)]
    with record_program() as recorder:
        whole = torch.empty(16)
        torch._foreach_copy_([whole[:4], whole[4:12]], parts)
    (copy,) = [step for step in recorder.program if isinstance(step, Launch)]
    assert (copy.name, copy.num_bytes) == ("_foreach_copy_", 2 * 4 * 12)


@on_ranks(2)
def test_functional_collectives(rank: int) -> None:
    """They run on the communicator's stream until they are waited for."""
    x = torch.full((2,), float(rank))
    operators, group = torch.ops._c10d_functional, dist.group.WORLD
    assert group is not None
    with record_program() as recorder:
        gathered = operators.all_gather_into_tensor(x, 2, group.group_name)
        own = x + 1
        whole = operators.wait_tensor(gathered) * 2
    assert [*own.tolist(), *whole.tolist()] == [rank + 1.0] * 2 + [0.0, 0.0, 2.0, 2.0]
    program = recorder.program
    launches = [step for step in program if isinstance(step, Launch)]
    assert [step.name for step in launches] == ["all_gather", "add", "mul"]
    assert [step.stream == COMPUTING for step in launches] == [False, True, True]
    assert unordered(program) == []
    never = [step for step in program if step != Wait(COMPUTING, _last_wait(program))]
    assert len(unordered(never)) > 0


def _last_wait(program: Program) -> int:
    return [step.event for step in program if isinstance(step, Wait)][-1]


# -- overlap ---------------------------------------------------------------------------------------

NUM_UNITS, WIDTH = 6, 64


def _sharded(peer: str) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_UNITS)])
    if peer == "fsdp1":
        return upstream.FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    shard = upstream.fully_shard if peer == "fsdp2" else fully_shard
    for layer in model:
        shard(layer)
    return shard(model)


def _exposed(peer: str, steps: int) -> float:
    """By a clock for the last of some steps, recorded from the first one on."""
    model = _sharded(peer)
    tokens = 2 * WIDTH
    with record_program() as recorder:
        for _ in range(steps):
            begin = len(recorder.program)
            model(torch.ones(tokens, WIDTH)).sum().backward()
    flops = 2 * tokens * WIDTH * WIDTH
    num_bytes = WIDTH * WIDTH * 4
    # A product takes as long as two gathers; nothing else takes any time.
    rates = Rates(flops, 1e30, num_bytes, 0.0, launch_s=1e-6, num_ranks=2)
    return run(recorder.program[begin:], rates).exposed_s


@on_ranks(2)
def test_only_the_ends_are_exposed(rank: int) -> None:
    """A gather at the beginning and a reduction at the end, in the first step, too."""
    steady = _exposed("ours", 3)
    assert steady == pytest.approx(1.0, abs=1e-2)
    assert _exposed("ours", 1) == pytest.approx(1.0, abs=1e-2)
    assert steady <= _exposed("fsdp2", 3) + 1e-6
    assert steady <= _exposed("fsdp1", 3) + 1e-6


@on_ranks(2)
def test_a_unit_for_the_head_exposes_less(rank: int) -> None:
    """The first gather, and the last reduction, are those of the embedding alone."""
    rates = virtual_clock.rates_of(512)
    sizes = replace(virtual_clock.MODELS["8b"], num_blocks=2)
    programs = [virtual_clock.program_of("ours", sizes, rates, has) for has in (False, True)]
    without, with_head = (run(program, rates).exposed_s for program in programs)
    assert with_head < 0.8 * without


@pytest.mark.parametrize("peer", ["ours", "ours_graph"])
@on_ranks(2)
def test_the_host_calls_the_device_less_often_than_fsdp2s(rank: int, peer: str) -> None:
    theirs, ours = map(virtual_clock.calls_per_block, ("fsdp2", peer))
    for phase, calls in ours.items():
        for kind in ("collectives", "events", "waits", "switches"):
            assert calls[kind] <= theirs[phase][kind], (phase, kind)
    if peer == "ours":  # graphs run decomposed operators here, one by one
        assert all(sum(ours[p].values()) < sum(theirs[p].values()) for p in ours)
