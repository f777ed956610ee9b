"""Streams beside the one that computes, on devices whose host runs ahead of them.

[Note: what a collective waits for]

A collective starts when everything has run that was enqueued, at its issue, on the stream that is
current then. Waiting for it holds back the current stream, not the host. So a gather that is issued
on the computing stream behind a unit's forward does not overlap it, and one that is waited for in
order to start the next collective stops the computation. Hence three streams of our own:

- ``gathers``: shards are copied from the host, cast and sent, and unsharded flat parameters are
  allocated, in the order of this stream. Its memory returns to its own pool. What a unit frees is
  in use until the streams that computed with it have passed it: it is retired, and freed when the
  next unit is about to begin (``settle``), after which gathers wait for these streams, and for what
  has come before on the current one. So a gather runs beside one unit, whether its
  place was foreseen or not, and two units are unsharded. A unit that comes again before that, as
  the last one of a forward does, is not gathered again.
- ``replicas``: the mean over replicas, or between nodes, waits here for the reduce-scatter before
  it.
- ``copies``: offloaded gradients go to the host.

Where the host does not run ahead (CPUs), there are none, and nothing is deferred.

The stream that computes is whichever the user has made current, and another unit may run on another
stream. Streams and events belong to a device, and the current device need not be that of the
parameters: autograd's callbacks run on the thread that called ``backward()``, and a new thread
begins with the first device. So nothing here asks for "the current stream" without a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fsdp_dynamo import events


class SideStreams:
    """The streams of one device.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        high = -1  # what they do is short, and what follows waits for it
        self._gathers = self._module.Stream(device=device, priority=high)
        self._replicas = self._module.Stream(device=device, priority=high)
        self._copies = self._module.Stream(device=device)
        self._retired: list[tuple[Sequence[torch.UntypedStorage], list[Any]]] = []

    def current(self) -> Any:
        """The stream that is current on the device now."""
        return self._module.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Enqueue what is issued inside on a stream of the device, and allocate there."""
        return self._module.stream(stream)  # type: ignore[no-any-return]

    @contextmanager
    def on_followed(self, stream: Any) -> Iterator[None]:
        """Run what follows on a side stream, for which the current stream waits at the end."""
        with self.on(stream):
            yield
        self.follow(stream)

    def follow(self, stream: Any) -> None:
        """Let the current stream wait for what is enqueued on another one now."""
        current = self.current()
        if stream != current:
            current.wait_stream(stream)

    def on_device(self) -> AbstractContextManager[object]:
        """Make the device current."""
        return self._module.device(self._device)  # type: ignore[no-any-return]

    def event_on(self, stream: Any, *, enable_timing: bool = False) -> Any:
        """An event behind what is enqueued on a stream now."""
        event = self._module.Event(enable_timing=enable_timing)
        event.record(stream)
        return event

    # -- gathers -------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[object]:
        """Enqueue what is issued inside on the stream of gathers, and allocate there."""
        return self.on(self._gathers)

    def join(self, readers: list[Any]) -> None:
        """Let the current stream follow the gathers that other streams have waited for.

        Args:
            readers: those streams; the current one becomes one of them.
        """
        current = self.current()
        if current in readers:
            return
        if readers:
            self.follow(readers[0])
        readers.append(current)

    def settle(self) -> None:
        """Let gathers wait for what is enqueued now; free what was retired before."""
        waited_for = [self.current()]
        self._gathers.wait_stream(waited_for[0])
        retired, self._retired = self._retired, []
        for storages, readers in retired:
            for stream in readers:
                if stream not in waited_for:
                    self._gathers.wait_stream(stream)
                    waited_for.append(stream)
            for storage in storages:
                storage.resize_(0)

    def retire(self, storages: Sequence[torch.UntypedStorage], readers: Sequence[Any] = ()) -> None:
        """Free storages of gathers after what has been enqueued has run.

        Args:
            storages: freed together, by the next ``settle``.
            readers: streams that have read them, beside the current one.
        """
        self._retired.append((storages, [*readers, self.current()]))

    def take_back(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Let storages that were retired together be used again; false if they are gone."""
        wanted = {one.data_ptr() for one in storages}
        kept = [one for one in self._retired if wanted.isdisjoint(s.data_ptr() for s in one[0])]
        is_there = len(kept) < len(self._retired)
        self._retired = kept
        return is_there

    # -- reductions ----------------------------------------------------------------------------

    def over_replicas(self) -> AbstractContextManager[object]:
        """Enqueue what is issued inside on the stream of means over replicas."""
        return self.on(self._replicas)

    def replicas_follow(self) -> None:
        """Let means over replicas use memory again only after what is enqueued now."""
        self._replicas.wait_stream(self.current())

    def copy_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a tensor that the current stream has made to pinned memory."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        self._copies.wait_stream(self.current())
        with self.on(self._copies):
            host.copy_(tensor, non_blocking=True)
        return HostCopy(tensor, host, self.after(self._copies))

    def timer(self) -> StreamTimer:
        """A timer of the current stream."""
        return StreamTimer(self, computes=self.current() != self._replicas)

    def after(self, stream: Any) -> StreamEvent:
        """All that is enqueued on a stream of the device now, to be waited for."""
        return StreamEvent(self, self.event_on(stream))

    def after_gathers(self) -> StreamEvent:
        """All that is enqueued on the stream of gathers now, to be waited for."""
        return self.after(self._gathers)

    def after_current(self) -> StreamEvent:
        """All that is enqueued on the current stream now, to be waited for."""
        return self.after(self.current())


