"""Steps that nothing waits for, the allocator's counters, and a link that is a kernel."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from pool import RankPool

from benchmarks import gpu_checks, gpu_speeds
from benchmarks.cluster.delay import Delay
from benchmarks.peers import Setting, Trainee, named
from benchmarks.streams.program import HostWait
from benchmarks.streams.recording import record_program
from benchmarks.workloads import catalogue

CPU = torch.device("cpu")


def _recorded(rank: int, world_size: int) -> tuple[list[str], bool]:
    """What the host waits for, whether all work is enqueued before that.

    SGD, as the steps of AdamW are counted in the host's memory, which is not known here.
    """
    (peer,) = named(["ours"])
    setting = Setting(catalogue.decoder("small", 2, 8, num_blocks=2), CPU)
    sgd = staticmethod(lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    with gpu_checks.forced_sharding(), mock.patch.object(Trainee, "make_optimizer", sgd):
        trainee = peer.train(setting)
        gpu_speeds.run_steps(trainee, setting, 0, 2)
        with record_program() as recorder:
            gpu_speeds.run_steps(trainee, setting, 2, 20)
    waits = [n for n, one in enumerate(recorder.program) if isinstance(one, HostWait)]
    kinds = [getattr(recorder.program[n], "name", "") for n in waits]
    collectives = [n for n, one in enumerate(recorder.program) if getattr(one, "group", "")]
    return kinds, collectives[-1] < waits[0]


def test_nothing_waits_between_steps(ranks: RankPool) -> None:
    for waits, are_last in ranks.run(_recorded, 1):
        assert waits == ["_local_scalar_dense"] * 20  # the losses
        assert are_last


def test_memory_is_what_the_allocator_counts() -> None:
    keys = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
    readings = [dict(zip(keys, values, strict=True)) for values in ((9, 9, 5), (3, 4, 7))]
    with (
        mock.patch.object(torch.cuda, "memory_stats", side_effect=readings),
        mock.patch.object(torch.cuda, "reset_peak_memory_stats") as reset,
    ):
        found = gpu_speeds.Memory(torch.device("cuda", 0)).read()
    reset.assert_called_once()
    assert found == {"allocated_bytes": 3, "reserved_bytes": 4, "retries": 2}
    assert gpu_speeds.Memory(CPU).read() == {}


def test_a_delay_is_a_kernel_of_some_blocks() -> None:
    launches: list[dict[str, Any]] = []

    def compiled(source: str, name: str) -> Any:
        assert f"void {name}(int" in source
        assert "%globaltimer" in source
        return lambda **kwargs: launches.append(kwargs)

    with mock.patch.object(torch.cuda, "_compile_kernel", compiled):
        delay = Delay()
        delay.enqueue(0.0)
        delay.enqueue(0.0025)
    (launch,) = launches
    assert 8 <= launch["grid"][0] <= 16
    assert launch["args"] == [25_000]  # of 100 ns


@pytest.mark.parametrize("rate", [50, 250])
def test_a_link_has_its_rate(rate: int) -> None:
    model = gpu_speeds.flat_link(64, rate)
    moving_s = model.seconds("all_gather", 64 * 10**9) - model.seconds("all_gather", 0)
    assert moving_s == pytest.approx(63 / rate)
