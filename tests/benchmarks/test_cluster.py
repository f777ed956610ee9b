"""The simulated cluster: its collectives, its clock, and training steps on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.simulation import (
    ClusterModel,
    LinkModel,
    SimulatedGroup,
    gpu_cluster,
    simulated_cluster,
)
from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

INTRA = LinkModel(latency_s=1e-4, bytes_per_s=1e9)
INTER = LinkModel(latency_s=2e-4, bytes_per_s=1e8)
TWO_NODES = ClusterModel(8, 4, INTRA, INTER, "ring")
N = TWO_NODES.world_size


def _slow(latency_s: float) -> ClusterModel:
    """Two ranks whose all-gathers take this time, whatever their size."""
    return ClusterModel(2, 1, INTRA, LinkModel(latency_s, bytes_per_s=1e12), "ring")


@pytest.fixture
def group() -> Iterator[SimulatedGroup]:
    """Rank 0 of two nodes of four."""
    with simulated_cluster(TWO_NODES) as group:
        yield group


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    yield
    torch._dynamo.reset()


# -- collectives ----------------------------------------------------------------------------------


def _shard() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0])


def _unsharded() -> torch.Tensor:
    """Chunk j is (j, j, j)."""
    return torch.arange(float(N)).repeat_interleave(3)


def _last(group: SimulatedGroup) -> tuple[str, int]:
    return group.log[-1].op, group.log[-1].payload_bytes


def test_all_gather(group: SimulatedGroup) -> None:
    expected = _shard().repeat(N)
    output = torch.empty(3 * N)
    dist.all_gather_into_tensor(output, _shard())
    assert torch.equal(output, expected)
    assert _last(group) == ("all_gather", 3 * N * 4)
    in_place = torch.zeros(3 * N)
    in_place[:3] = _shard()
    dist.all_gather_into_tensor(in_place, in_place[:3])
    assert torch.equal(in_place, expected)
    slots = [torch.empty(3) for _ in range(N)]
    dist.all_gather(slots, _shard())
    assert torch.equal(torch.cat(slots), expected)
    assert _last(group) == ("all_gather", 3 * N * 4)


def test_reductions(group: SimulatedGroup) -> None:
    scattered = {"SUM": 28.0, "AVG": 3.5, "MAX": 7.0, "MIN": 0.0}
    reduced = {"SUM": _shard() * N, "AVG": _shard(), "MAX": _shard(), "MIN": _shard()}
    for name, value in scattered.items():
        output, tensor = torch.empty(3), _shard()
        dist.reduce_scatter_tensor(output, _unsharded(), getattr(dist.ReduceOp, name))
        assert output.tolist() == [value] * 3
        assert _last(group) == ("reduce_scatter", 3 * N * 4)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        assert torch.equal(tensor, reduced[name])
        assert _last(group) == ("all_reduce", 12)
    in_place = _unsharded()
    dist.reduce_scatter_tensor(in_place[:3], in_place)
    assert in_place[:3].tolist() == [28.0] * 3


def test_coalesced(group: SimulatedGroup) -> None:
    outputs, small = [torch.empty(3 * N), torch.empty(N)], torch.ones(1)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(outputs[0], _shard())
        dist.all_gather_into_tensor(outputs[1], small)
    manager.wait()
    assert torch.equal(outputs[0], _shard().repeat(N))
    assert torch.equal(outputs[1], torch.ones(N))
    assert [_last(group), len(group.log)] == [("all_gather", 4 * N * 4), 1]


def _functional_step(group_name: str) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    ops = torch.ops._c10d_functional

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        gathered = ops.wait_tensor(ops.all_gather_into_tensor(x * 2, N, group_name))
        reduced = ops.reduce_scatter_tensor(gathered + 1, "avg", N, group_name)
        summed = ops.all_reduce(x, "sum", group_name)
        swapped = ops.all_to_all_single(gathered, [3] * N, [3] * N, group_name)
        several = ops.all_gather_into_tensor_coalesced([x, x + 1], N, group_name)
        return [ops.wait_tensor(t) for t in (reduced, summed, swapped, *several)]

    return step


def test_functional_collectives(group: SimulatedGroup) -> None:
    step = torch.compile(_functional_step(group.group_name), backend="aot_eager", fullgraph=True)
    reduced, summed, swapped, *several = step(_shard())
    assert torch.equal(reduced, _shard() * 2 + 1)
    assert torch.equal(summed, _shard() * N)
    assert torch.equal(swapped, (_shard() * 2).repeat(N))
    both = torch.cat([_shard().repeat(N), (_shard() + 1).repeat(N)])
    assert torch.equal(torch.cat(several), both)
    kinds = {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1, "all_to_all": 1}
    assert Counter(record.op for record in group.log) == kinds
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    gathered = functional.all_gather_tensor(_shard(), 0, group)
    assert group.log[-1].waited_s == 0  # it is waited for where it is used
    assert torch.equal(gathered + 0, _shard().repeat(N))
    assert group.log[-1].done_s <= time.perf_counter()


def test_subgroups(group: SimulatedGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    output = torch.empty(12)
    dist.all_gather_into_tensor(output, _shard(), group=mesh["shard"].get_group())
    assert group.log[-1].wire_bytes == 36
    dist.all_reduce(output, group=mesh["replicate"].get_group())
    assert torch.equal(output, 2 * _shard().repeat(4))
    seconds = [record.done_s - record.starts_s for record in group.log]
    assert seconds[0] == pytest.approx(2 * 0.1e-3, rel=0.01)  # one node of four
    assert seconds[1] == pytest.approx(2 * 0.2e-3, rel=0.01)  # two nodes of one


def test_refused(group: SimulatedGroup) -> None:
    with pytest.raises(NotImplementedError, match=r"all_reduce with .*PRODUCT"):
        dist.all_reduce(_shard(), dist.ReduceOp.PRODUCT)
    with pytest.raises(NotImplementedError, match="recv_anysource"):
        dist.recv(_shard())
    with (
        pytest.raises(RuntimeError, match="expected no default process group, got 'simulated'"),
        simulated_cluster(TWO_NODES),
    ):
        pass
    assert dist.get_world_size() == N


# -- the clock ------------------------------------------------------------------------------------


def test_collectives_take_their_time_one_after_the_other(group: SimulatedGroup) -> None:
    works = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(2)]
    works[1].wait()
    after_s = time.perf_counter()
    first, second = group.log
    seconds = TWO_NODES.seconds("all_reduce", 40_000)
    assert first.done_s - first.starts_s == pytest.approx(seconds)
    assert second.done_s - second.starts_s == pytest.approx(seconds)
    assert first.starts_s == first.issued_s
    assert second.starts_s == max(second.issued_s, first.done_s)
    assert after_s >= second.done_s
    assert (first.waited_s, second.wire_bytes) == (0, 70_000)
    assert works[0].is_completed()
    assert group.exposed_s() == second.waited_s
    group.reset_log()
    assert (group.log, group.exposed_s()) == ([], 0)


def test_compute_hides_communication() -> None:
    with simulated_cluster(_slow(0.2)) as group:
        for compute_s in (0.0, 0.1, 0.25):
            work = dist.all_gather_into_tensor(torch.empty(6), _shard(), async_op=True)
            assert not work.is_completed()
            time.sleep(compute_s)
            work.wait()
        exposed, partly, hidden = group.log
        assert exposed.waited_s > partly.waited_s > hidden.waited_s
        assert partly.waited_s < 0.2
        assert group.exposed_s() == exposed.waited_s + partly.waited_s + hidden.waited_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_delays_the_stream_and_not_the_host() -> None:
    with simulated_cluster(_slow(0.2), "cuda") as group:
        output = torch.empty(6, device="cuda")
        work = dist.all_gather_into_tensor(output, _shard().cuda(), async_op=True)
        work.wait()
        assert not work.is_completed()
        assert torch.equal(output.cpu(), _shard().repeat(2))
        assert work.is_completed()
        (record,) = group.log
        assert record.done_s - record.starts_s == pytest.approx(0.2, rel=0.3)
        assert record.waited_s > 0


# -- training -------------------------------------------------------------------------------------

WIDE = 4096


class Unit(nn.Module):
    """``(batch, 2)`` to ``(batch, 2)``; rows of the weight divide by 4096 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)).unflatten(-1, (2, -1)).mean(-1)


