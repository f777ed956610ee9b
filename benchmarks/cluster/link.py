"""The simulated cluster's link: a queue of collectives, the work objects, and a log.

One link stands for this rank's way to the network. Collectives pass through it one after the other:
each starts when it has been issued and the one before it is done, and takes the seconds that the
model says. The local memory traffic is real; *when* its result may be read is simulated.

On CPU tensors one thread moves the data, in order of issue, while the issuing thread computes, as
a backend's own threads (gloo) or copy engines do; the deadline is a number, and a wait lasts
for the mover and then sleeps until then. A sleep overshoots, by some 10 us within ``fine_sleep``
(Linux) and some 60 us elsewhere; on a busy machine by more. On CUDA tensors the delay is a kernel
on a side stream and the host never blocks, as with NCCL.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from benchmarks.cluster.delay import Delay

_NO_TIMEOUT = timedelta(0)
_PR_SET_TIMERSLACK = 29  # <linux/prctl.h>


@contextmanager
def fine_sleep() -> Iterator[None]:
    """Let this thread's sleeps end on time: Linux delays each by 50 us to save power."""
    if sys.platform != "linux":
        yield
        return
    set_option = ctypes.CDLL(None).prctl
    unused = (ctypes.c_ulong(0),) * 3
    set_option(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), *unused)
    try:
        yield
    finally:
        set_option(_PR_SET_TIMERSLACK, ctypes.c_ulong(0), *unused)  # 0: back to the default


class CollectiveRecord(NamedTuple):
    """Log entry of one collective. Times are on the clock ``time.perf_counter``.

    Attributes:
        op: name, as in ``cluster_model.Op``.
        payload_bytes: as ``ClusterModel.seconds`` counts it.
        wire_bytes: bytes that this rank sent.
        issued_s: when it was issued.
        starts_s: when the link was free for it.
        done_s: when its result could be read.
        waited_s: how long waiting for it blocked: the host or, on CUDA, the waiting stream.
    """

    op: str
    payload_bytes: int
    wire_bytes: int
    issued_s: float
    starts_s: float
    done_s: float
    waited_s: float


class Request(NamedTuple):
    """A collective to be issued.

    Attributes:
        op, payload_bytes, wire_bytes: as in ``CollectiveRecord``.
        seconds: how long the link is busy with it.
        inputs, outputs: its tensors.
        move: the local memory traffic.
    """

    op: str
    payload_bytes: int
    wire_bytes: int
    seconds: float
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    move: Callable[[], object]


class Timing(Protocol):
    """Timing of a collective, which the log keeps; it holds no tensors."""

    def record(self) -> CollectiveRecord: ...


class CommunicationLog:
    """Log of the collectives on the links, in order of issue."""

    def __init__(self) -> None:
        self._timings: list[Timing] = []

    def append(self, timing: Timing) -> None:
        """Add a collective that was issued."""
        self._timings.append(timing)

    def records(self) -> list[CollectiveRecord]:
        """All collectives since the last reset; on CUDA this waits for the device."""
        return [timing.record() for timing in self._timings]

    def reset(self) -> None:
        """Clear the log."""
        self._timings = []


