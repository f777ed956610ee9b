"""Streams beside the one that computes, on devices whose host runs ahead of them.

[Note: what a collective waits for]

A collective starts when everything has run that was enqueued, at its issue, on the stream that is
current then. Waiting for it holds back the current stream, not the host. So a gather that is issued
on the computing stream behind a unit's forward does not overlap it, and one that is waited for in
order to start the next collective stops the computation. Hence three streams of our own:

- ``gathers``: shards are copied from the host, cast and sent, and unsharded flat parameters are
  allocated, in the order of this stream. Its memory returns to its own pool. What a unit frees is
  in use until the computing stream has passed it: it is retired, and freed when that stream is
  about to begin the next unit (``settle``), after which gathers wait for what has come before. So a
  gather runs beside one unit, whether its place was foreseen or not, and two units are unsharded. A
  unit that comes again before that, as the last one of a forward does, is not gathered again.
- ``replicas``: the mean over replicas, or between nodes, waits here for the reduce-scatter before
  it.
- ``copies``: offloaded gradients go to the host.

Where the host does not run ahead (CPUs), there are none, and nothing is deferred.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fsdp_dynamo import events


class SideStreams:
    """The streams of one device.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        high = -1  # what they do is short, and what follows waits for it
        self._gathers = self._module.Stream(priority=high)
        self._replicas = self._module.Stream(priority=high)
        self._copies = self._module.Stream()
        self._retired: list[torch.UntypedStorage] = []

    # -- gathers -------------------------------------------------------------------------------

    def gathering(self) -> AbstractContextManager[object]:
        """Enqueue what is issued inside on the stream of gathers, and allocate there."""
        return self._module.stream(self._gathers)  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Let gathers wait for what is enqueued now; free what was retired before."""
        self._gathers.wait_stream(self._module.current_stream())
        retired, self._retired = self._retired, []
        for storage in retired:
            storage.resize_(0)

    def retire(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Free storages of gathers after what the current stream has enqueued has run."""
        self._retired += storages

    def take_back(self, storages: Sequence[torch.UntypedStorage]) -> bool:
        """Let storages that were retired together be used again; false if they are gone."""
        wanted = {one.data_ptr() for one in storages}
        kept = [one for one in self._retired if one.data_ptr() not in wanted]
        is_there = len(kept) < len(self._retired)
        self._retired = kept
        return is_there

    # -- reductions ----------------------------------------------------------------------------

    def on_current(self) -> AbstractContextManager[object]:
        """Issue what follows on the stream that is current now."""
        return self._module.stream(self._module.current_stream())  # type: ignore[no-any-return]

    def over_replicas(self) -> AbstractContextManager[object]:
        """Enqueue what is issued inside on the stream of means over replicas."""
        return self._module.stream(self._replicas)  # type: ignore[no-any-return]

    def replicas_follow(self) -> None:
        """Let means over replicas use memory again only after what is enqueued now."""
        self._replicas.wait_stream(self._module.current_stream())

    def copy_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start to copy a tensor that the current stream has made to pinned memory."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
        self._copies.wait_stream(self._module.current_stream())
        with self._module.stream(self._copies):
            host.copy_(tensor, non_blocking=True)
        return HostCopy(tensor, host, self._recorded(self._copies))

    def after_gathers(self) -> StreamEvent:
        """What waits for all that is enqueued on the stream of gathers now."""
        return StreamEvent(self._recorded(self._gathers), self._module)

    def timer(self) -> StreamTimer:
        """A timer of the current stream."""
        computes = self._module.current_stream() != self._replicas
        return StreamTimer(self._module, computes=computes)

    def clock(self) -> StreamClock:
        """A clock of what is enqueued on the device from now on."""
        return StreamClock(self._module)

    def after_current(self) -> StreamEvent:
        """The same of the current stream."""
        return StreamEvent(self._recorded(self._module.current_stream()), self._module)

    def _recorded(self, stream: Any) -> Any:
        event = self._module.Event()
        event.record(stream)
        return event


class StreamEvent:
    """Work of our own on a side stream, to be waited for as a collective is."""

    def __init__(self, event: Any, module: Any) -> None:
        self._event = event
        self._module = module

    @property
    def is_reached(self) -> bool:
        """Whether it is done; the host does not wait."""
        done: bool = self._event.query()
        return done

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._module.current_stream().wait_event(self._event)


class StreamClock:
    """Times of points of a program on a device, on the host's clock.

    Args:
        module: of the device.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
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
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream())
        return event


class StreamTimer:
    """How long the stream that computes stands still between two points of a program.

    Args:
        module: of the device.
        computes: whether that is the current stream; otherwise it stands still for no time.
    """

    def __init__(self, module: Any, *, computes: bool) -> None:
        self._module = module
        self._computes = computes
        self._begin = self._now()

    def _now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream())
        return event

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

    def __init__(self, source: torch.Tensor, host: torch.Tensor, event: Any) -> None:
        self.host = host
        self._source: torch.Tensor | None = source
        self._event = event

    @property
    def is_done(self) -> bool:
        """Whether the host can read it without waiting."""
        done: bool = self._event.query()
        return done

    def wait(self) -> torch.Tensor:
        """Block the host until the copy is there; returns it."""
        self._event.synchronize()
        self._source = None
        return self.host


_by_device: dict[torch.device, SideStreams | None] = {}


def host_runs_ahead(device: torch.device) -> bool:
    """Whether the host enqueues work on the device without waiting for it."""
    return device.type != "cpu"


def side_streams(device: torch.device) -> SideStreams | None:
    """The side streams of a device; ``None`` where the host does not run ahead of it."""
    if device in _by_device:
        return _by_device[device]
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
        log.clock = None if streams is None else streams.clock()
