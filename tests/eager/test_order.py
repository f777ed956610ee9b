"""Order and memory of a step by recorded events, in all three modes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from models import batch, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool

from fsdp_dynamo import BackwardPrefetch, Event, ShardingStrategy, record_events

BLOCKS = 4
UNITS = [f"blocks.{i}" for i in range(BLOCKS)]
ALL_MODES = ["eager", "hooks", "graph", "graph-inductor"]


def _recorded_step(
    rank: int, world_size: int, mode: str, options: dict[str, Any]
) -> tuple[list[Event], int, dict[str, int]]:
    """Events of one step after two warm-up steps, the peak, and the units' bytes."""
    wrapped = wrap(make_transformer(num_blocks=BLOCKS), **options)
    # Units this small do not saturate a link: planned, neighbours would be launched together.
    model = in_mode(wrapped, mode, bucket=False, max_in_flight=1)
    train(model, rank, steps=2)
    with record_events() as log:
        loss_of(model, batch(rank, 2)).backward()
    units = wrapped._fsdp_root.units
    sizes = {unit.fqn: sum(flat.unsharded_bytes for flat in unit.flats) for unit in units}
    return list(log), log.peak_unsharded_bytes(), sizes


Step = tuple[str, list[tuple[list[Event], int, dict[str, int]]]]


@pytest.fixture(scope="module", params=ALL_MODES)
def recorded(ranks: RankPool, request: pytest.FixtureRequest) -> Step:
    """A mode, and its step on each rank."""
    return request.param, ranks.run(_recorded_step, 2, request.param, {})


def _keys(events: list[Event]) -> list[tuple[str, str, str]]:
    return [event.key for event in events]


def test_order_of_a_step(recorded: Step) -> None:
    """DESIGN, section 5: RS(k) before BW(k-1), and AG(k-1) before BW(k)."""
    for events, _, _ in recorded[1]:
        keys = _keys(events)
        for earlier, later in pairwise(UNITS):
            begins = keys.index(("backward", earlier, "backward"))
            assert keys.index(("reduce_scatter", later, "backward")) < begins
            assert keys.index(("all_gather", earlier, "backward")) < keys.index(
                ("backward", later, "backward")
            )
            # Forward prefetch: the next unit is under way before this one computes.
            assert keys.index(("all_gather", later, "forward")) < keys.index(
                ("forward", earlier, "forward")
            )


def test_collectives_of_a_step(recorded: Step) -> None:
    """Two all-gathers a block, one of the root; one reduce-scatter a unit; all completed."""
    mode, steps = recorded
    for events, _, sizes in steps:
        gathers = [(e.unit, e.phase) for e in events if e.kind == "all_gather"]
        wanted = [("", "forward")] + [(u, p) for u in UNITS for p in ("forward", "backward")]
        assert sorted(gathers) == sorted(wanted)
        reduced = [e.unit for e in events if e.kind == "reduce_scatter"]
        assert reduced == [*reversed(UNITS), ""]
        for event in events:
            if event.kind in ("all_gather", "reduce_scatter"):
                assert event.num_bytes == sizes[event.unit]
                assert event.waited_ns >= event.issued_ns > 0
                assert event.source == ("graph" if mode.startswith("graph") else "hook")


def test_unsharded_bytes(recorded: Step) -> None:
    """At most the root and two units are unsharded at any time, and nothing at the end."""
    for events, peak, sizes in recorded[1]:
        assert 0 < peak <= sizes[""] + 2 * sizes["blocks.0"]
        unsharded = sum(e.num_bytes for e in events if e.kind == "unshard")
        assert unsharded == sum(e.num_bytes for e in events if e.kind == "reshard")


def test_backward_prefetch_modes(ranks: RankPool) -> None:
    """BACKWARD_POST gathers after the unit's backward; None only when it is needed."""
    for mode in (BackwardPrefetch.BACKWARD_POST, None):
        options = {"backward_prefetch": mode}
        for events, peak, sizes in ranks.run(_recorded_step, 2, "eager", options):
            keys = _keys(events)
            for earlier, later in pairwise(UNITS):
                gather = keys.index(("all_gather", earlier, "backward"))
                assert keys.index(("backward", later, "backward")) < gather
                reduce = keys.index(("reduce_scatter", later, "backward"))
                assert (gather < reduce) == (mode is BackwardPrefetch.BACKWARD_POST)
            assert peak <= sizes[""] + 2 * sizes["blocks.0"]


def test_no_forward_prefetch(ranks: RankPool) -> None:
    for events, _, _ in ranks.run(_recorded_step, 2, "eager", {"forward_prefetch": False}):
        keys = _keys(events)
        for earlier, later in pairwise(UNITS):
            assert keys.index(("forward", earlier, "forward")) < keys.index(
                ("all_gather", later, "forward")
            )


def _reshards_without_a_reduction(rank: int, world_size: int) -> list[str]:
    model = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with model.no_sync(), record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    return [event.unit for event in log if event.kind == "reshard"]


def test_units_reshard_after_their_backward_under_no_sync(ranks: RankPool) -> None:
    """Not all at its end: with ``SHARD_GRAD_OP`` all are unsharded when it begins."""
    for units in ranks.run(_reshards_without_a_reduction, 2):
        assert units == ["blocks.1", "blocks.0", ""]
