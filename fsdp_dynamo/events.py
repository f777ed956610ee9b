"""Recorder of unshards, reshards, collectives and compute, in order of issue and by step.

Off, the recorder is ``None``, and ``begin``, ``instant``, ``complete`` and ``finish`` return at
once. On, each event is appended when its work is *issued*, so the order of the list is the order of
issue.

Times are the host's. Where it runs ahead of a device, they would be those of enqueueing: there the
log has a clock of the device, and the times that it has noted are read when the recording ends.
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
"""Nanoseconds, once a device is there; the host waits for it."""


class Clock(Protocol):
    """The time of a device that is behind the host."""

    def now(self) -> Reading:
        """Note where the current stream is; gives the time on the host's clock."""

    def stop(self) -> None:
        """Block the host until the current stream is here; then readings may be asked."""


@dataclass(frozen=True)
class Moment:
    """A time that was noted.

    Attributes:
        host_ns: on the host (``time.perf_counter_ns``).
        reading: gives that of the device's clock, where there is one.
    """

    host_ns: int
    reading: Reading | None


@dataclass
class Event:
    """One unshard, reshard, collective or piece of compute.

    Attributes:
        unit: the unit's FQN, ``""`` for the root.
        kind: of the event.
        phase: the pass in which it was issued.
        num_bytes: of the unsharded tensor that the event is about; 0 for compute.
        source: ``"hook"`` where Python around the compute did it, ``"graph"`` where a node of
            a compiled graph did.
        issued_ns: when it was issued or began (``time.perf_counter_ns``).
        waited_ns: when it was known to be complete; 0 while it is in flight.
        exposed_ns: how long the rank was blocked for it, computing nothing: the host, or, where it
            runs ahead of a device, the stream that computes.
        message_bytes: what travels for it, all ranks' parts: ``num_bytes``, or less where shards
            have a format; 0 for what is no collective.
        graph: digest of the plan of the graph whose event it is; ``""``: it is of none.
        step: to which it belongs; ``None`` outside of forwards and backwards (state dicts).
        readings: what gives times above once the device is there, by their names; until then the
            host's times stand.
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
        """``(kind, unit, phase)``: what order assertions compare."""
        return (self.kind, self.unit, self.phase)

    def begin_with(self, moment: Moment) -> None:
        """Begin, in retrospect, at a moment before."""
        self.issued_ns = moment.host_ns
        self.readings.pop("issued_ns", None)
        if moment.reading is not None:
            self.readings["issued_ns"] = moment.reading


class EventLog(list[Event]):
    """The list of ``Event`` that ``record_events`` yields, in order of issue.

    Attributes:
        at_end: called when the recording ends, or ``None``.
        clock: of the device that computes; ``None`` where the host's is right, or until the device
            is known.
    """

    def __init__(self, outer: EventLog | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._outer = outer
        self._inner: list[EventLog] = []  # of recordings that were begun in this one
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
        """The time now, for an event that is recorded later."""
        return Moment(time.perf_counter_ns(), None if self.clock is None else self.clock.now())

    def end(self, event: Event) -> None:
        """Let an event end now."""
        event.waited_ns = time.perf_counter_ns()
        if self.clock is not None:
            event.readings["waited_ns"] = self.clock.now()

    @contextmanager
    def within(self) -> Iterator[EventLog]:
        """A recording within this one, of what is issued while the context is open."""
        log = EventLog(self)
        self._inner.append(log)
        try:
            yield log
        finally:
            if self.at_end is not None:
                self.at_end()
            self._inner = [other for other in self._inner if other is not log]  # equal ones stay
            log.read_clock()

    def read_clock(self) -> None:
        """Wait for the device, and give events its times."""
        if self._outer is not None:
            self.clock = self._outer.clock
        if self.clock is not None:
            self.clock.stop()
        for event in self:
            for name, reading in event.readings.items():
                setattr(event, name, reading())
            event.readings.clear()

    def keys(self, *kinds: Kind) -> list[tuple[str, str, str]]:
        """``Event.key`` of all events, or of those of the kinds named."""
        return [event.key for event in self if not kinds or event.kind in kinds]

    def peak_unsharded_bytes(self) -> int:
        """Most bytes that were unsharded at one time, from unshard and reshard events."""
        live = peak = 0
        for event in self:
            if event.kind == "unshard":
                live += event.num_bytes
                peak = max(peak, live)
            elif event.kind == "reshard":
                live -= event.num_bytes
        return peak

    def exposed_ms(self) -> float:
        """Milliseconds in which the rank was blocked by collectives."""
        return sum(e.exposed_ns for e in self if e.kind in COLLECTIVE_KINDS) / 1e6


recorder: EventLog | None = None
"""The log being written, or ``None``. Read it; only ``record_events`` sets it."""


def begin(unit: str, kind: Kind, phase: Phase, num_bytes: int = 0) -> Event | None:
    """Record an event that begins now; ``None`` while nothing records."""
    return None if recorder is None else recorder.issue(unit, kind, phase, num_bytes)


def instant(unit: str, kind: Kind, phase: Phase, num_bytes: int) -> None:
    """Record an event without duration."""
    if recorder is not None:
        recorder.instant(unit, kind, phase, num_bytes)


def finish(event: Event | None) -> None:
    """Mark a compute event as ended, once."""
    if event is not None and not event.waited_ns:
        _end(event)


def _end(event: Event) -> None:
    if recorder is None:  # the recording has ended before
        event.waited_ns = time.perf_counter_ns()
    else:
        recorder.end(event)


def blocked_since(event: Event | None) -> int:
    """The time at which a wait for a collective begins, for ``complete``."""
    return 0 if event is None else time.perf_counter_ns()


def complete(event: Event | None, blocked_since_ns: int, exposed: Reading | None = None) -> None:
    """Mark a collective as complete; the time since ``blocked_since_ns`` was exposed.

    ``exposed``: gives that time where the host did not wait.
    """
    if event is not None:
        _end(event)
        event.exposed_ns += event.waited_ns - blocked_since_ns
        if exposed is not None:
            event.readings["exposed_ns"] = exposed


@contextmanager
def unrecorded() -> Iterator[None]:
    """Leave out of the open recordings what happens while the context is open."""
    global recorder
    before, recorder = recorder, None
    try:
        yield
    finally:
        recorder = before


@contextmanager
def record_events() -> Iterator[EventLog]:
    """Record all events of this process while the context is open.

    Yields:
        The list of events, in order of issue. It can be read after the context has closed. One
        context may be within another: both get what is issued in the inner one.
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
# The step under way: an outermost forward of a model, with its backward.


