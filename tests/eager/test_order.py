"""Order and memory of a step by recorded events, and its ranges in torch's profiler, by mode."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
from models import batch, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch.profiler import profile

from fsdp_dynamo import BackwardPrefetch, Event, ShardingStrategy, record_events
from fsdp_dynamo.events import EventLog

BLOCKS = 3
UNITS = [f"blocks.{i}" for i in range(BLOCKS)]


class _Step(NamedTuple):
    """Events of a step, its peak, the units' bytes, and how often each range was entered."""

    events: list[Event]
    peak: int
    sizes: dict[str, int]
    ranges: dict[str, int]

    def index(self, kind: str, unit: str, phase: str) -> int:
        return [event.key for event in self.events].index((kind, unit, phase))


def _step(rank: int, world_size: int, mode: str = "eager", **options: Any) -> _Step:
    """A step after two others, and one without a recording, of which no event is ever made."""
    wrapped = wrap(make_transformer(num_blocks=BLOCKS), **options)
    # Units this small do not saturate a link: planned, neighbours would be launched together.
    model = in_mode(wrapped, mode, bucket=False, max_in_flight=1)
    train(model, rank, steps=2)
    with record_events() as log:
        loss_of(model, batch(rank, 2)).backward()
    with profile() as profiler, mock.patch.object(EventLog, "issue", side_effect=AssertionError):
        loss_of(model, batch(rank, 3)).backward()
    ranges = Counter(e.name for e in profiler.events() if e.name.startswith("FSDP::"))
    units = wrapped._fsdp_root.units
    sizes = {unit.fqn: sum(flat.unsharded_bytes for flat in unit.flats) for unit in units}
    return _Step(list(log), log.peak_unsharded_bytes(), sizes, dict(ranges))


_Recorded = tuple[str, list[_Step]]


@pytest.fixture(scope="module", params=["eager", "hooks", "graph", "graph-inductor"])
def recorded(ranks: RankPool, request: pytest.FixtureRequest) -> _Recorded:
    """A mode, and its step on each rank."""
    return request.param, ranks.run(_step, 2, request.param)


def test_order_of_a_step(recorded: _Recorded) -> None:
    """RS(k) before BW(k-1), which does not wait for it, and AG(k-1) before BW(k).

    Forwards gather the next unit ahead.
    """
    for step in recorded[1]:
        for earlier, later in pairwise(UNITS):
            begins = step.index("backward", earlier, "backward")
            reduces = step.index("reduce_scatter", later, "backward")
            assert reduces < begins
            assert step.events[reduces].waited_ns > step.events[begins].issued_ns
            gathers = step.index("all_gather", earlier, "backward")
            assert gathers < step.index("backward", later, "backward")
            gathers = step.index("all_gather", later, "forward")
            assert gathers < step.index("forward", earlier, "forward")


def test_collectives_of_a_step(recorded: _Recorded) -> None:
    """Two all-gathers a block, one of the root; one reduce-scatter a unit; all completed."""
    mode, steps = recorded
    for step in steps:
        gathers = [(e.unit, e.phase) for e in step.events if e.kind == "all_gather"]
        wanted = [("", "forward")] + [(u, p) for u in UNITS for p in ("forward", "backward")]
        assert sorted(gathers) == sorted(wanted)
        reduced = [e.unit for e in step.events if e.kind == "reduce_scatter"]
        assert reduced == [*reversed(UNITS), ""]
        for event in step.events:
            if event.kind in ("all_gather", "reduce_scatter"):
                assert event.num_bytes == step.sizes[event.unit]
                assert event.waited_ns >= event.issued_ns > 0
                assert event.source == ("graph" if mode.startswith("graph") else "hook")


def test_ranges_of_a_step(recorded: _Recorded) -> None:
    """Each collective has one where it is issued, and one where it is waited for."""
    mode, steps = recorded
    names = dict.fromkeys(UNITS, 2) | {"(root)": 1}
    expected = Counter({f"FSDP::forward {name}": 1 for name in names})
    if mode.startswith("graph"):
        expected.clear()
    for name, gathers in names.items():
        for wait in ("", "wait "):
            expected[f"FSDP::all_gather {wait}{name}"] = gathers
            expected[f"FSDP::reduce_scatter {wait}{name}"] = 1
    for step in steps:
        prefixes = ("FSDP::all_gather", "FSDP::reduce_scatter", "FSDP::forward")
        assert {n: t for n, t in step.ranges.items() if n.startswith(prefixes)} == expected


def test_unsharded_bytes(recorded: _Recorded) -> None:
    """At most the root and two units are unsharded at any time, and nothing at the end."""
    for step in recorded[1]:
        assert 0 < step.peak <= step.sizes[""] + 2 * step.sizes["blocks.0"]
        unsharded = sum(e.num_bytes for e in step.events if e.kind == "unshard")
        assert unsharded == sum(e.num_bytes for e in step.events if e.kind == "reshard")


@pytest.mark.parametrize("prefetch", [BackwardPrefetch.BACKWARD_POST, None])
@on_ranks(2)
def test_other_prefetches(rank: int, prefetch: BackwardPrefetch | None) -> None:
    """BACKWARD_POST gathers after the unit's backward; None only when it is needed."""
    step = _step(rank, 2, backward_prefetch=prefetch, forward_prefetch=False)
    for earlier, later in pairwise(UNITS):
        gather = step.index("all_gather", earlier, "backward")
        assert step.index("backward", later, "backward") < gather
        reduce = step.index("reduce_scatter", later, "backward")
        assert (gather < reduce) == (prefetch is BackwardPrefetch.BACKWARD_POST)
        gather = step.index("all_gather", later, "forward")
        assert step.index("forward", earlier, "forward") < gather
    assert step.peak <= step.sizes[""] + 2 * step.sizes["blocks.0"]


@on_ranks(2)
def test_units_reshard_after_their_backward_under_no_sync(rank: int) -> None:
    """Not all at its end: with ``SHARD_GRAD_OP`` all are unsharded when it begins."""
    model = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    with model.no_sync(), record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    units = [event.unit for event in log if event.kind == "reshard"]
    assert units == ["blocks.1", "blocks.0", ""]
