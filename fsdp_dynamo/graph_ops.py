"""What collectives of a compiled graph run: the same eager collectives, recorded if asked.

``lower`` replaces functional collectives by these at the very end, after all passes. An issue
returns a tensor that must not be read before its wait. Under aot_eager the nodes call these
functions directly; under Inductor they are operators of the library ``fsdp_dynamo``.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo import collectives, events
from fsdp_dynamo.agreement import require_agreement
from graph_passes.labels import Label

_in_flight: dict[int, collectives.InFlight] = {}


class GraphRecording:
    """Events of compiled graphs, seen from their collectives.

    Compute is what runs between two collectives; the label of each says whose it is. The
    unsharded flat parameter's end is noticed at the next collective.
    """

    def __init__(self, log: events.EventLog) -> None:
        self.log = log
        self.compute: list[events.Event] = []
        self.alive: list[tuple[StorageWeakRef, Label, int]] = []
        self.uses: dict[int, int] = {}  # references to outputs before they were issued

    def boundary(self, label: Label) -> None:
        """A collective begins: what computed until now has stopped."""
        now = time.perf_counter_ns()
        for unit in label.before:
            began = max((e.waited_ns or e.issued_ns for e in self.log), default=now)
            event = self.log.issue(unit, label.phase, label.phase, source="graph")
            event.issued_ns = began
            event.waited_ns = now
        self.close()
        self.expire()

    def close(self) -> None:
        """What computed until now has stopped: a collective begins, or the graph ends."""
        now = time.perf_counter_ns()
        for event in self.compute:
            event.waited_ns = now
        self.compute = []

    def settle(self, output: torch.Tensor) -> None:
        """Give a backend's thread the time to let go of a tensor, so that its end is seen.

        A gloo thread holds its tensors for some microseconds after the wait; on a busy machine
        a freed one would be counted as alive. Bounded, and done in recordings only.
        """
        uses = self.uses.pop(output.data_ptr(), 0)
        until = time.perf_counter() + 0.02
        while output._use_count() > uses + 1 and time.perf_counter() < until:  # type: ignore[attr-defined]
            time.sleep(0.0001)

    def follow(self, label: Label) -> None:
        """A collective has been issued or waited for: whose compute comes next."""
        for unit in label.after:
            event = self._same_compute(unit, label.phase)
            if event is None:
                event = self.log.issue(unit, label.phase, label.phase, source="graph")
            self.compute.append(event)

    def _same_compute(self, unit: str, phase: events.Phase) -> events.Event | None:
        """A unit's compute goes on where a collective of another unit fell into it."""
        for event in reversed(self.log):
            if event.kind == phase and event.source == "graph":
                return event if event.unit == unit and event.phase == phase else None
        return None

    def expire(self) -> None:
        """Note unsharded flat parameters whose storage has been freed."""
        still = []
        for reference, label, num_bytes in self.alive:
            if reference.expired():
                self.log.instant(label.unit, "reshard", label.phase, num_bytes, "graph")
            else:
                still.append((reference, label, num_bytes))
        self.alive = still


_recording: GraphRecording | None = None


def end_of_graph() -> None:
    """A compiled graph has returned: what it computed last has stopped."""
    recording = _recording_of_now()
    if recording is not None:
        recording.close()


def _recording_of_now() -> GraphRecording | None:
    global _recording
    log = events.recorder
    if log is None:
        _recording = None
    elif _recording is None or _recording.log is not log:
        _recording = GraphRecording(log)
        log.at_end = _recording.expire
    return _recording


