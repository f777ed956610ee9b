"""Side streams, on devices whose host runs ahead.

[Note: what a collective waits for]

A collective starts when all work has run that was enqueued on its stream before. Waiting for it
blocks the waiting stream, not the host. So an all-gather issued behind a unit's forward does not
overlap that forward, and a wait that only serves to issue the next collective stops the
computation. Hence streams of our own, whose kernels have priority over those of the computing
stream. A collective runs on the stream that is current if that is one of ours (``collecting``),
with its copies before and behind it; an event behind them is all that other streams wait for.

- ``gathers``: shards are copied from the host, cast and sent, and unsharded flat parameters are
  allocated, in the order of this stream; freed memory returns to its pool. Computing streams may
  still read an unsharded parameter when its unit reshards. So its storage is freed later, when the
  next unit is about to begin (``free_pending``): the stream of gathers first waits for these
  readers and for all earlier work on the current stream. An all-gather thus overlaps one unit,
  whether it was prefetched or not, and at most two units are unsharded. A unit that runs again
  before that, as the last unit of a forward does, keeps its parameters.
- ``replicas``: the mean over replicas, or between nodes, waits here for the preceding
  reduce-scatter. Shards are gathered between nodes here, too: the link is slower than the gathers.
- One for each group and direction runs the collectives that are issued on the computing stream.
- ``copies``: offloaded gradients are copied to the host.

Where the host does not run ahead (CPU), there are no side streams and nothing is deferred.

The computing stream is the one that the user has made current, and may differ between units.
Streams and events belong to a device, and the current device may not be that of the parameters:
autograd's callbacks run on the thread that called ``backward()``, and a new thread starts on the
first device. So this file never asks for "the current stream" without a device.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo import events

_HIGH = -1
"""Priority of streams whose kernels are short, and awaited by the computing stream."""


class SideStreams:
    """Side streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._gathers = self._module.Stream(device=device, priority=_HIGH)
        self._replicas = self._module.Stream(device=device, priority=_HIGH)
        self._copies = self._module.Stream(device=device)
        self._of_groups: dict[tuple[str, bool], Any] = {}
        self._to_free: list[tuple[Sequence[torch.UntypedStorage], list[Any]]] = []

    def current(self) -> Any:
        """Current stream of the device."""
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream of the device current inside the context, for launches and allocations."""
        if stream == self.current():
            return nullcontext()
        return self._module.stream(stream)  # type: ignore[no-any-return]

    def on_followed(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream current inside the context; the previous stream waits for it at the end."""
        current = self.current()
        return nullcontext() if stream == current else self._followed(stream, current)

    @contextmanager
    def _followed(self, stream: Any, by: Any) -> Iterator[None]:
        with self._module.stream(stream):
            yield
        by.wait_stream(stream)

    def follow(self, stream: Any) -> None:
        """Make the current stream wait for work enqueued on another stream so far."""
        current = self.current()
        if stream != current:
            current.wait_stream(stream)

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def on_device(self) -> AbstractContextManager[object]:
        """Make the device current."""
        return self._module.device(self._device)  # type: ignore[no-any-return]

    def event_on(self, stream: Any, *, enable_timing: bool = False) -> Any:
        """Record an event behind the work enqueued on a stream so far."""
        event = self._module.Event(enable_timing=enable_timing)
        event.record(stream)
        return event

    def collecting(
        self, group: dist.ProcessGroup, *, gathers: bool
    ) -> tuple[Any, AbstractContextManager[object]]:
        """Return a stream for a group's collective, and a context in which it is current.

        If the current stream is one of ours, it is that one; else the stream of the group's
        all-gathers, or of its reductions, which waits for the current stream. Tensors of the
        current stream must be kept until that has waited for the collective.
        """
        current = self.current()
        if current in (self._gathers, self._replicas):
            return current, nullcontext()
        key = group.group_name, gathers
        stream = self._of_groups.get(key)
        if stream is None:
            stream = self._module.Stream(device=self._device, priority=_HIGH)
            self._of_groups[key] = stream
        stream.wait_stream(current)
        return stream, self._module.stream(stream)

    # -- gathers -------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[object]:
        """Make the stream of gathers current inside the context."""
        return self.on(self._gathers)

    def join(self, readers: list[Any]) -> None:
        """Make the current stream wait for the all-gathers that other streams have waited for.

        ``readers`` are those streams; the current stream is added to them. Then ``free_pending``.
        """
        current = self.current()
        if current not in readers:
            if readers:
                current.wait_stream(readers[0])
            readers.append(current)
        self.free_pending(current)

    def free_pending(self, current: Any = None) -> None:
        """Make the stream of gathers wait for readers, then free the storages of ``free_later``."""
        waited_for = [current or self.current()]
        self._gathers.wait_stream(waited_for[0])
        to_free, self._to_free = self._to_free, []
        for storages, readers in to_free:
            for stream in readers:
                if stream not in waited_for:
                    self._gathers.wait_stream(stream)
                    waited_for.append(stream)
            for storage in storages:
                storage.resize_(0)

    def free_later(
        self, storages: Sequence[torch.UntypedStorage], readers: Sequence[Any] = ()
    ) -> None:
        """Free storages, all together, in the next ``free_pending``.

        ``readers`` are the streams that have read them, besides the current one.
        """
        self._to_free.append((storages, [*readers, self.current()]))

    def cancel_free(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Keep storages of a ``free_later``; false if they have been freed already."""
        wanted = {one.data_ptr() for one in storages}
        kept = [one for one in self._to_free if wanted.isdisjoint(s.data_ptr() for s in one[0])]
        is_there = len(kept) < len(self._to_free)
        self._to_free = kept
        return is_there

    def gathering_between_nodes(self) -> AbstractContextManager[object]:
        """Make another stream current inside the context, behind what is enqueued for gathers."""
        self._replicas.wait_stream(self._gathers)
        return self.on(self._replicas)

    # -- reductions ----------------------------------------------------------------------------

    def over_replicas(self) -> AbstractContextManager[object]:
        """Make the stream of means over replicas current inside the context."""
        return self.on(self._replicas)

    def copy_to_host(self, tensor: torch.Tensor, after: Any = None) -> HostCopy:
        """Start a copy of a tensor, produced on the current stream, to pinned memory.

        ``after`` is the handle of a collective that writes the tensor.
        """
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        self._copies.wait_stream(self.current())
        with self.on(self._copies):
            if after is not None:
                after.wait()
            host.copy_(tensor, non_blocking=True)
        return HostCopy(tensor, host, self.after(self._copies))

    def timer(self) -> StreamTimer:
        """Return a timer of the current stream."""
        return StreamTimer(self, computes=self.current() != self._replicas)

    def after(self, stream: Any) -> StreamEvent:
        """Return an event behind the work enqueued on a stream so far."""
        return StreamEvent(self, self.event_on(stream))

    def after_gathers(self) -> StreamEvent:
        """Return an event behind the work enqueued on the stream of gathers so far."""
        return self.after(self._gathers)

    def after_current(self) -> StreamEvent:
        """Return an event behind the work enqueued on the current stream so far."""
        return self.after(self.current())


class StreamEvent:
    """Work on a stream of ours, with the interface of a collective's handle."""

    def __init__(self, streams: SideStreams, event: Any) -> None:
        self._streams = streams
        self._event = event

    @property
    def is_captured(self) -> bool:
        """Whether the current stream would wait for the work in a CUDA graph."""
        return self._streams.is_capturing

    @property
    def is_reached(self) -> bool:
        """Whether the work is done; does not block the host."""
        # The watchdog calls this on its own thread, where device 0 is current. Without the guard
        # the query would create a context on that device (0.5 GB).
        with self._streams.on_device(), _while_others_capture():
            done: bool = self._event.query()
        return done

    def wait(self) -> None:
        """Make the current stream wait for the work."""
        self._streams.current().wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until the work is done."""
        self._event.synchronize()


@contextmanager
def _while_others_capture() -> Iterator[None]:
    """Let this thread query events inside while another one captures a CUDA graph.

    Otherwise a query by any thread invalidates a capture, in the mode of ``torch.cuda.graph``.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_THREAD_LOCAL)
    if exchange is not None:
        exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        if exchange is not None:
            exchange(ctypes.byref(mode))


