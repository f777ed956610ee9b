"""A CPU that is taken for a device whose host runs ahead of it, with gloo in the place of NCCL.

A wait for a collective is work of the device's one stream, which a thread runs; the host goes on.
The stream stands still where another rank does not come, until the communicators are aborted; then
it goes on. Messages match by order and size alone. Collectives transfer copies, so what the host
frees or writes meanwhile is not touched; what it computes is of no use.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fsdp_dynamo.comm import device_waits, point_to_point, process_groups, streams, watchdog
from fsdp_dynamo.comm.gather_plan import Pair

_LIMIT_S = 30.0
_REDUCES = 1 << 24


class Device:
    """The device: one stream, whatever the host calls it.

    Attributes:
        is_watched: whether the watchdog looks at it now.
    """

    def __init__(self) -> None:
        self.is_watched = True
        self._is_aborted = threading.Event()
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                item()
            except RuntimeError:  # nothing behind a collective that never ends is reached
                if not self._is_aborted.wait(_LIMIT_S):
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

    def abort(self) -> None:
        """End all collectives."""
        self._is_aborted.set()
        watchdog._close_connections(dist.group.WORLD)  # type: ignore[arg-type]

    def end(self) -> None:
        """Let its thread end, also where it waits for a rank that does not come."""
        self._is_aborted.set()
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

    def synchronize(self) -> None:
        """Wait until it has."""
        self._reached.wait()


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
    yield process_groups, "serves_cpu", lambda group: False  # so it gets a side group
    yield streams, "_by_device", {}
    all_gathers, exchanges = point_to_point.issue_all_gathers, point_to_point.issue_exchanges

    def copy_to_host(
        side: streams.SideStreams, tensor: torch.Tensor, after: Any = None
    ) -> streams.HostCopy:
        host = torch.empty_like(tensor)

        def copy() -> None:
            if after is not None:
                after.wait()
            host.copy_(tensor)

        device.enqueue(copy)
        return streams.HostCopy(tensor, host, side.after_current())

    def issue_all_gathers(pairs: Sequence[Pair], group: dist.ProcessGroup, _: int) -> list[Any]:
        copies = [(torch.empty_like(output), shard.detach().clone()) for output, shard in pairs]
        for (output, _), (_, own) in zip(pairs, copies, strict=True):
            output.data.copy_(own.repeat(group.size()))
        works = all_gathers(copies, group, sum(output.numel() for output, _ in pairs))
        return [_Work(device, works, *(one for pair in copies for one in pair))]

    def issue_exchanges(
        pairs: Sequence[Pair], group: dist.ProcessGroup, _: int
    ) -> tuple[list[Any], list[list[torch.Tensor]]]:
        copies = [(whole.detach().clone(), torch.zeros_like(output)) for whole, output in pairs]
        works, parts = exchanges(copies, group, _REDUCES + sum(whole.numel() for whole, _ in pairs))
        held = [one for pair in copies for one in pair]
        return [_Work(device, works, *held, *(one for some in parts for one in some))], parts

    yield streams.SideStreams, "copy_to_host", copy_to_host
    yield device_waits, "abort_communicators", device.abort
    yield point_to_point, "issue_all_gathers", issue_all_gathers
    yield point_to_point, "issue_exchanges", issue_exchanges


@contextmanager
def running_ahead() -> Iterator[Device]:
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
