"""Times of a recorded step on a device: those of its clock, not of the host that enqueues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks

from benchmarks.streams import clock
from benchmarks.streams.program import COMPUTING
from benchmarks.streams.recorder import Event, Recorder
from benchmarks.streams.recording import record_program
from fsdp_dynamo import explain, record_events
from fsdp_dynamo.events import EventLog
from fsdp_dynamo.observe.explain import measured_events

NUM_BLOCKS = 2
RATES = clock.Rates(
    flops_per_s=1e3, memory_bytes_per_s=1e3, link_bytes_per_s=1e4, collective_s=1,
    launch_s=0.0, num_ranks=2,
)  # fmt: skip
"""Of a device so slow that a step takes a quarter of an hour of its time."""


@contextmanager
def _clocked() -> Iterator[Recorder]:
    """A recorded program whose events have the times of the virtual clock."""
    with record_program() as recorder:

        @cache
        def times(length: int) -> Any:
            """Of the events of a program that has become so long."""
            return clock.run(recorder.program, RATES).events

        def elapsed_ms(begin: Event, end: Event) -> float:
            there = times(len(recorder.program))
            assert begin.number is not None
            assert end.number is not None
            return 1e3 * (there[end.number] - there[begin.number])

        with mock.patch.object(Event, "elapsed_time", elapsed_ms):
            yield recorder


Spans = dict[tuple[str, str], tuple[float, float]]


def _spans(log: EventLog, kind: str) -> Spans:
    """Begin and end of what a recording says of a kind, in seconds."""
    found = [one for one in measured_events(log) if one.kind == kind]
    return {(e.unit, e.phase): (e.issued_ms / 1e3, e.done_ms / 1e3) for e in found}


def _ends_s(measured: Any) -> float:
    """When the compute ends in what is shown of a step."""
    return max(one.done_ms for one in measured if not one.is_collective) / 1e3


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_compute_takes_the_devices_time(rank: int, mode: str) -> None:
    model = in_mode(wrap(make_transformer(num_blocks=NUM_BLOCKS)), mode)
    with _clocked():
        loss_of(model, batch(rank, 0)).backward()
    with _clocked() as recorder, record_events() as log:
        loss_of(model, batch(rank, 1)).backward()
    compute, gathers = _spans(log, "compute"), _spans(log, "all_gather")
    busy_s = clock.run(recorder.program, RATES).busy_s[COMPUTING]
    assert max(end for _, end in compute.values()) == pytest.approx(busy_s, rel=0.1)
    for phase in ("forward", "backward"):
        blocks = [compute[f"blocks.{n}", phase] for n in range(NUM_BLOCKS)]
        lengths = [end - begin for begin, end in blocks]
        # Equal work, but for what a graph computes between a block and the next collective.
        assert lengths == pytest.approx([lengths[0]] * NUM_BLOCKS, rel=0.3)
        in_order = blocks if phase == "forward" else blocks[::-1]
        for (_, end), (begin, _) in pairwise(in_order):
            assert begin >= end - 1e-6
    for (unit, phase), (issued_s, _) in gathers.items():
        if unit and phase == "forward":
            assert issued_s <= compute[unit, phase][0] + 1e-6


@on_ranks(2)
def test_explain_takes_the_devices_time(rank: int) -> None:
    """It runs five steps and shows the last."""
    model = wrap(make_transformer(num_blocks=NUM_BLOCKS))
    with _clocked() as recorder:
        found = explain(model, batch(rank, 0))
    busy_s = clock.run(recorder.program, RATES).busy_s[COMPUTING]
    assert _ends_s(found.measured) == pytest.approx(busy_s / 5, rel=0.1)


def test_where_the_host_computes_its_time_stands() -> None:
    with record_events() as log:
        event = log.issue("", "forward", "forward")
        log.end(event)
    assert log.clock is None
    assert event.waited_ns >= event.issued_ns > 0
    assert not event.readings