_THREAD_LOCAL = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`` of CUDA's driver."""


@lru_cache(maxsize=1)
def _exchange_capture_mode() -> Any:
    """Return the driver's function, which torch does not have; ``None`` without CUDA."""
    try:
        return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


class StreamClock:
    """Clock that maps points on a device's streams to the host's time."""

    def __init__(self, streams: SideStreams) -> None:
        self._streams = streams
        self._stopped: Any = None
        self._stopped_ns = 0

    def now(self) -> Callable[[], int]:
        """Record a point on the current stream; the result gives its time after ``stop``."""
        event = self._recorded()

        def read() -> int:
            event.synchronize()  # ``stop`` has waited for one stream only
            before_ms: float = event.elapsed_time(self._stopped)
            return self._stopped_ns - round(1e6 * before_ms)

        return read

    def stop(self) -> None:
        """Block the host until the current stream is here; both clocks know this moment."""
        self._stopped = self._recorded()
        self._stopped.synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def _recorded(self) -> Any:
        return self._streams.event_on(self._streams.current(), enable_timing=True)


class StreamTimer:
    """Time for which the computing stream is blocked between two points.

    Args:
        computes: whether the current stream is the computing one; if not, the time is 0.
    """

    def __init__(self, streams: SideStreams, *, computes: bool) -> None:
        self._streams = streams
        self._computes = computes
        self._begin = self._now()

    def _now(self) -> Any:
        return self._streams.event_on(self._streams.current(), enable_timing=True)

    def stopped(self) -> Callable[[], int]:
        """Record the end; the result gives nanoseconds, for which the host waits."""
        end = self._now()

        def elapsed_ns() -> int:
            if not self._computes:
                return 0
            end.synchronize()
            elapsed_ms: float = self._begin.elapsed_time(end)
            return round(1e6 * elapsed_ms)

        return elapsed_ns


