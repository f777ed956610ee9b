"""The flat layout's arithmetic, and the states' table."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_dynamo.core.flat_layout import make_layout
from fsdp_dynamo.core.unit import RootState, StateMachine, UnitState
from fsdp_dynamo.errors import FSDPStateError

SHAPES = st.lists(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    min_size=1,
    max_size=8,
)


LEAST = st.sampled_from([None, 1, 5])


@given(
    shapes=SHAPES,
    world_size=st.integers(1, 9),
    align=st.sampled_from([1, 2, 4, 8]),
    least=LEAST,
)
def test_layout(
    shapes: list[tuple[int, ...]], world_size: int, align: int, least: int | None
) -> None:
    layout = make_layout([str(i) for i in range(len(shapes))], shapes, world_size, align, least)
    assert layout.shard_numel * world_size == layout.padded_numel
    assert sum(layout.split_sizes) == layout.padded_numel
    position = shard_position = 0
    for slot in sorted(layout.slots, key=lambda slot: (slot.offset, slot.shard_numel)):
        assert slot.shard_start % align == slot.offset % align == 0
        assert slot.offset == world_size * slot.shard_start
        assert position <= slot.offset
        assert shard_position <= slot.shard_start
        position, shard_position = slot.end, slot.shard_start + slot.shard_numel
    assert position <= layout.padded_numel
    assert shard_position <= layout.shard_numel
    assert [slot.numel for slot in layout.slots] == [math.prod(shape) for shape in shapes]
    pieces = [layout.split_sizes[i] for i in layout.split_slots]
    assert pieces == [slot.numel * slot.copies for slot in layout.slots]
    copies = [world_size if shape == () else 1 for shape in shapes]
    assert [slot.copies for slot in layout.slots] == copies
    assert len(layout.split_gaps) + len(layout.split_slots) == len(layout.split_sizes)
    if least is not None and world_size > 1:
        direct = [slot.shard_numel for slot in layout.slots if slot.shard_numel >= least]
        assert sorted(layout.plan.numels) == sorted(direct) or layout.plan.is_one_slice


@given(shapes=SHAPES, world_size=st.integers(1, 9), align=st.sampled_from([1, 4]))
def test_ranks_hold_the_rows_of_torchs_chunk(
    shapes: list[tuple[int, ...]], world_size: int, align: int
) -> None:
    """A scalar, which has no rows, is on all ranks."""
    names = [str(i) for i in range(len(shapes))]
    layout = make_layout(names, shapes, world_size, align)
    for index, (slot, shape) in enumerate(zip(layout.slots, shapes, strict=True)):
        whole = torch.arange(slot.numel).view(shape)
        chunks = whole.chunk(world_size) if shape else [whole] * world_size
        for rank in range(world_size):
            part = layout.shard_range(index, rank)
            assert 0 <= part.numel <= slot.shard_numel
            expected = chunks[rank] if rank < len(chunks) else whole[:0]
            assert torch.equal(part.of(whole), expected)


def test_no_padding_where_none_is_needed() -> None:
    layout = make_layout(["a", "b"], [(4, 4), (8,)], 2, 4)
    assert layout.split_gaps == ()
    assert layout.padded_numel == 24


def test_illegal_transitions_say_what_happened() -> None:
    machine = StateMachine(UnitState.IDLE, "blocks.3")
    machine.advance(UnitState.FORWARD)
    with pytest.raises(FSDPStateError, match=r"unit 'blocks.3': .*FORWARD -> BACKWARD_PRE"):
        machine.advance(UnitState.BACKWARD_PRE)
    assert machine.state is UnitState.FORWARD
    root = StateMachine(RootState.FORWARD, "")
    with pytest.raises(FSDPStateError, match=r"the root unit: .*FORWARD -> BACKWARD"):
        root.advance(RootState.BACKWARD)
