"""Recorder of unshards, reshards, collectives and compute, in order of issue and by step.

While off, ``recorder`` is ``None``, and ``begin``, ``instant``, ``complete`` and ``finish`` return
at once. While on, an event is appended when its work is *issued*.

Times are the host's. On a device behind the host these would be times of enqueueing, so the log has
a clock of the device, whose readings are evaluated when the recording ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

Kind = Literal[
    "all_gather", "reduce_scatter", "all_reduce", "unshard", "reshard", "forward", "backward"
]
Phase = Literal["forward", "backward"]
Source = Literal["hook", "graph"]

COLLECTIVE_KINDS = frozenset({"all_gather", "reduce_scatter", "all_reduce"})
COMPUTE_KINDS = frozenset({"forward", "backward"})


Reading = Callable[[], int]
"""Nanoseconds on the host's clock, known once the device has reached the point; blocks the host."""


class Clock(Protocol):
    """Clock of a device that runs behind the host."""

    def now(self) -> Reading:
        """Record the current position of the current stream."""

    def stop(self) -> None:
        """Block the host until the current stream is here; then readings may be evaluated."""


@dataclass(frozen=True)
class Moment:
    """Point in time on the host (``time.perf_counter_ns``) and, if there is a clock, the device."""

    host_ns: int
    reading: Reading | None