class SimulatedWork(dist.Work):
    """A collective in flight; a subclass says how to wait for it."""

    def __init__(self, request: Request) -> None:
        super().__init__()
        self._outputs = request.outputs
        # A backend reads and writes these until it is done; without a reference a caller's
        # tensors would be freed earlier here than on a real cluster.
        self._in_use = [*request.inputs, *request.outputs]

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until done; timeouts are ignored, since nothing can fail."""
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether the result can be read; does not wait."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Same as ``is_completed``, because nothing can fail."""
        return self.is_completed()

    def exception(self) -> None:
        """Always ``None``."""
        return

    def synchronize(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def block_current_stream(self) -> None:
        """Same as ``wait``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The outputs."""
        return self._outputs


# -- CPU -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HostTiming:
    """Timing of a collective of CPU tensors; ``waited_s`` grows with each wait."""

    op: str
    payload_bytes: int
    wire_bytes: int
    issued_s: float
    starts_s: float
    done_s: float
    waited_s: float = 0.0

    def record(self) -> CollectiveRecord:
        """A copy for the log's reader."""
        return CollectiveRecord(*astuple(self))


class HostWork(SimulatedWork):
    """A collective of CPU tensors: done when its data has moved and its deadline is reached."""

    def __init__(self, request: Request, timing: HostTiming, moved: Future[object]) -> None:
        super().__init__(request)
        self._timing = timing
        self._moved = moved

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the data, then until the deadline; timeouts are ignored."""
        done_s = self._timing.done_s
        began_s = time.perf_counter()
        self._moved.result()
        now_s = time.perf_counter()
        while now_s < done_s:
            time.sleep(done_s - now_s)
            now_s = time.perf_counter()
        self._timing.waited_s += now_s - began_s
        self._in_use.clear()
        return True

    def is_completed(self) -> bool:
        """Whether the data has moved and the clock has reached the deadline."""
        return self._moved.done() and time.perf_counter() >= self._timing.done_s

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the outputs.

        DDP's C++ reducer waits for it at the end of the backward, in a callback of the autograd
        engine. Within a backward the future is completed by such a callback too: callbacks run in
        order, and DDP asks for the futures before it adds its own. Otherwise nothing would complete
        it, so there this waits.
        """
        future = _DeadlineFuture(self)
        if torch._C._current_graph_task_id() == -1:
            future.complete()
        else:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(future.complete)
        return future


class _DeadlineFuture(torch.futures.Future[Any]):
    """A future that is completed by waiting for its work, since no thread runs to do so."""

    def __init__(self, work: HostWork) -> None:
        super().__init__()
        self._work = work

    def complete(self) -> None:
        """Wait for the work, then set the result; does nothing the second time."""
        if not self.done():
            self._work.wait()
            self.set_result(self._work.result())

    def wait(self) -> Any:
        self.complete()
        return super().wait()


class HostLink:
    """The queue of collectives of CPU tensors.

    Args:
        log: where collectives are noted.
        burst_s: seconds of transfer that an idle link saves up at most: a token bucket lets as
            many bytes as it holds pass at once, and refills at the link's rate.
    """

    def __init__(self, log: CommunicationLog, burst_s: float = 0.0) -> None:
        self._log = log
        self._burst_s = self._saved_s = burst_s
        self._free_from_s = 0.0
        self._lock = threading.Lock()  # autograd may run hooks in a thread of its own
        # One thread: who waits for the last of several collectives has waited for all.
        self._mover = ThreadPoolExecutor(1, "simulated-link", initializer=_as_mover)

    def issue(self, request: Request) -> HostWork:
        """Queue a collective and begin to move its data."""
        op, payload_bytes, wire_bytes, seconds, *_ = request
        with self._lock:
            issued_s = time.perf_counter()
            starts_s = max(issued_s, self._free_from_s)
            saved_s = min(self._burst_s, self._saved_s + starts_s - self._free_from_s)
            self._saved_s = max(saved_s - seconds, 0.0)
            done_s = self._free_from_s = starts_s + max(seconds - saved_s, 0.0)
            timing = HostTiming(op, payload_bytes, wire_bytes, issued_s, starts_s, done_s)
            self._log.append(timing)
            moved = self._mover.submit(request.move)
        return HostWork(request, timing, moved)


def _as_mover() -> None:
    """Per-thread settings of the computing thread, which a new thread lacks."""
    torch.set_grad_enabled(False)


# -- CUDA ------------------------------------------------------------------------------------------
# Run by one test only, marked gpu; written without a GPU at hand.


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class CudaTiming:
    """Timing of a collective of CUDA tensors, by events of the device."""

    def __init__(self, request: Request, link: CudaLink) -> None:
        self._request = (request.op, request.payload_bytes, request.wire_bytes)
        self._link = link
        self._issued_s = time.perf_counter()
        self.starts = _timed_event()
        self.done = _timed_event()
        self.waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def record(self) -> CollectiveRecord:
        """The events' times on the host's clock; waits for the device."""
        link = self._link
        torch.cuda.synchronize(link.device)
        waited_s = sum(before.elapsed_time(after) for before, after in self.waits) / 1e3
        starts_s, done_s = link.host_clock_s(self.starts), link.host_clock_s(self.done)
        return CollectiveRecord(*self._request, self._issued_s, starts_s, done_s, waited_s)


class CudaWork(SimulatedWork):
    """A collective of CUDA tensors: done when the side stream has passed its event."""

    def __init__(self, request: Request, timing: CudaTiming, stream: torch.cuda.Stream) -> None:
        super().__init__(request)
        self._timing = timing
        self._stream = stream

    @property
    def in_use(self) -> list[torch.Tensor]:
        """The tensors that must not be freed; emptied by the first wait."""
        return self._in_use

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Make the current stream wait; the host goes on. Timeouts are ignored."""
        waiting = torch.cuda.current_stream(self._stream.device)
        before, after = _timed_event(), _timed_event()
        before.record(waiting)
        waiting.wait_event(self._timing.done)
        after.record(waiting)
        self._timing.waits.append((before, after))
        self._in_use.clear()
        return True

    def is_completed(self) -> bool:
        """Whether the side stream has passed the event."""
        return bool(self._timing.done.query())

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future; its ``wait`` makes the current stream wait."""
        device = self._stream.device
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future


class CudaLink:
    """The queue of collectives of one CUDA device: a side stream, which runs in order.

    Data is moved after the delay and takes its own time on top, since a real backend's overlap of
    the two is not modelled.

    Args:
        log: where collectives are noted.
        device: the device, with an index.
    """

    def __init__(self, log: CommunicationLog, device: torch.device) -> None:
        self.device = device
        self._log = log
        self._stream = torch.cuda.Stream(device)
        self._origin = _timed_event()
        self._delay = Delay()
        with torch.cuda.stream(self._stream):
            self._origin.record()
        self._origin.synchronize()
        self._origin_s = time.perf_counter()
        self._in_flight: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []

    def host_clock_s(self, event: torch.cuda.Event) -> float:
        """When a completed event happened, on the host's clock."""
        return self._origin_s + float(self._origin.elapsed_time(event)) / 1e3

    def issue(self, request: Request) -> CudaWork:
        """Queue a collective behind the current stream's work and move its data there."""
        timing = CudaTiming(request, self)
        self._log.append(timing)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            timing.starts.record()
            self._delay.enqueue(request.seconds)
            request.move()
            timing.done.record()
        work = CudaWork(request, timing, self._stream)
        # Work that is never waited for must not free memory that the side stream still uses.
        self._in_flight = [kept for kept in self._in_flight if not kept[0].query()]
        self._in_flight.append((timing.done, work.in_use))
        return work
