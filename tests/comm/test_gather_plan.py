"""Gather plans: by themselves, on the shards of all ranks at once, and over a group."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn

from fsdp_dynamo import fully_shard
from fsdp_dynamo.comm import collectives, gather_plan
from fsdp_dynamo.comm.gather_plan import GatherPlan, decode, one_slice
from fsdp_dynamo.core.flat_layout import FlatLayout, make_layout

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=7)
LEAST = st.sampled_from([None, 1, 4, 9, 30])


def _layout(shapes: list[tuple[int, ...]], size: int, align: int, least: int | None) -> FlatLayout:
    """Every second parameter is divided along another dimension than the first if one divides."""
    names = [str(i) for i in range(len(shapes))]
    dims = [0] * len(shapes)
    for index, shape in enumerate(shapes):
        if index % 2:
            dims[index] = next((d for d in range(1, len(shape)) if shape[d] % size == 0), 0)
    return make_layout(names, shapes, size, align, least, dims=dims)


def _params(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Values that differ everywhere."""
    numels = [math.prod(shape) for shape in shapes]
    values = torch.arange(1.0, sum(numels) + 1).split(numels)
    return [one.view(shape) for one, shape in zip(values, shapes, strict=True)]


def _shards(layout: FlatLayout, params: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's shard, made of parts as ``torch.chunk`` gives them."""
    size = layout.world_size
    shards = []
    for rank in range(size):
        shard = torch.zeros(layout.shard_numel)
        for param, slot in zip(params, layout.slots, strict=True):
            chunks = param.chunk(size, slot.dim) if param.ndim else [param] * size
            if rank < len(chunks):
                part = chunks[rank].reshape(-1)
                shard[slot.shard_start : slot.shard_start + part.numel()] = part
        shards.append(shard)
    return shards


def _gathered(plan: GatherPlan, shards: list[torch.Tensor]) -> torch.Tensor:
    """What ``issue_all_gather`` does, without a group."""
    size = len(shards)
    unsharded = torch.zeros(size * plan.shard_numel)
    sides = [plan.direct(unsharded, shard, size) for shard in shards]
    for slices in zip(*sides, strict=True):
        slices[0][0].copy_(torch.cat([own for _, own in slices]))
    if plan.widths:
        plan.copy_out(unsharded, torch.cat([plan.packed(shard) for shard in shards]), size)
    return unsharded


@given(
    shapes=SHAPES,
    size=st.integers(1, 9),
    align=st.sampled_from([1, 4]),
    least=LEAST,
    indexed=st.booleans(),
)
def test_parameters_come_back(
    shapes: list[tuple[int, ...]], size: int, align: int, least: int | None, indexed: bool
) -> None:
    layout, params = _layout(shapes, size, align, least), _params(shapes)
    shards = _shards(layout, params)
    with mock.patch.object(gather_plan, "INDEXED_NUMEL", 1 << 16 if indexed else -1):
        for plan in (layout.plan, layout.plan.all_packed):
            unsharded = _gathered(plan, shards)
            for found, param in zip(layout.split(unsharded), params, strict=True):
                assert torch.equal(found, param)
            for rank, shard in enumerate(shards):
                assert torch.equal(plan.shard_of(unsharded, rank, size), shard)
                parts = layout.parts_of(unsharded, layout.shard(rank).ranges)
                for own, part in zip(layout.shard(rank).split(shard), parts, strict=True):
                    assert torch.equal(own, part)
            if plan.widths:
                message = torch.cat([plan.packed(shard) for shard in shards])
                assert torch.equal(plan.message_of(unsharded, size), message)


@given(shapes=SHAPES, inner=st.integers(1, 4), outer=st.integers(1, 4), least=LEAST)
def test_two_levels(
    shapes: list[tuple[int, ...]], inner: int, outer: int, least: int | None
) -> None:
    """Ranks gather a few shards with the plan, and others these with the plan times as many."""
    layout = _layout(shapes, inner * outer, 4, least)
    shards, plan = _shards(layout, _params(shapes)), layout.plan
    secondary = [_gathered(plan, shards[i * inner : (i + 1) * inner]) for i in range(outer)]
    expected = _gathered(plan, shards)
    assert torch.equal(_gathered(plan.scaled(inner), secondary), expected)
    for position, held in enumerate(secondary):
        assert torch.equal(plan.scaled(inner).shard_of(expected, position, outer), held)


@given(
    shapes=SHAPES,
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    least=LEAST,
    missing=st.integers(0, 8),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_gradients_are_written_for_the_reduction(
    shapes: list[tuple[int, ...]],
    sizes: tuple[int, int],
    least: int | None,
    missing: int,
    dtype: torch.dtype,
) -> None:
    size, factor = sizes
    layout, params = _layout(shapes, size * factor, 4, least), _params(shapes)
    values = [None if index == missing else param for index, param in enumerate(params)]
    flat = torch.empty(layout.padded_numel, dtype=dtype)
    layout.fill(flat, values)
    for plan in (layout.plan.scaled(factor), layout.plan.all_packed.scaled(factor)):
        given_ = torch.full_like(flat, float("nan"))
        layout.messages(values, plan, size, given_.dtype, given_.device, given_)
        expected = flat
        if plan.widths:
            direct = flat[: size * plan.packed_start]
            expected = torch.cat([direct, plan.message_of(flat, size)])
        assert torch.equal(given_, expected)
        assert torch.equal(torch.signbit(given_), torch.signbit(expected))  # NO_VALUE is -0.0


@given(shapes=SHAPES, size=st.integers(1, 9), least=LEAST)
def test_plans_are_integers(shapes: list[tuple[int, ...]], size: int, least: int | None) -> None:
    plan = _layout(shapes, size, 4, least).plan
    assert decode(plan.encode()) == plan
    assert decode(plan.scaled(3).encode()) == plan.scaled(3)
    packed = plan.all_packed
    assert packed.shard_numel == plan.shard_numel
    assert not packed.starts or packed.is_one_slice


def test_what_is_direct() -> None:
    """Large parameters lie first, and are gathered in one message each; columns are packed."""
    layout = make_layout("abcd", [(3,), (8, 6), (2, 2), (6, 5)], 2, 4, 12)
    assert [slot.shard_start for slot in layout.slots] == [40, 0, 44, 24]
    assert layout.plan == GatherPlan((0, 24), (24, 15), (2, 2, 2), 40)
    layout = make_layout("ab", [(8, 6), (6, 8, 5)], 2, 4, 12, dims=[0, 1])
    assert layout.plan == GatherPlan((0,), (24,), (120,), 24, (6,))
    assert _layout([(3,)], 2, 4, None).plan == one_slice(2)
    assert _layout([(3,), (4, 4)], 1, 4, 1).plan == one_slice(20)


# -- over a group ----------------------------------------------------------------------------------

PLANS = {
    "direct": GatherPlan((0, 8), (5, 4), (), 12),
    "packed": GatherPlan((), (), (5, 3, 4), 0),
    "both": GatherPlan((0,), (5,), (1, 3), 8),
    "blocks": GatherPlan((0,), (4,), (2, 6), 4, (1, 3)),
}


def _over_a_group(rank: int, size: int) -> None:
    """gloo has the calls that other backends have."""
    group = dist.group.WORLD
    assert group is not None
    for transport in ("point_to_point", "all_to_all", "library"):
        with mock.patch.object(collectives, "transport_of", return_value=transport):
            for name, plan in PLANS.items():
                _gather_and_reduce(plan, group, f"{name}, {transport}")


def _gather_and_reduce(plan: GatherPlan, group: dist.ProcessGroup, what: str) -> None:
    rank, size = group.rank(), group.size()
    shards = [torch.arange(1.0, 13) * (r + 1) for r in range(size)]
    whole = torch.zeros(12 * size)
    collectives.issue_all_gather(whole, shards[rank], group, plan=plan).wait()
    assert torch.equal(whole, _gathered(plan, shards)), what
    grads = [torch.arange(12.0 * size).add(r) for r in range(size)]
    mean = plan.shard_of(sum(grads) / size, rank, size)  # type: ignore[arg-type]
    for has_message in (False, True):
        given_ = grads[rank].clone()
        if has_message and plan.widths:
            direct = given_[: size * plan.packed_start]
            given_ = torch.cat([direct, plan.message_of(given_, size)])
        own = torch.zeros(12)
        collectives.issue_reduce_mean(own, given_, group, plan=plan, has_message=has_message).wait()
        torch.testing.assert_close(_without_gaps(plan, own), _without_gaps(plan, mean))


def _without_gaps(plan: GatherPlan, shard: torch.Tensor) -> torch.Tensor:
    own = [shard for _, shard in plan.direct(shard, shard, 1)]
    return torch.cat([*own, plan.packed(shard)])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_over_a_group(ranks: RankPool, size: int) -> None:
    ranks.run(_over_a_group, size)


class _Uneven(nn.Module):
    """Rows that do not divide, a scalar, fewer rows than ranks, a tied parameter, two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 13), nn.Linear(13, 7)
        self.scale, self.few = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(2, 7))
        self.tied = nn.Linear(7, 13)
        self.tied.weight = self.first.weight
        self.wide = nn.Parameter(torch.full((5,), 0.25, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x)) + self.tied(x)
        return self.second(hidden) * self.scale + self.few.sum(0) + self.wide.sum().to(x.dtype)


def _losses(model: nn.Module, call: Any, inputs: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in inputs:
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(("mode", "plans"), [("eager", (None, 1, 64, 256)), ("graph", (None, 64))])
@on_ranks(3)
def test_training(rank: int, mode: str, plans: tuple[int | None, ...]) -> None:
    """The numbers of one process, and with all plans the same bits."""
    inputs = torch.linspace(-1, 1, 3 * 3 * 2 * 7).view(3, 3, 2, 7)
    plain = _Uneven()
    expected = torch.stack(_losses(plain, plain, inputs.flatten(1, 2)))
    found = []
    for least in plans:
        with mock.patch.dict(collectives.DIRECT_BYTES, {"point_to_point": least}):
            model = fully_shard(_Uneven())
        losses = torch.stack(_losses(model, in_mode(model, mode), inputs[:, rank]))
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        torch.testing.assert_close(losses, expected, rtol=2e-6, atol=0)
        found.append(losses)
    assert all(torch.equal(losses, found[0]) for losses in found)