UNITS = 3
UNIT_BYTES = 2 * WIDE * 4


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Unit() for _ in range(UNITS)])


def _fsdp2() -> nn.Module:
    model = _plain()
    for unit in model.children():
        fully_shard(unit)
    return fully_shard(model)


def _ours() -> nn.Module:
    return FSDP(_plain(), auto_wrap_policy=ModuleWrapPolicy({Unit}))


def _compiled(build: Callable[[], nn.Module], **options: Any) -> Callable[[], nn.Module]:
    return lambda: torch.compile(build(), **options)


# How to build each model, and its all-gathers a step. The compiler sees that the first unit's input
# needs no gradient, so that its backward reads no parameter.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "FSDP2": (_fsdp2, 2 * UNITS),
    "ours, eager": (_ours, 2 * UNITS),
    "ours, hooks": (_compiled(_ours, backend="aot_eager"), 2 * UNITS),
    "ours, graph": (
        _compiled(
            _ours, backend="fsdp_dynamo_aot_eager", fullgraph=True, options={"bucket": False}
        ),
        2 * UNITS - 1,
    ),
}


def _train(model: nn.Module, steps: int = 2) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 2)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("FSDP2", 8),
        ("ours, eager", 8),
        ("ours, hooks", 4096),
        ("ours, graph", 4096),
    ],
)
def test_training_step(name: str, world_size: int) -> None:
    with simulated_cluster(gpu_cluster(world_size)) as group:
        build, num_gathers = MODELS[name]
        model = build()
        _train(model)
        group.reset_log()
        _train(model, steps=1)
        expected = {"all_gather": num_gathers, "reduce_scatter": UNITS}
        assert Counter(record.op for record in group.log) == expected
        assert {record.payload_bytes for record in group.log} == {UNIT_BYTES}
        assert {record.wire_bytes for record in group.log} == {
            UNIT_BYTES // world_size * (world_size - 1)
        }


def test_ddp_waits_at_the_end_of_its_backward() -> None:
    expected = _train(_plain())
    with simulated_cluster(_slow(0.02)) as group:
        model = DistributedDataParallel(_plain(), bucket_cap_mb=0.01)
        assert _train(model) == pytest.approx(expected)
        group.reset_log()
        _train(model, steps=1)
        reduced = group.log
        assert [record.op for record in reduced] == ["all_reduce"] * UNITS
        assert reduced[-1].waited_s > 0
        assert time.perf_counter() >= reduced[-1].done_s
