"""The flat layout's arithmetic, and the states' table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_dynamo.core.layout import make_layout
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
    assert layout.padded_numel % world_size == 0
    assert layout.shard_numel * world_size == layout.padded_numel
    assert sum(layout.split_sizes) == layout.padded_numel
    position = 0
    for slot, shape in zip(layout.slots, shapes, strict=True):
        assert slot.offset % align == 0
        assert position <= slot.offset < position + align
        assert slot.numel == math.prod(shape)
        position = slot.end
    assert position == layout.unpadded_numel
    pieces = [layout.split_sizes[i] for i in layout.split_slots]
    assert pieces == [slot.numel for slot in layout.slots]
    assert len(layout.split_gaps) + len(layout.split_slots) == len(layout.split_sizes)


@given(shapes=SHAPES, world_size=st.integers(1, 9), align=st.sampled_from([1, 4]))
def test_every_element_is_held_once(
    shapes: list[tuple[int, ...]], world_size: int, align: int
) -> None:
    layout = make_layout([str(i) for i in range(len(shapes))], shapes, world_size, align)
    for index, slot in enumerate(layout.slots):
        held: list[int] = []
        for rank in range(world_size):
            part = layout.shard_range(index, rank)
            low, high = layout.shard_bounds(rank)
            held.extend(range(part.param_start, part.param_start + part.numel))
            assert 0 <= part.shard_start <= part.shard_start + part.numel <= high - low
            if part.numel:
                assert low + part.shard_start == slot.offset + part.param_start
        assert held == list(range(slot.numel))


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
