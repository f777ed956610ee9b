"""Collectives: numbers, progress beside the computation, and recordings that are off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool

from fsdp_dynamo import events
from fsdp_dynamo.comm import collectives, point_to_point
from fsdp_dynamo.comm.in_flight import InFlight

TAG = 77


def _comes(tensors: Sequence[torch.Tensor], values: Sequence[float]) -> bool:
    """Whether tensors are filled with values soon, while this thread computes."""
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        if all(bool((t == value).all()) for t, value in zip(tensors, values, strict=True)):
            return True
    return False


def _progress(rank: int, world_size: int) -> list[bool]:
    """Issued collectives complete without a wait: they overlap with compute."""
    group = dist.group.WORLD
    assert group is not None
    shard = torch.full((1 << 16,), float(rank))
    unsharded = torch.zeros(world_size << 16)
    gather = collectives.issue_all_gather(unsharded, shard, group)
    done = [_comes(unsharded.chunk(world_size), range(world_size))]
    output = torch.empty_like(shard)
    works, (parts,) = point_to_point.issue_exchanges(
        [(torch.full_like(unsharded, 5.0), output)], group, TAG
    )
    done.append(_comes(parts, [5.0] * world_size))
    gather.wait()
    for work in works:
        work.wait()
    return done


def test_collectives_progress_without_a_wait(ranks: RankPool) -> None:
    assert ranks.run(_progress, 2) == [[True] * 2] * 2


def _means(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [torch.arange(12.0).mul(r + 1).to(dtype) for r in range(world_size)]
        expected = (sum(w.float() for w in whole) / world_size).to(dtype)
        part = torch.empty(12 // world_size, dtype=dtype)
        collectives.issue_reduce_mean(part, whole[rank].clone(), group).wait()
        own = expected.chunk(world_size)[rank]
        results.append(torch.allclose(part.float(), own.float(), rtol=1e-2))
        same = whole[rank].clone()
        collectives.issue_reduce_mean(same, same, group).wait()
        results.append(torch.allclose(same.float(), expected.float(), rtol=1e-2))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_means(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_means, world_size) == [[True] * 6] * world_size


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _sources(rank: int, number: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def _like_the_library(rank: int, world_size: int) -> list[str]:
    """Issue many collectives of several sizes, wait out of order; what differs from torch's own."""
    group = dist.group.WORLD
    assert group is not None
    sizes = [1, 7, 4096, 300_000]
    cases = [(dtype, numel) for numel in sizes for dtype in DTYPES for _ in range(2)]
    issued: list[tuple[str, InFlight, torch.Tensor, torch.Tensor]] = []
    own_message = torch.full((3,), float(rank))
    theirs = torch.empty(3)
    for number, (dtype, numel) in enumerate(cases):
        shard = _sources(rank, number, numel, dtype)
        expected = torch.empty(numel * world_size, dtype=dtype)
        dist.all_gather_into_tensor(expected, shard, group=group)
        output = torch.empty_like(expected)
        if number % 3 == 0:  # the shard is its own slot
            output.chunk(world_size)[rank].copy_(shard)
            shard = output.chunk(world_size)[rank]
        gather = collectives.issue_all_gather(output, shard, group)
        issued.append((f"gather {dtype} {numel}", gather, output, expected))
        if number == 2:  # a user's own message, with the default tag, between two collectives
            user = [dist.isend(own_message, (rank + 1) % world_size)]
            user.append(dist.irecv(theirs, (rank - 1) % world_size))
        whole = _sources(rank, number + 50, numel * world_size, dtype)
        parts = torch.empty_like(whole)
        dist.all_to_all_single(parts, whole.clone(), group=group)
        scaled = parts.float().view(world_size, -1)
        expected = scaled.div(world_size).sum(0).to(dtype)
        if dtype == torch.float32:
            expected = torch.empty(numel)
            dist.reduce_scatter_tensor(expected, whole.clone(), dist.ReduceOp.AVG, group=group)
        part = torch.empty(numel, dtype=dtype)
        reduce = collectives.issue_reduce_mean(part, whole, group)
        issued.append((f"reduce {dtype} {numel}", reduce, part, expected))
    step = -1 if rank % 2 else 1
    for _, in_flight, _, _ in issued[::2][::step] + issued[1::2][::-step]:
        in_flight.wait()
    for work in user:
        assert work is not None
        work.wait()
    wrong = [] if bool((theirs == (rank - 1) % world_size).all()) else ["a user's message"]
    for what, _, output, expected in issued:
        exact = what.startswith("gather")
        limits = {"rtol": 0.0, "atol": 0.0} if exact else _limits(output.dtype)
        if not torch.allclose(output.float(), expected.float(), **limits):
            wrong.append(f"{what}: {(output.float() - expected.float()).abs().max()}")
    return wrong