class StreamEvent:
    """Work of our own on a stream, to be waited for as a collective is."""

    def __init__(self, streams: SideStreams, event: Any) -> None:
        self._streams = streams
        self._event = event

    @property
    def is_reached(self) -> bool:
        """Whether it is done; the host does not wait."""
        # The watchdog asks from its own thread. A query there makes a context on the device that is
        # current, half a gigabyte of it, and in a new thread that is the first.
        with self._streams.on_device():
            done: bool = self._event.query()
        return done

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._streams.current().wait_event(self._event)

    def synchronize(self) -> None:
        """Block the host until it is done."""
        self._event.synchronize()


class StreamClock:
    """Times of points of a program on a device, on the host's clock.

    Args:
        streams: of the device.
    """

    def __init__(self, streams: SideStreams) -> None:
        self._streams = streams
        self._stopped: Any = None
        self._stopped_ns = 0

    def now(self) -> Callable[[], int]:
        """Note where the current stream is; gives its time after ``stop``."""
        event = self._recorded()

        def read() -> int:
            event.synchronize()  # of another stream, perhaps
            before_ms: float = event.elapsed_time(self._stopped)
            return self._stopped_ns - round(1e6 * before_ms)

        return read

    def stop(self) -> None:
        """Block the host until the current stream is here: this moment is known on both clocks."""
        self._stopped = self._recorded()
        self._stopped.synchronize()
        self._stopped_ns = time.perf_counter_ns()

    def _recorded(self) -> Any:
        return self._streams.event_on(self._streams.current(), enable_timing=True)


class StreamTimer:
    """Time for which the stream that computes stands still between two points of a program.

    Args:
        streams: of the device.
        computes: whether that is the current stream; otherwise it stands still for no time.
    """

    def __init__(self, streams: SideStreams, *, computes: bool) -> None:
        self._streams = streams
        self._computes = computes
        self._begin = self._now()

    def _now(self) -> Any:
        return self._streams.event_on(self._streams.current(), enable_timing=True)

    def stopped(self) -> Callable[[], int]:
        """Ends here; gives the nanoseconds, for which the host waits."""
        end = self._now()

        def elapsed_ns() -> int:
            if not self._computes:
                return 0
            end.synchronize()
            elapsed_ms: float = self._begin.elapsed_time(end)
            return round(1e6 * elapsed_ms)

        return elapsed_ns


class HostCopy:
    """A copy to the host in flight; keeps its source alive.

    Attributes:
        host: what is copied to.
    """

    def __init__(self, source: torch.Tensor, host: torch.Tensor, end: StreamEvent) -> None:
        self.host = host
        self._source: torch.Tensor | None = source
        self._end = end

    @property
    def is_done(self) -> bool:
        """Whether the host can read it without waiting."""
        return self._end.is_reached

    def wait(self) -> torch.Tensor:
        """Block the host until the copy is there; returns it."""
        self._end.synchronize()
        self._source = None
        return self.host


_by_device: dict[torch.device, SideStreams | None] = {}


def host_runs_ahead(device: torch.device) -> bool:
    """Whether the host enqueues work on the device without waiting for it."""
    return device.type != "cpu"


def side_streams(device: torch.device) -> SideStreams | None:
    """The side streams of a device; ``None`` where the host does not run ahead of it."""
    try:
        return _by_device[device]
    except KeyError:
        _by_device[device] = SideStreams(device) if host_runs_ahead(device) else None
        return _by_device[device]


def timer_of(device: torch.device) -> StreamTimer | None:
    """A timer of the current stream; ``None`` where the host itself waits."""
    streams = side_streams(device)
    return None if streams is None else streams.timer()


def time_events_on(device: torch.device) -> None:
    """Give the events of a recording, if there is one, the times of a device from now on."""
    log = events.recorder
    if log is not None and log.clock is None:
        streams = side_streams(device)
        log.clock = None if streams is None else StreamClock(streams)
