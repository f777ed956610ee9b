"""The flat layout's arithmetic, and the states' table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_dynamo.core.layout.flat_layout import make_layout
from fsdp_dynamo.core.layout.row_planner import FREE_NUMEL, MAX_PADDING_PERCENT, plan_rows
from fsdp_dynamo.core.training_state import RootState, StateMachine, UnitState
from fsdp_dynamo.errors import FSDPStateError

SHAPES = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


@given(shapes=SHAPES, world_size=st.integers(1, 9), align=st.sampled_from([1, 2, 4, 8]))
def test_layout(shapes: list[tuple[int, ...]], world_size: int, align: int) -> None:
    layout = make_layout([str(i) for i in range(len(shapes))], shapes, world_size, align)
    assert layout.shard_numel * world_size == layout.padded_numel
    assert sum(layout.split_sizes) == layout.padded_numel
    position = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.offset % align == 0
        assert position <= slot.offset
        assert slot.numel == math.prod(shape)
        position = slot.end
    assert position == layout.unpadded_numel <= layout.padded_numel
    pieces = [layout.split_sizes[i] for i in layout.split_slots]
    assert pieces == [slot.numel for slot in layout.slots]
    assert len(layout.split_gaps) + len(layout.split_slots) == len(layout.split_sizes)


@given(shapes=SHAPES, world_size=st.integers(1, 9), align=st.sampled_from([1, 4]))
def test_every_row_is_held_once(shapes: list[tuple[int, ...]], world_size: int, align: int) -> None:
    names = [str(i) for i in range(len(shapes))]
    layout = make_layout(names, shapes, world_size, align, keeps_rows=True)
    for index, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        whole = torch.arange(slot.numel).view(shape)
        held = []
        for rank in range(world_size):
            part = layout.shard_range(index, rank)
            low, high = layout.shard_bounds(rank)
            assert 0 <= part.shard_start <= part.shard_start + part.numel <= high - low
            if part.numel:
                assert low + part.shard_start == slot.offset + part.param_start
            assert part.shape[1:] == shape[1:]
            held.append(part.of(whole).flatten())
        assert torch.equal(torch.cat(held), whole.flatten())


LARGE = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 600), st.integers(1, 600)),
        st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=12,
)


@given(shapes=LARGE, world_size=st.integers(2, 600), align=st.sampled_from([1, 4, 8]))
def test_padding_is_bounded(shapes: list[tuple[int, ...]], world_size: int, align: int) -> None:
    plan = plan_rows(shapes, world_size, align)
    assert plan == plan_rows(shapes, world_size, align)
    numels = [math.prod(shape) for shape in shapes]
    aligned = sum(-(-numel // align) * align for numel in numels)
    padding = max(aligned * MAX_PADDING_PERCENT // 100, FREE_NUMEL * world_size)
    assert plan.shard_numel * world_size <= aligned + padding
    position = 0
    for start, shape, row_shape, numel in zip(
        plan.offsets, shapes, plan.row_shapes, numels, strict=True
    ):
        assert start >= position
        position = start + numel
        assert row_shape in (*(shape[i:] for i in range(1, len(shape) + 1)), (1,))
        bounds = range(-(-start // plan.shard_numel) * plan.shard_numel, position, plan.shard_numel)
        assert all((bound - start) % math.prod(row_shape) == 0 for bound in bounds)


def _llama_block(hidden: int, inner: int) -> list[tuple[int, ...]]:
    attention = [(hidden, hidden), (hidden // 4, hidden), (hidden // 4, hidden), (hidden, hidden)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]


def _mixtral_block(*, is_stacked: bool) -> list[tuple[int, ...]]:
    attention = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (8, 4096)]
    experts = [(14336, 4096), (4096, 14336), (14336, 4096)] * 8
    stacked = [(8, 28672, 4096), (8, 4096, 14336)]
    return [*attention, *(stacked if is_stacked else experts), (4096,), (4096,)]


@pytest.mark.parametrize("world_size", [8, 64, 512])
@pytest.mark.parametrize(
    "shapes",
    [_llama_block(4096, 14336), _llama_block(8192, 28672), _mixtral_block(is_stacked=False)],
    ids=["Llama-3-8B", "Llama-3-70B", "Mixtral-8x7B"],
)
def test_blocks_of_known_models_keep_their_rows(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    plan = plan_rows(shapes, world_size, 8)
    unpadded = sum(math.prod(shape) for shape in shapes)
    assert plan.shard_numel * world_size <= 1.03 * unpadded
    assert list(plan.row_shapes) == [shape[1:] for shape in shapes]


@given(shapes=LARGE, world_size=st.integers(2, 70), rows=st.sampled_from([2, 32, 10**6]))
def test_rows_together(shapes: list[tuple[int, ...]], world_size: int, rows: int) -> None:
    """Bounds of shards fall between blocks of rows, whatever the padding."""
    plan = plan_rows(shapes, world_size, 4, [rows] * len(shapes))
    for start, shape in zip(plan.offsets, shapes, strict=True):
        block, end = rows * math.prod(shape[1:]), start + math.prod(shape)
        bounds = range(-(-start // plan.shard_numel) * plan.shard_numel, end, plan.shard_numel)
        assert all((bound - start) % block == 0 for bound in bounds)
        assert end <= plan.shard_numel * world_size


def test_stacked_experts_are_cut_between_rows_of_matrices() -> None:
    shapes = _mixtral_block(is_stacked=True)
    plan = plan_rows(shapes, 64, 8)
    assert plan.row_shapes[5:7] == ((4096,), (14336,))
    assert plan.shard_numel * 64 <= 1.001 * sum(math.prod(shape) for shape in shapes)


def test_no_padding_where_none_is_needed() -> None:
    layout = make_layout(["a", "b"], [(4, 4), (8,)], 2, 4)
    assert layout.split_gaps == ()
    assert layout.padded_numel == layout.unpadded_numel == 24


def test_illegal_transitions_say_what_happened() -> None:
    machine = StateMachine(UnitState.IDLE, "blocks.3")
    machine.advance(UnitState.FORWARD)
    with pytest.raises(FSDPStateError, match=r"unit 'blocks.3': .*FORWARD -> BACKWARD_PRE"):
        machine.advance(UnitState.BACKWARD_PRE)
    assert machine.state is UnitState.FORWARD
    root = StateMachine(RootState.FORWARD, "")
    with pytest.raises(FSDPStateError, match=r"the root unit: .*FORWARD -> BACKWARD"):
        root.advance(RootState.BACKWARD)