def _limits(dtype: torch.dtype) -> dict[str, float]:
    """One rounding; float16 is divided before the sum, which rounds once more."""
    one = torch.finfo(dtype).eps
    return {"rtol": one, "atol": 2 * one if dtype == torch.float16 else 1e-6}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_in_flight_are_those_of_the_library(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_like_the_library, world_size) == [[]] * world_size


def _in_two_groups(rank: int, world_size: int) -> bool:
    """Two groups of the same ranks, used in another order by the first rank."""
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    outputs = [torch.zeros(world_size) for _ in groups]
    order = [0, 1] if rank == 0 else [1, 0]
    gathers = [
        collectives.issue_all_gather(outputs[g], torch.tensor([10.0 * g + rank]), groups[g])
        for g in order
    ]
    for gather in gathers:
        gather.wait()
    expected = [[10.0 * g + r for r in range(world_size)] for g in range(2)]
    return [output.tolist() for output in outputs] == expected


def test_groups_are_kept_apart(ranks: RankPool) -> None:
    assert ranks.run(_in_two_groups, 3) == [True] * 3


def _received_bytes(rank: int, world_size: int) -> list[Any]:
    """Bytes that a reduce-scatter receives into besides its output; what it does not copy."""
    group = dist.group.WORLD
    assert group is not None
    unsharded = torch.arange(8.0 * world_size).add(rank)
    output = torch.empty(8)
    works, (parts,) = point_to_point.issue_exchanges([(unsharded, output)], group, TAG)
    for work in works:
        work.wait()
    others = {p.untyped_storage().data_ptr(): p for r, p in enumerate(parts) if r != rank}
    first = any(p is others[output.data_ptr()] for p in parts[:2])
    del others[output.data_ptr()]
    is_own = parts[rank].data_ptr() == unsharded[8 * rank :].data_ptr()
    values = [part[0].item() for part in parts]
    point_to_point.sum_parts(output, parts, 1)
    values.append(output[0].item())
    return [sum(p.untyped_storage().nbytes() for p in others.values()), first, is_own, values]


@pytest.mark.parametrize("world_size", [2, 4])
def test_receive_buffer(ranks: RankPool, world_size: int) -> None:
    for rank, answer in enumerate(ranks.run(_received_bytes, world_size)):
        values = [8.0 * rank + r for r in range(world_size)]
        assert answer == [32 * (world_size - 2), True, True, [*values, sum(values)]]


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


def _empty(rank: int, world_size: int) -> bool:
    group = dist.group.WORLD
    assert group is not None
    nothing = torch.empty(0)
    collectives.issue_all_gather(nothing, torch.empty(0), group).wait()
    collectives.issue_reduce_mean(torch.empty(0), nothing, group).wait()
    return True


def test_nothing_to_transfer(ranks: RankPool) -> None:
    assert ranks.run(_empty, 2) == [True, True]


def _no_events(rank: int, world_size: int, mode: str) -> bool:
    """With no recording, no event is ever made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an event was made")

    kept = events.EventLog.issue
    events.EventLog.issue = refuse  # type: ignore[method-assign]
    try:
        model = in_mode(wrap(make_transformer(num_blocks=2)), mode)
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
    finally:
        events.EventLog.issue = kept  # type: ignore[method-assign]
    return True


@pytest.mark.parametrize("mode", MODES)
def test_off_means_off(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_no_events, 2, mode) == [True, True]


def _dropped_in_flight(rank: int, world_size: int) -> list[float]:
    """A gather after one whose handle rank 0 has dropped before the other rank sent its part."""
    group = dist.group.WORLD
    assert group is not None
    shard, output = torch.full((1 << 20,), float(rank)), torch.empty(world_size << 20)
    if rank == 0:
        dropped = collectives.issue_all_gather(output, shard, group, label="unit")
        dist.barrier()
        del dropped
    else:
        dist.barrier()
        collectives.issue_all_gather(output, shard, group, label="unit").wait()
    output = torch.empty(world_size << 20)
    collectives.issue_all_gather(output, shard + 1, group, label="unit").wait()
    return output.unique().tolist()


def test_a_handle_that_is_dropped(ranks: RankPool) -> None:
    """As with a model that goes after an error: the connection serves the next one."""
    assert ranks.run(_dropped_in_flight, 2, timeout=60.0) == [[1.0, 2.0]] * 2


class _ManyRanks:
    """A group's size, without its ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2, 3, 64, 4096])
@pytest.mark.parametrize("value", [1e-4, 100.0])
def test_float16_neither_overflows_nor_underflows(size: int, value: float) -> None:
    """Equal gradients of many ranks, summed in float16."""
    grad = torch.tensor([value], dtype=torch.float16)
    expected = grad.clone()
    op, divisor = collectives.divide_first(grad, _ManyRanks(size))  # type: ignore[arg-type]
    total = grad * size
    divide = collectives.divide_after(total, op, divisor)
    if divide is not None:
        divide()
    torch.testing.assert_close(total, expected)
