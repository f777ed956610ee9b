"""Events of compiled graphs, recorded when their collectives start and end.

Compute is what runs between two collectives; their labels say whose it is. That an unsharded buffer
was freed is noticed at the next collective.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo import events
from fsdp_dynamo.comm.streams import time_events_on
from fsdp_dynamo.events import Step, current_step
from graph_passes.text.listing import Label


class NoRecording:
    """Recorder in use while nothing records: it drops everything."""

    def launch(
        self, labels: Sequence[Label], outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> list[events.Event | None]:
        """Record that collectives are about to be issued as one launch; return their events."""
        return [None] * len(labels)

    def launched(self, labels: Sequence[Label]) -> None:
        """Record that collectives were issued: the compute after them begins."""

    def wait(self, label: Label) -> None:
        """Record that a wait begins."""

    def waited(self, label: Label, output: torch.Tensor) -> None:
        """Record that a wait has ended."""

    def begin_graph(self, device: torch.device) -> None:
        """Record that a compiled graph is about to run."""

    def end_of_graph(self) -> None:
        """Record that a compiled graph has returned: its last compute has ended."""


class GraphRecording(NoRecording):
    """Recorder that writes the events of graphs into ``log``."""

    def __init__(self, log: events.EventLog) -> None:
        self.log = log
        self._compute: list[events.Event] = []
        self._began = log.now()
        self._alive: list[tuple[StorageWeakRef, Label, int, Step | None]] = []
        self._uses: dict[int, int] = {}  # references to outputs before they were issued

    def launch(
        self, labels: Sequence[Label], outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]
    ) -> list[events.Event | None]:
        time_events_on(outputs[0].device)
        return [self._begin(*each) for each in zip(labels, outputs, sent, strict=True)]

    def _begin(self, label: Label, output: torch.Tensor, sent: torch.Tensor) -> events.Event:
        self.wait(label)
        num_bytes = max(output.nbytes, sent.nbytes)
        if label.kind == "all_gather":
            self._instant("unshard", label, num_bytes)
            reference = StorageWeakRef(output.untyped_storage())
            self._alive.append((reference, label, num_bytes, current_step()))
        self._uses[output.data_ptr()] = output._use_count()  # type: ignore[attr-defined]
        return self.log.issue(label.unit, label.kind, label.phase, num_bytes, "graph", label.graph)

    def _instant(self, kind: events.Kind, label: Label, num_bytes: int) -> None:
        self.log.instant(label.unit, kind, label.phase, num_bytes, "graph", label.graph)

    def launched(self, labels: Sequence[Label]) -> None:
        for label in labels:
            self._follow(label)

    def wait(self, label: Label) -> None:
        """Record that a collective or a wait is reached: the compute before it has ended."""
        for unit in label.before:
            event = self._compute_of(unit, label)
            self.log.end(event)
            event.begin_with(self._began)
            self._began = self.log.now()
        self.end_of_graph()
        self.expire()

    def waited(self, label: Label, output: torch.Tensor) -> None:
        self._let_threads_drop(output)
        self._follow(label)

    def begin_graph(self, device: torch.device) -> None:
        time_events_on(device)
        self._began = self.log.now()

    def end_of_graph(self) -> None:
        for event in self._compute:
            self.log.end(event)
        self._compute = []

    def _let_threads_drop(self, output: torch.Tensor) -> None:
        """Give the backend's thread time to drop its reference to a tensor.

        A thread of gloo holds its tensors for some microseconds after the wait. On a busy machine a
        freed tensor would count as alive. Bounded, and only while recording.
        """
        uses = self._uses.pop(output.data_ptr(), 0)
        until = time.perf_counter() + 0.02
        while output._use_count() > uses + 1 and time.perf_counter() < until:  # type: ignore[attr-defined]
            time.sleep(0.0001)

    def _follow(self, label: Label) -> None:
        """Begin the compute that comes after a collective or its wait."""
        for unit in label.after:
            event = self._same_compute(unit, label)
            if event is None:
                event = self._compute_of(unit, label)
            self._compute.append(event)

    def _compute_of(self, unit: str, label: Label) -> events.Event:
        return self.log.issue(unit, label.phase, label.phase, 0, "graph", label.graph)

    def _same_compute(self, unit: str, label: Label) -> events.Event | None:
        """Return the unit's last compute event, if only other units' collectives interrupted it."""
        for event in reversed(self.log):
            if event.kind == label.phase and event.source == "graph":
                is_same = (event.unit, event.step) == (unit, current_step())
                return event if is_same else None
        return None

    def expire(self) -> None:
        """Record a reshard for every unsharded buffer whose storage has been freed."""
        still = []
        for one in self._alive:
            reference, label, num_bytes, step = one
            if reference.expired():
                self._instant("reshard", label, num_bytes)
                self.log[-1].step = step  # the step of the gather, which may have ended
            else:
                still.append(one)
        self._alive = still


_OFF = NoRecording()
_current = _OFF


def current() -> NoRecording:
    """Return the recorder of the event log that is open now."""
    global _current
    log = events.recorder
    if log is None:
        _current = _OFF
    elif not isinstance(_current, GraphRecording) or _current.log is not log:
        _current = GraphRecording(log)
        log.at_end = _current.expire
    return _current