class HostCopy:
    """Copy to the host in flight; keeps its source alive.

    Attributes:
        host: destination.
    """

    def __init__(self, source: torch.Tensor, host: torch.Tensor, end: StreamEvent) -> None:
        self.host = host
        self._source: torch.Tensor | None = source
        self._end = end

    @property
    def is_done(self) -> bool:
        """Whether the host can read the copy without waiting."""
        return self._end.is_reached

    def wait(self) -> torch.Tensor:
        """Block the host until the copy is complete; return it."""
        self._end.synchronize()
        self._source = None
        return self.host


_by_device: dict[torch.device, SideStreams | None] = {}


def host_runs_ahead(device: torch.device) -> bool:
    """Whether the host enqueues work on the device without waiting for it."""
    return device.type != "cpu"


def side_streams(device: torch.device) -> SideStreams | None:
    """Return the side streams of a device; ``None`` where the host does not run ahead."""
    try:
        return _by_device[device]
    except KeyError:
        _by_device[device] = SideStreams(device) if host_runs_ahead(device) else None
        return _by_device[device]


def timer_of(device: torch.device) -> StreamTimer | None:
    """Return a timer of the current stream; ``None`` where the host itself waits."""
    streams = side_streams(device)
    return None if streams is None else streams.timer()


def time_events_on(device: torch.device) -> None:
    """Give the open recording of events, if any, the clock of a device."""
    log = events.recorder
    if log is not None and log.clock is None:
        streams = side_streams(device)
        log.clock = None if streams is None else StreamClock(streams)
