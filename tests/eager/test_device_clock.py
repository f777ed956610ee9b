"""Times of a recorded step on a device: those of its clock, not of the host that enqueues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from tempfile import TemporaryDirectory
from unittest import mock

import pytest
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool

from benchmarks.streams import clock
from benchmarks.streams.program import COMPUTING
from benchmarks.streams.recorder import Event, Recorder
from benchmarks.streams.recording import record_program
from fsdp_dynamo import explain, inspect_graphs, record_events
from fsdp_dynamo.events import EventLog
from fsdp_dynamo.observe import inspection
from fsdp_dynamo.observe.explain import recorded_step

NUM_BLOCKS = 3
RATES = clock.Rates(
    flops_per_s=1e3, memory_bytes_per_s=1e3, link_bytes_per_s=1e4, collective_s=1,
    launch_s=0.0, num_ranks=2,
)  # fmt: skip
"""Of a device so slow that a step takes a quarter of an hour of its time."""


@contextmanager
def _clocked() -> Iterator[Recorder]:
    """A recorded program whose events have the times of the virtual clock."""
    with record_program() as recorder:

        def elapsed_ms(begin: Event, end: Event) -> float:
            there = clock.run(recorder.program, RATES).events
            assert begin.number is not None
            assert end.number is not None
            return 1e3 * (there[end.number] - there[begin.number])

        with mock.patch.object(Event, "elapsed_time", elapsed_ms):
            yield recorder


Spans = dict[tuple[str, str], tuple[float, float]]


def _spans(log: EventLog, kind: str) -> Spans:
    """Begin and end of what a recording says of a kind, in seconds."""
    found = [one for one in recorded_step(log, []).measured() if one.kind == kind]
    return {(e.unit, e.phase): (e.issued_ms / 1e3, e.done_ms / 1e3) for e in found}


def _recorded(rank: int, world_size: int, mode: str) -> tuple[Spans, Spans, float]:
    """Compute and gathers of a step, and how long the device computed."""
    model = in_mode(wrap(make_transformer(num_blocks=NUM_BLOCKS)), mode)
    loss_of(model, batch(rank, 0)).backward()
    with _clocked() as recorder, record_events() as log:
        loss_of(model, batch(rank, 1)).backward()
    busy_s = clock.run(recorder.program, RATES).busy_s[COMPUTING]
    return _spans(log, "compute"), _spans(log, "all_gather"), busy_s


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_compute_takes_the_devices_time(ranks: RankPool, mode: str) -> None:
    for compute, gathers, busy_s in ranks.run(_recorded, 2, mode):
        whole_s = max(end for _, end in compute.values())
        assert whole_s == pytest.approx(busy_s, rel=0.1)
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


def _explained(rank: int, world_size: int) -> tuple[float, float]:
    """When the compute ends in what ``explain`` says, and how long the device computed in all."""
    model = wrap(make_transformer(num_blocks=NUM_BLOCKS))
    with _clocked() as recorder:
        found = explain(model, batch(rank, 0))
    busy_s = clock.run(recorder.program, RATES).busy_s[COMPUTING]
    return max(e.done_ms for e in found.measured if not e.is_collective) / 1e3, busy_s


def test_explain_takes_the_devices_time(ranks: RankPool) -> None:
    """It runs five steps and shows the last."""
    for measured_s, busy_s in ranks.run(_explained, 2):
        assert measured_s == pytest.approx(busy_s / 5, rel=0.1)


def _inspected(rank: int, world_size: int) -> float:
    """When the compute ends on the page of ``inspect_graphs``."""
    model = in_mode(wrap(make_transformer(num_blocks=NUM_BLOCKS)), "graph")
    with TemporaryDirectory() as folder, mock.patch.object(inspection, "_write") as write:
        with _clocked(), inspect_graphs(folder, rank=None):
            loss_of(model, batch(rank, 0)).backward()
        measured = write.call_args.args[3][0].report.measured
    return max(e.done_ms for e in measured if not e.is_collective) / 1e3


def test_pages_have_the_devices_time(ranks: RankPool) -> None:
    """Of one step, with its compilation, for which the device waits."""
    compared = ranks.run(_recorded, 2, "graph")
    for measured_s, (*_, busy_s) in zip(ranks.run(_inspected, 2), compared, strict=True):
        assert measured_s == pytest.approx(busy_s, rel=0.1)


def test_where_the_host_computes_its_time_stands() -> None:
    with record_events() as log:
        event = log.issue("", "forward", "forward")
        log.end(event)
    assert log.clock is None
    assert event.waited_ns >= event.issued_ns > 0
    assert not event.readings
