"""Ranks whose hosts run ahead of their devices: what goes apart is noticed, what is late is not.

The device is a CPU, with gloo as its library. A wait for a collective is work of the device's one
stream, which a thread runs; the host goes on. The stream stands still where another rank does not
come. Collectives transfer copies, so what the host frees or writes meanwhile is not touched; what
it computes is of no use.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, loss_of
from modes import in_mode
from pool import RankPool, on_ranks

from fsdp_dynamo import FSDP, DivergenceError, RankFailedError
from fsdp_dynamo.comm import point_to_point, streams, watchdog
from fsdp_dynamo.comm.gather_plan import Pair
from fsdp_dynamo.comm.watchdog import DeviceWaits
from fsdp_dynamo.events import num_steps
from fsdp_dynamo.health import flight_recorder, notices
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PERIOD_S = 0.1
LIMIT_S = 20.0


# -- the device ------------------------------------------------------------------------------------


class Device:
    """The device: one stream, whatever the host calls it.

    Attributes:
        is_watched: whether the watchdog looks at it now.
    """

    def __init__(self) -> None:
        self.is_watched = True
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                item()
            except RuntimeError:  # its collective never ends: nothing behind it is reached
                return

    def enqueue(self, item: Callable[[], object]) -> None:
        """Run something behind what is there."""
        self._queue.put(item)

    def synchronize(self, until: Callable[[], bool] = lambda: False, limit_s: float = 30.0) -> bool:
        """Block the host until the stream has come here; false if ``until`` came first."""
        point = Event(self)
        point.record()
        deadline = time.monotonic() + limit_s
        while not point.query() and not until():
            if time.monotonic() > deadline:
                raise AssertionError("the device stands still")
            time.sleep(0.01)
        return point.query()

    def end(self) -> None:
        """Let its thread end, also where it waits for a rank that does not come."""
        self._queue.put(None)
        self._thread.join(1.0)
        if self._thread.is_alive():
            watchdog._close_connections(dist.group.WORLD)  # type: ignore[arg-type]
            self._thread.join()


class Event:
    """``torch.cuda.Event``."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reached = threading.Event()

    def record(self, stream: object = None) -> None:
        """Be there when the stream has come here."""
        self._device.enqueue(self._reached.set)

    def query(self) -> bool:
        """Whether it has."""
        return self._reached.is_set()


class _Stream:
    """``torch.cuda.Stream``: there is one, so nothing has to be ordered."""

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...


def _wait_for(works: list[Any], buffers: tuple[torch.Tensor, ...]) -> None:
    """``buffers``: what is sent and received, alive until then."""
    for work in works:
        work.wait()


class _Work:
    """The handle of a collective; what it transfers stays alive until it is done."""

    def __init__(self, device: Device, works: list[Any], *buffers: torch.Tensor) -> None:
        self._device, self._works, self._buffers = device, works, buffers

    def wait(self) -> None:
        """Let the stream wait for it, once."""
        works, self._works = self._works, []
        if works:
            self._device.enqueue(partial(_wait_for, works, self._buffers))

    def is_completed(self) -> bool:
        """It is not to be waited for by the host."""
        return True