NO_GRAPH_TASK = -1


def current_graph_task() -> int:
    """Autograd's number of the backward that runs in this thread, or ``NO_GRAPH_TASK``."""
    task: int = torch._C._current_graph_task_id()
    return task


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task() != NO_GRAPH_TASK


@dataclass(frozen=True, eq=False)
class Model:
    """Identity of a sharded model, by which steps are told apart.

    Attributes:
        name: class of the outermost module.
    """

    name: str


class Step:  # without a constructor in Python, whose frame Dynamo would look at
    """One outermost forward of a model, and its backward if there is one.

    Attributes:
        model: whose.
        number: of outermost forwards in this process that had begun, this one included.
    """

    model: Model
    number: int


_num_steps = 0
_in_forward: Step | None = None
_in_backward: Step | None = None  # says nothing outside of a backward: one may have failed


def num_steps() -> int:
    """Number of outermost forwards that have begun in this process."""
    return _num_steps


def current_step() -> Step | None:
    """The step whose forward is under way, or else whose backward is."""
    return _in_forward or (_in_backward if is_in_backward() else None)


def begin_forward(model: Model) -> Step | None:
    """Begin a forward: a new step, unless a forward or backward of the model is under way.

    Returns:
        What ``end_forward`` is to be given: the step around it.
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
    """End what ``begin_forward`` began."""
    global _in_forward
    _in_forward = around


def enter_backward(step: Step | None) -> None:
    """Attribute events of the running backward to a step, from now on."""
    global _in_backward
    _in_backward = step


@contextmanager
def continued(step: Step | None) -> Iterator[None]:
    """Attribute events in the context to a step whose backward has ended."""
    global _in_forward
    around, _in_forward = _in_forward, step
    try:
        yield
    finally:
        _in_forward = around