@dataclass
class Event:
    """Unshard, reshard, collective or compute of one unit.

    Attributes:
        unit: FQN of the unit, ``""`` for the root.
        kind: what happened.
        phase: pass in which it was issued.
        num_bytes: size of the unsharded tensor; 0 for compute.
        source: ``"hook"`` if Python code around the compute issued it, ``"graph"`` if a node of a
            compiled graph did.
        issued_ns: when it was issued or began (``time.perf_counter_ns``).
        waited_ns: when it was known to be complete; 0 while it is in flight.
        exposed_ns: how long it blocked the rank: the host or, on a device, the computing stream.
        message_bytes: bytes sent, all ranks' parts: ``num_bytes``, or less with a wire format; 0
            unless it is a collective.
        graph: digest of the plan of the compiled graph that issued it; ``""`` for none.
        step: step it belongs to; ``None`` outside of forwards and backwards (state dicts).
        readings: device times by attribute name, which replace the host's times when the recording
            ends.
    """

    unit: str
    kind: Kind
    phase: Phase
    num_bytes: int
    source: Source
    issued_ns: int
    waited_ns: int = 0
    exposed_ns: int = 0
    message_bytes: int = 0
    graph: str = ""
    step: Step | None = field(default=None, compare=False)
    readings: dict[str, Reading] = field(default_factory=dict, repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """``(kind, unit, phase)``, as compared by assertions about order."""
        return (self.kind, self.unit, self.phase)

    def begin_with(self, moment: Moment) -> None:
        """Move the begin of the event to an earlier moment."""
        self.issued_ns = moment.host_ns
        self.readings.pop("issued_ns", None)
        if moment.reading is not None:
            self.readings["issued_ns"] = moment.reading


class EventLog(list[Event]):
    """List of ``Event`` that ``record_events`` yields, in order of issue.

    Attributes:
        at_end: called when the recording ends, or ``None``.
        clock: clock of the device; ``None`` on CPU, or until the device is known.
    """

    def __init__(self, outer: EventLog | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._outer = outer
        self._inner: list[EventLog] = []  # open recordings inside this one
        self.at_end: Callable[[], None] | None = None
        self.clock: Clock | None = None

    def issue(
        self,
        unit: str,
        kind: Kind,
        phase: Phase,
        num_bytes: int = 0,
        source: Source = "hook",
        graph: str = "",
    ) -> Event:
        """Append an event that begins now, and return it; for the arguments see ``Event``."""
        message_bytes = num_bytes if kind in COLLECTIVE_KINDS else 0
        event = Event(
            *(unit, kind, phase, num_bytes, source, time.perf_counter_ns()),
            message_bytes=message_bytes,
            graph=graph,
            step=current_step(),
        )
        if self.clock is not None:
            event.readings["issued_ns"] = self.clock.now()
        with self._lock:  # backward hooks of CUDA devices run on autograd's own threads
            for log in (self, *self._inner):
                log.append(event)
        return event

    def instant(
        self,
        unit: str,
        kind: Kind,
        phase: Phase,
        num_bytes: int,
        source: Source = "hook",
        graph: str = "",
    ) -> None:
        """Append an event without duration; for the arguments see ``Event``."""
        event = self.issue(unit, kind, phase, num_bytes, source, graph)
        event.waited_ns = event.issued_ns
        if self.clock is not None:
            event.readings["waited_ns"] = event.readings["issued_ns"]

    def now(self) -> Moment:
        """Return the current time, for an event that is recorded later."""
        return Moment(time.perf_counter_ns(), None if self.clock is None else self.clock.now())

    def end(self, event: Event) -> None:
        """End an event now."""
        event.waited_ns = time.perf_counter_ns()
        if self.clock is not None:
            event.readings["waited_ns"] = self.clock.now()

    @contextmanager
    def within(self) -> Iterator[EventLog]:
        """Open a recording inside this one; both get what is issued meanwhile."""
        log = EventLog(self)
        self._inner.append(log)
        try:
            yield log
        finally:
            if self.at_end is not None:
                self.at_end()
            # Not ``remove``, which would compare logs by their contents.
            self._inner = [other for other in self._inner if other is not log]
            log.read_clock()

    def read_clock(self) -> None:
        """Wait for the device, and replace the host's times of events by the device's."""
        if self._outer is not None:
            self.clock = self._outer.clock
        if self.clock is not None:
            self.clock.stop()
        for event in self:
            for name, reading in event.readings.items():
                setattr(event, name, reading())
            event.readings.clear()

    def keys(self, *kinds: Kind) -> list[tuple[str, str, str]]:
        """``Event.key`` of all events, or of the given kinds."""
        return [event.key for event in self if not kinds or event.kind in kinds]

    def peak_unsharded_bytes(self) -> int:
        """Largest number of bytes unsharded at one time, from unshard and reshard events."""
        live = peak = 0
        for event in self:
            if event.kind == "unshard":
                live += event.num_bytes
                peak = max(peak, live)
            elif event.kind == "reshard":
                live -= event.num_bytes
        return peak

    def exposed_ms(self) -> float:
        """Milliseconds for which collectives blocked the rank."""
        return sum(e.exposed_ns for e in self if e.kind in COLLECTIVE_KINDS) / 1e6


recorder: EventLog | None = None
"""Log being written, or ``None``. Only ``record_events`` sets it."""


def begin(unit: str, kind: Kind, phase: Phase, num_bytes: int = 0) -> Event | None:
    """Record an event that begins now; returns ``None`` while nothing records."""
    return None if recorder is None else recorder.issue(unit, kind, phase, num_bytes)


def instant(unit: str, kind: Kind, phase: Phase, num_bytes: int) -> None:
    """Record an event without duration."""
    if recorder is not None:
        recorder.instant(unit, kind, phase, num_bytes)


def finish(event: Event | None) -> None:
    """End a compute event, once."""
    if event is not None and not event.waited_ns:
        _end(event)


def _end(event: Event) -> None:
    if recorder is None:  # the recording has ended before
        event.waited_ns = time.perf_counter_ns()
    else:
        recorder.end(event)


def blocked_since(event: Event | None) -> int:
    """Time at which a wait for a collective begins, for ``complete``."""
    return 0 if event is None else time.perf_counter_ns()


def complete(event: Event | None, blocked_since_ns: int, exposed: Reading | None = None) -> None:
    """End a collective's event; the time since ``blocked_since_ns`` was exposed.

    ``exposed`` gives the exposed time where the host did not wait.
    """
    if event is not None:
        _end(event)
        event.exposed_ns += event.waited_ns - blocked_since_ns
        if exposed is not None:
            event.readings["exposed_ns"] = exposed


@contextmanager
def unrecorded() -> Iterator[None]:
    """Pause all open recordings inside the context."""
    global recorder
    before, recorder = recorder, None
    try:
        yield
    finally:
        recorder = before


@contextmanager
def record_events() -> Iterator[EventLog]:
    """Record all events of this process inside the context.

    Yields:
        The list of events in order of issue, which stays readable afterwards. Contexts can be
            nested; each gets what is issued inside it.
    """
    global recorder
    if recorder is not None:
        with recorder.within() as log:
            yield log
        return
    recorder = EventLog()
    try:
        yield recorder
    finally:
        log, recorder = recorder, None
        if log.at_end is not None:
            log.at_end()
        log.read_clock()


# -- steps -----------------------------------------------------------------------------------------
# A step is an outermost forward of a model, with its backward if there is one.


NO_GRAPH_TASK = -1


def current_graph_task() -> int:
    """Number of the backward that autograd runs in this thread, or ``NO_GRAPH_TASK``."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task() != NO_GRAPH_TASK


@dataclass(frozen=True, eq=False)
class Model:
    """Identity of a sharded model, named after the class of its outermost module."""

    name: str


class Step:  # no __init__: Dynamo would try to compile its frame
    """Outermost forward of a model, and its backward if there is one.

    ``number`` counts the outermost forwards of this process.
    """

    model: Model
    number: int


_num_steps = 0
_in_forward: Step | None = None
_in_backward: Step | None = None  # stale outside of a backward, which may have raised


def num_steps() -> int:
    """Number of outermost forwards that have begun in this process."""
    return _num_steps


def current_step() -> Step | None:
    """Step whose forward runs, or else whose backward runs."""
    return _in_forward or (_in_backward if is_in_backward() else None)


def begin_forward(model: Model) -> Step | None:
    """Begin a forward: a new step, unless a forward or backward of the model is running.

    Returns the surrounding step, for ``end_forward``.
    """
    global _in_forward, _num_steps
    around = now = _in_forward
    if now is None and torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        now = _in_backward  # a recomputation
    if now is None or now.model is not model:
        _num_steps += 1
        now = Step()
        now.model, now.number = model, _num_steps
    _in_forward = now
    return around


def end_forward(around: Step | None) -> None:
    """End the forward that ``begin_forward`` began."""
    global _in_forward
    _in_forward = around


def enter_backward(step: Step | None) -> None:
    """Attribute events of the running backward to ``step`` from now on."""
    global _in_backward
    _in_backward = step


@contextmanager
def continued(step: Step | None) -> Iterator[None]:
    """Attribute events inside the context to a step whose backward has ended."""
    global _in_forward
    around, _in_forward = _in_forward, step
    try:
        yield
    finally:
        _in_forward = around