class _Looks:
    """Looks of the watchdog's thread, none of which outlives the job, whose store goes with it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._look = watchdog._Watchdog._look_at_devices
        self._lock = threading.Lock()

    def look(self, watching: Any) -> None:
        """Look, if the device is watched."""
        with self._lock:
            if self._device.is_watched:
                self._look(watching)

    def end(self) -> None:
        """Wait for the last one."""
        with self._lock:
            self._device.is_watched = False


def _replacements(device: Device) -> Iterator[tuple[Any, str, Any]]:
    cpu: Any = torch.cpu
    stream = _Stream()
    yield cpu, "Stream", lambda **_: stream
    yield cpu, "Event", lambda **_: Event(device)
    yield cpu, "device", lambda _: nullcontext()
    yield cpu, "current_stream", lambda *_: stream
    yield cpu, "stream", lambda stream: nullcontext()
    yield streams, "host_runs_ahead", lambda device: True
    yield streams, "_by_device", {}
    all_gathers, exchanges = point_to_point.issue_all_gathers, point_to_point.issue_exchanges

    def issue_all_gathers(pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int) -> list[Any]:
        copies = [(torch.empty_like(output), shard.detach().clone()) for output, shard in pairs]
        for (output, _), (_, own) in zip(pairs, copies, strict=True):
            output.data.copy_(own.repeat(group.size()))
        works = all_gathers(copies, group, tag)
        return [_Work(device, works, *(one for pair in copies for one in pair))]

    def issue_exchanges(
        pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int
    ) -> tuple[list[Any], list[list[torch.Tensor]]]:
        copies = [(whole.detach().clone(), torch.zeros_like(output)) for whole, output in pairs]
        works, parts = exchanges(copies, group, tag)
        held = [one for pair in copies for one in pair]
        return [_Work(device, works, *held, *(one for some in parts for one in some))], parts

    yield point_to_point, "issue_all_gathers", issue_all_gathers
    yield point_to_point, "issue_exchanges", issue_exchanges


@contextmanager
def _running_ahead() -> Iterator[Device]:
    """Let the host run ahead while the context is open; its ranks use the default group only."""
    device = Device()
    looks = _Looks(device)
    with ExitStack() as stack:
        stack.callback(device.end)
        stack.callback(looks.end)
        look = mock.patch.object(
            watchdog._Watchdog, "_look_at_devices", lambda watching: looks.look(watching)
        )
        stack.enter_context(look)
        for where, name, what in list(_replacements(device)):
            stack.enter_context(mock.patch.object(where, name, what, create=True))
        yield device


# -- ranks that go apart ---------------------------------------------------------------------------


@contextmanager
def _on_device(mode: str) -> Iterator[tuple[Device, Any, Any]]:
    """A device, a model that has made a step there, and what runs it."""
    torch.manual_seed(7)
    with _running_ahead() as device, mock.patch.object(watchdog, "PERIOD_S", PERIOD_S):
        model: Any = FSDP(Branching(num_blocks=3), auto_wrap_policy=ModuleWrapPolicy({Block}))
        run = in_mode(model, mode)
        loss_of(run, batch(dist.get_rank(), 0)).backward()
        assert device.synchronize()
        yield device, model, run


def _wait_until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _has_failed() -> bool:
    return watchdog._watchdog.on_devices._failure is not None


def _step_unseen(device: Device, run: Any, rank: int) -> None:
    """A step during which nothing is noticed: it is over before the device stands still."""
    device.is_watched = False
    loss_of(run, batch(rank, 1)).backward()
    device.is_watched = True


def _error_of_a_step(run: Any, rank: int, step: int) -> tuple[str, str]:
    try:
        loss_of(run, batch(rank, step)).backward()
    except DivergenceError as error:
        return type(error).__name__, str(error)
    return "", ""


def _skip(rank: int, world_size: int, mode: str, folder: str) -> tuple[bool, str, str]:
    """Rank 1 leaves a unit out: whether the host's wait for its device ends, the error of the next
    step, and what this rank has printed meanwhile; its flight record has the same."""
    printed: list[str] = []
    recorder = flight_recorder._Recorder(Path(folder))
    with (
        _on_device(mode) as (device, model, run),
        mock.patch.object(flight_recorder, "_recorder", recorder),
        mock.patch.object(flight_recorder, "_print_error", printed.append),
    ):
        model.module.skipped = frozenset({1}) if rank == 1 else frozenset()
        _step_unseen(device, run, rank)
        step = num_steps()
        is_done = device.synchronize(until=recorder.path.exists)
        _wait_until(recorder.path.exists)
        model.module.skipped = frozenset()
        kind, message = _error_of_a_step(run, rank, 2)
    assert kind == DivergenceError.__name__
    for part in ("unit 'blocks.1'", f"step {step}", "rank 1", "rank 0"):
        assert part in message
    assert json.loads(recorder.path.read_text())["reason"] == f"{kind}: {message}"
    (told,) = [line for line in printed if message in line]
    return is_done, message, told


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_a_unit_left_out(ranks: RankPool, tmp_path: Path, mode: str) -> None:
    answers = ranks.run(_skip, 2, mode, str(tmp_path))
    assert not answers[0][0]  # it stands still behind the gather of the unit left out on the other
    assert answers[0][1] == answers[1][1]
    for rank, (_, _, told) in enumerate(answers):
        assert told.startswith(f"rank {rank}: ")


@on_ranks(2)
def test_a_rank_that_dies(rank: int) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    with _on_device("eager") as (device, _, run):
        if rank == 1:
            store.wait(["stepped"], timedelta(seconds=LIMIT_S))  # or the step itself would raise
            store.set("step", str(num_steps()))
            error = ValueError("no more data")
            sys.excepthook(type(error), error, None)  # as the interpreter does
            store.wait(["learned"], timedelta(seconds=LIMIT_S))
            return
        _step_unseen(device, run, rank)
        store.set("stepped", "")
        _wait_until(_has_failed)
        kind, message = _error_of_a_step(run, rank, 2)
        store.set("learned", "")
    assert kind == RankFailedError.__name__
    for part in ("rank 1", "no more data", f"step {store.get('step').decode()}"):
        assert part in message


@on_ranks(2)
def test_a_late_rank_is_waited_for(rank: int) -> None:
    """Until the other one has compared what they have issued, twice."""
    store: Any = dist.distributed_c10d._get_default_store()
    compare, compared = notices.find_order_mismatch, []

    def compare_and_tell(*args: Any) -> str | None:
        result = compare(*args)
        compared.append(result)
        if len(compared) == 2:
            store.set("compared", "")
        return result

    with (
        _on_device("eager") as (device, _, run),
        mock.patch.object(notices, "find_order_mismatch", compare_and_tell),
    ):
        if rank == 1:
            store.wait(["compared"], timedelta(seconds=LIMIT_S))
        assert _error_of_a_step(run, rank, 1) == ("", "")
        assert device.synchronize()
    assert rank == 1 or len(compared) >= 2


class _Point:
    is_reached = False


def test_what_is_overdue() -> None:
    waits, group, first, second = DeviceWaits(), mock.Mock(), _Point(), _Point()
    waits.add(group, first)
    waits.add(group, second)
    assert [waits.look() for _ in range(4)] == [[(group, late)] for late in (False,) * 3 + (True,)]
    first.is_reached = True
    assert waits.look() == [(group, False)]  # it moves: another one may take as long
    assert waits
    second.is_reached = True
    assert waits.look() == [(group, False)]
    assert not waits
    waits.add(group, _Point())
    assert waits
    del group  # it is not kept
    assert not waits
