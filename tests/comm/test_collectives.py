"""Collectives by themselves: numbers, progress beside the computation, and what goes in between."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pool import RankPool, on_ranks
from torch.distributed import distributed_c10d

from fsdp_dynamo.comm import collectives, point_to_point
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.process_groups import new_group

TAG = 77


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _comes(tensors: Sequence[torch.Tensor], values: Sequence[float]) -> bool:
    """Whether tensors are filled with values soon, while this thread computes."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        if all(bool((t == value).all()) for t, value in zip(tensors, values, strict=True)):
            return True
    return False


@on_ranks(2)
def test_collectives_progress_without_a_wait(rank: int) -> None:
    """They overlap with compute."""
    shard, unsharded = torch.full((1 << 16,), float(rank)), torch.zeros(2 << 16)
    gather = collectives.issue_all_gather(unsharded, shard, _world())
    assert _comes(unsharded.chunk(2), range(2))
    pairs = [(torch.full_like(unsharded, 5.0), torch.empty_like(shard))]
    works, (parts,) = point_to_point.issue_exchanges(pairs, _world(), TAG)
    assert _comes(parts, [5.0] * 2)
    gather.wait()
    for work in works:
        work.wait()


def _means(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [torch.arange(12.0).mul(r + 1).to(dtype) for r in range(world_size)]
        expected = sum(w.float() for w in whole) / world_size
        part = torch.empty(12 // world_size, dtype=dtype)
        collectives.issue_reduce_mean(part, whole[rank].clone(), _world()).wait()
        torch.testing.assert_close(part, expected.to(dtype).chunk(world_size)[rank])
        same = whole[rank].clone()
        collectives.issue_reduce_mean(same, same, _world()).wait()
        torch.testing.assert_close(same, expected.to(dtype))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_means(ranks: RankPool, world_size: int) -> None:
    ranks.run(_means, world_size)


def _sources(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _limits(dtype: torch.dtype) -> dict[str, float]:
    """One rounding; float16 is divided before the sum, which rounds once more."""
    one = torch.finfo(dtype).eps
    return {"rtol": one, "atol": 2 * one if dtype == torch.float16 else 1e-6}


@on_ranks(3)
def test_many_in_flight_are_those_of_the_library(rank: int) -> None:
    """Many collectives of several sizes at once, waited for out of order, against torch's own."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    cases = [(d, n) for n in (1, 7, 4096, 100_000) for d in dtypes for _ in range(2)]
    issued: list[tuple[str, InFlight, torch.Tensor, torch.Tensor]] = []
    theirs = torch.empty(3)
    for number, (dtype, numel) in enumerate(cases):
        shard = _sources(rank, number, numel, dtype)
        expected = torch.empty(numel * 3, dtype=dtype)
        dist.all_gather_into_tensor(expected, shard)
        output = torch.empty_like(expected)
        if number % 3 == 0:  # the shard is its own slot
            output.chunk(3)[rank].copy_(shard)
            shard = output.chunk(3)[rank]
        gather = collectives.issue_all_gather(output, shard, _world())
        issued.append((f"gather {dtype} {numel}", gather, output, expected))
        if number == 2:  # a user's own message, with the default tag, between two collectives
            user = [dist.isend(torch.full((3,), float(rank)), (rank + 1) % 3)]
            user.append(dist.irecv(theirs, (rank - 1) % 3))
        whole = _sources(rank, number + 50, numel * 3, dtype)
        if dtype == torch.float32:
            expected = torch.empty(numel)
            dist.reduce_scatter_tensor(expected, whole.clone(), dist.ReduceOp.AVG)
        else:
            parts = torch.empty_like(whole)
            dist.all_to_all_single(parts, whole.clone())
            expected = parts.float().view(3, -1).div(3).sum(0).to(dtype)
        part = torch.empty(numel, dtype=dtype)
        reduce = collectives.issue_reduce_mean(part, whole, _world())
        issued.append((f"reduce {dtype} {numel}", reduce, part, expected))
    step = -1 if rank % 2 else 1
    for _, in_flight, _, _ in issued[::2][::step] + issued[1::2][::-step]:
        in_flight.wait()
    for work in user:
        assert work is not None
        work.wait()
    assert theirs.tolist() == [(rank - 1) % 3] * 3
    for what, _, output, expected in issued:
        limits = {"rtol": 0.0, "atol": 0.0} if "gather" in what else _limits(output.dtype)
        torch.testing.assert_close(output, expected, msg=what, **limits)


@on_ranks(3)
def test_groups_are_kept_apart(rank: int) -> None:
    """Two groups of the same ranks, used in another order by the first rank."""
    groups = [dist.new_group(list(range(3))) for _ in range(2)]
    outputs = [torch.zeros(3) for _ in groups]
    gathers = [
        collectives.issue_all_gather(outputs[g], torch.tensor([10.0 * g + rank]), groups[g])
        for g in ([0, 1] if rank == 0 else [1, 0])
    ]
    for gather in gathers:
        gather.wait()
    assert [output.tolist() for output in outputs] == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


@on_ranks(4)
def test_receive_buffer(rank: int) -> None:
    """A reduce-scatter receives into its output too, and does not copy its own part."""
    unsharded, output = torch.arange(32.0).add(rank), torch.empty(8)
    works, (parts,) = point_to_point.issue_exchanges([(unsharded, output)], _world(), TAG)
    for work in works:
        work.wait()
    others = {p.untyped_storage().data_ptr(): p for r, p in enumerate(parts) if r != rank}
    assert any(p is others[output.data_ptr()] for p in parts[:2])
    del others[output.data_ptr()]
    assert sum(p.untyped_storage().nbytes() for p in others.values()) == 2 * output.nbytes
    assert parts[rank].data_ptr() == unsharded[8 * rank :].data_ptr()
    values = [8.0 * rank + r for r in range(4)]
    assert [part[0].item() for part in parts] == values
    point_to_point.sum_parts(output, parts, 1)
    assert output[0].item() == sum(values)


def test_what_cannot_be_gathered_is_not_begun() -> None:
    """The other ranks would wait for the rest."""
    group = Mock(rank=lambda: 0, size=lambda: 2)
    with pytest.raises(RuntimeError):
        point_to_point.issue_all_gathers([(torch.zeros(4), torch.zeros(3))], group, TAG)
    assert not group.send.called
    assert not group.recv.called


def test_sums_of_low_precision_round_once() -> None:
    """In bfloat16 each further 1 would be lost against 256."""
    parts = [torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0, 2.0)]
    output = torch.empty(1, dtype=torch.bfloat16)
    point_to_point.sum_parts(output, parts, 1)
    assert output.item() == 260.0
    point_to_point.sum_parts(output, parts[:1], 1)
    assert output.item() == 256.0


@on_ranks(2)
def test_nothing_to_transfer(rank: int) -> None:
    nothing = torch.empty(0)
    collectives.issue_all_gather(nothing, torch.empty(0), _world()).wait()
    collectives.issue_reduce_mean(torch.empty(0), nothing, _world()).wait()


@on_ranks(2, timeout=60.0)
def test_a_handle_that_is_dropped(rank: int) -> None:
    """Rank 0 drops one before the other has sent its part, as with a model that goes after an
    error: the connection serves the next one."""
    shard, output = torch.full((1 << 20,), float(rank)), torch.empty(2 << 20)
    if rank == 0:
        dropped = collectives.issue_all_gather(output, shard, _world(), label="unit")
        dist.barrier()
        del dropped
    else:
        dist.barrier()
        collectives.issue_all_gather(output, shard, _world(), label="unit").wait()
    output = torch.empty(2 << 20)
    collectives.issue_all_gather(output, shard + 1, _world(), label="unit").wait()
    assert output.unique().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 4096])
@pytest.mark.parametrize("value", [1e-4, 100.0])
def test_float16_neither_overflows_nor_underflows(size: int, value: float) -> None:
    """Equal gradients of many ranks, summed in float16."""
    grad = torch.tensor([value], dtype=torch.float16)
    expected = grad.clone()
    op, divisor = collectives.divide_first(grad, Mock(size=lambda: size))
    total = grad * size
    divide = collectives.divide_after(total, op, divisor)
    if divide is not None:
        divide()
    torch.testing.assert_close(total, expected)


# -- groups of some ranks, made by these ranks alone -----------------------------------------------


class _Library(dist.ProcessGroupGloo):
    """A stand-in for NCCL: notes of which group the communicator of a new one is split.

    A split blocks until every rank of that group takes part.
    """

    sources: ClassVar[list[Any]]

    class Options:
        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.sources.append(options.split_from)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@on_ranks(3)
def test_ranks_outside_of_a_new_group_do_not_take_part(rank: int, backend: str) -> None:
    pair, default, device = dist.new_group([0, 1]), dist.group.WORLD, torch.device("cuda:0")
    assert default is not None
    if rank == 2:
        return
    _Library.sources = []
    with (
        mock.patch.object(distributed_c10d, "ProcessGroupNCCL", _Library, create=True),
        mock.patch.object(distributed_c10d, "is_nccl_available", return_value=True),
    ):
        default.bound_device_id = device  # as init_process_group(device_id=...) leaves it
        made = new_group([pair], [0, 1], "a test", backend)
        assert default.bound_device_id == made.bound_device_id == device
        default.bound_device_id = None
    assert _Library.sources == ([None] if backend == "nccl" else [])
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    assert total.item() == 2