def _group(name: str, fingerprint: str) -> dist.ProcessGroup:
    """The group of a collective; the first one of a graph makes sure that all ranks agree on it."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    if fingerprint:
        require_agreement(group, fingerprint)
    return group


def _issue(
    tensor: torch.Tensor,
    output: torch.Tensor,
    group: dist.ProcessGroup,
    text: str,
    num_bytes: int,
) -> torch.Tensor:
    recording = _recording_of_now()
    event = None
    if recording is not None:
        label = Label.decode(text)
        recording.boundary(label)
        if label.kind == "all_gather":
            recording.log.instant(label.unit, "unshard", label.phase, num_bytes, "graph")
            reference = StorageWeakRef(output.untyped_storage())
            recording.alive.append((reference, label, num_bytes))
        recording.uses[output.data_ptr()] = output._use_count()  # type: ignore[attr-defined]
        event = recording.log.issue(label.unit, label.kind, label.phase, num_bytes, "graph")
    key = output.data_ptr()
    if output is tensor:
        _in_flight[key] = collectives.issue_reduce_mean(output, output, group, event)
    elif output.numel() > tensor.numel():
        _in_flight[key] = collectives.issue_all_gather(output, tensor, group, event)
    else:
        if tensor.dtype == torch.float16:  # divided in place before the sum
            tensor = tensor.clone()
        _in_flight[key] = collectives.issue_reduce_mean(output, tensor, group, event)
    if recording is not None:
        recording.follow(label)
    return output


def all_gather(
    shard: torch.Tensor, world_size: int, group: str, text: str, fingerprint: str = ""
) -> torch.Tensor:
    """Start an all-gather; returns the unsharded tensor, unread until its wait."""
    ranks = _group(group, fingerprint)
    shard = shard.contiguous()
    output = shard.new_empty(shard.numel() * world_size)
    return _issue(shard, output, ranks, text, output.numel() * output.element_size())


def reduce_scatter(
    unsharded: torch.Tensor, world_size: int, group: str, text: str, fingerprint: str = ""
) -> torch.Tensor:
    """Start a mean over ranks; returns this rank's part, unread until its wait."""
    ranks = _group(group, fingerprint)
    unsharded = unsharded.contiguous()
    output = unsharded.new_empty(unsharded.numel() // world_size)
    return _issue(unsharded, output, ranks, text, unsharded.numel() * unsharded.element_size())


def all_reduce(tensor: torch.Tensor, group: str, text: str, fingerprint: str = "") -> torch.Tensor:
    """Start a mean over ranks of a copy; returns it, unread until its wait."""
    ranks = _group(group, fingerprint)
    output = tensor.contiguous().clone()
    return _issue(output, output, ranks, text, output.numel() * output.element_size())


def wait(output: torch.Tensor, source: torch.Tensor, text: str) -> torch.Tensor:
    """Wait for a collective. ``source``, its input, is an argument so that it is kept alive."""
    in_flight = _in_flight.pop(output.data_ptr())
    recording = _recording_of_now()
    if recording is not None:
        label = Label.decode(text)
        recording.boundary(label)
    in_flight.wait()
    if recording is not None:
        recording.settle(output)
        recording.follow(label)
    return output


# -- the same as operators, for Inductor ----------------------------------------------------------

_library = torch.library.Library("fsdp_dynamo", "DEF")
_TAIL = "str group, str text, str fingerprint) -> Tensor"
_library.define(f"all_gather(Tensor shard, int world_size, {_TAIL}")
_library.define(f"reduce_scatter(Tensor unsharded, int world_size, {_TAIL}")
_library.define(f"all_reduce(Tensor tensor, {_TAIL}")
_library.define("wait_(Tensor(a!) output, Tensor source, str text) -> ()")


def _wait_(output: torch.Tensor, source: torch.Tensor, text: str) -> None:
    wait(output, source, text)


def _fake_all_gather(shard: Any, world_size: int, group: str, text: str, fingerprint: str) -> Any:
    return shard.new_empty(shard.numel() * world_size)


def _fake_reduce_scatter(
    unsharded: Any, world_size: int, group: str, text: str, fingerprint: str
) -> Any:
    return unsharded.new_empty(unsharded.numel() // world_size)


def _fake_all_reduce(tensor: Any, group: str, text: str, fingerprint: str) -> Any:
    return tensor.new_empty(tensor.size())


def _fake_wait(output: Any, source: Any, text: str) -> None:
    return None


for _key in ("CPU", "CUDA"):
    _library.impl("all_gather", all_gather, _key)
    _library.impl("reduce_scatter", reduce_scatter, _key)
    _library.impl("all_reduce", all_reduce, _key)
    _library.impl("wait_", _wait_, _key)
_library.impl("all_gather", _fake_all_gather, "Meta")
_library.impl("reduce_scatter", _fake_reduce_scatter, "Meta")
_library.impl("all_reduce", _fake_all_reduce, "Meta")
_library.impl("wait_", _fake_wait, "Meta")
