"""Streams, events and collectives of a recording, and the program that is made of what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from benchmarks.streams.program import (
    COMPUTING,
    ELSEWHERE,
    Allocate,
    Free,
    HostAccess,
    HostWait,
    Kind,
    Launch,
    Program,
    Record,
    Switch,
    Wait,
)
from fsdp_dynamo.core.dtensors import local_of
from graph_passes.cost_model import operator_flops

NAN_BYTE = 0xFF
"""Floating-point numbers of such bytes are NaN in every format."""
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that are no work."""
# Most of them return no tensor, as views return no new one.
_BLOCKING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


class Recorder:
    """What has been enqueued so far, on two devices of which one has all tensors.

    Calls that name a device mean that one; the others mean the device that is current.

    Args:
        is_elsewhere: whether the other device is current at first.
    """

    def __init__(self, *, is_elsewhere: bool = False) -> None:
        self.program: Program = []
        self.is_elsewhere = is_elsewhere
        self.defaults = [Stream(self, COMPUTING), Stream(self, ELSEWHERE, is_elsewhere=True)]
        self._current = [*self.defaults]
        self.is_quiet = False
        self._coalesced: list[Launch] | None = None
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._host: set[int] = set()
        self._num_buffers = self._num_events = self._num_streams = 0

    # -- devices and their current streams -----------------------------------------------------

    @property
    def current(self) -> Stream:
        """The current stream of the device that has the tensors: what runs their operators."""
        return self._current[False]

    def current_of(self, device: object = None) -> Stream:
        """The current stream of a device; ``None``: of the current one."""
        return self._current[self.is_elsewhere and device is None]

    @contextmanager
    def switched(self, to: Stream | None) -> Iterator[None]:
        """Make a stream current on its device, and that device current."""
        if to is None:
            yield
            return
        self.program.append(Switch(to.name))
        before = self.is_elsewhere, self._current[to.is_elsewhere]
        self.is_elsewhere, self._current[to.is_elsewhere] = to.is_elsewhere, to
        try:
            yield
        finally:
            self.is_elsewhere, self._current[to.is_elsewhere] = before

    @contextmanager
    def on_device(self, device: object) -> Iterator[None]:
        """Make the device that has the tensors current."""
        before, self.is_elsewhere = self.is_elsewhere, False
        try:
            yield
        finally:
            self.is_elsewhere = before

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record no operators inside."""
        before, self.is_quiet = self.is_quiet, True
        try:
            yield
        finally:
            self.is_quiet = before

    # -- buffers -------------------------------------------------------------------------------

    def buffer(self, storage: torch.UntypedStorage) -> int:
        """The number of a storage's memory."""
        known = self._numbers.get(storage._cdata)
        if known is not None and not known[1].expired():
            return known[0]
        number = self._num_buffers = self._num_buffers + 1
        self._numbers[storage._cdata] = number, StorageWeakRef(storage)
        self.program.append(Allocate(number, self.current.name, storage.nbytes()))
        return number

    def buffers(self, values: Any) -> dict[int, int]:
        """Numbers of all tensors in ``values``, with their bytes; views of one storage together."""
        found: dict[int, int] = {}
        for leaf in tree_leaves(values):
            if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
                continue
            one = local_of(leaf)
            storage = one.untyped_storage()
            if storage.nbytes():
                number = self.buffer(storage)
                found[number] = min(found.get(number, 0) + one.nbytes, storage.nbytes())
        return found

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Memory that goes or comes while its storage stays."""
        if num_bytes == 0:
            known = self._numbers.pop(storage._cdata, None)
            if known is not None:
                self.program.append(Free(known[0]))
        else:
            self.buffer(storage)

    def sweep(self) -> None:
        """Free what is gone since the last launch."""
        for key, (number, reference) in list(self._numbers.items()):
            if reference.expired():
                del self._numbers[key]
                self.program.append(Free(number))

    def lives_on_host(self, tensor: torch.Tensor) -> None:
        """Take a tensor for one in the host's memory."""
        self._host.add(self.buffer(tensor.untyped_storage()))

    def is_on_host(self, *buffers: int) -> bool:
        """Whether one of these buffers is in the host's memory."""
        return not self._host.isdisjoint(buffers)

    def read_by_host(self, tensor: torch.Tensor, name: str) -> None:
        """Let the host wait for all that a tensor may depend on, unless it is in its memory."""
        numbers = tuple(self.buffers(tensor))
        if not self.is_on_host(*numbers) and not self.is_quiet:
            self.program.append(HostWait(None, name))

    # -- steps ---------------------------------------------------------------------------------

    def operator(self, func: Any, args: Any, kwargs: Any, call: Callable[[], Any]) -> Any:
        """Run an operator and append it."""
        self.sweep()
        name, written = _name_and_written(func, args, kwargs)
        reads = self.buffers([args, kwargs])
        writes = self.buffers(written)
        result = call()
        out = self.buffers(result)
        is_view = bool(reads) and set(out) <= set(reads) and not writes
        if (
            (is_view and name not in _BLOCKING)
            or name in _ALLOCATING
            or not (reads or out)
            or self.is_quiet
        ):
            return result
        writes |= {number: size for number, size in out.items() if number not in reads}
        touched = {**reads, **writes}
        if self._host and touched.keys() <= self._host:
            self.program.append(HostAccess(name, tuple(touched)))
            return result
        self.program.append(
            Launch(
                name, self.current.name, tuple(reads), tuple(writes), "compute",
                sum(touched.values()), _flops(func, args, kwargs, result),
            )
        )  # fmt: skip
        if name in _BLOCKING:
            self.program.append(HostWait(None, name))
        return result

    def collective(
        self, kind: Kind, group: dist.ProcessGroup | None, tensors: list[Any], *,
        is_async: bool,
    ) -> Work | None:  # fmt: skip
        """Append a collective; its output comes first, of one that is not asynchronous perhaps as a
        list of its parts."""
        self.sweep()
        output, sent = self.buffers(tensors[0]), self.buffers(tensors[-1])
        num_bytes = max(sum(part.nbytes for part in tree_leaves(one)) for one in tensors)
        name = communicator(group)
        launch = Launch(
            kind, self.current.name, tuple(sent), tuple(output), kind, num_bytes, 0, name
        )
        if self._coalesced is not None:
            self._coalesced.append(launch)
            return None
        stream = self.current
        if is_async:
            stream = Stream(self, name)
            stream.wait_event(self.current.record_event())
        self.program.append(replace(launch, stream=stream.name))
        return Work(self, stream.record_event()) if is_async else None

    @contextmanager
    def coalesced(self, *_: object, **__: object) -> Iterator[None]:
        """Append the collectives inside as one, on the current stream."""
        self._coalesced = some = []
        yield
        self._coalesced = None
        reads = tuple({number for one in some for number in one.reads})
        writes = tuple({number for one in some for number in one.writes})
        num_bytes = sum(one.num_bytes for one in some)
        self.program.append(replace(some[0], reads=reads, writes=writes, num_bytes=num_bytes))

    def new_event(self) -> int:
        """A number for an event."""
        self._num_events += 1
        return self._num_events

    def new_stream(self, device: object = None) -> Stream:
        """A stream of a device; ``None``: of the current one."""
        self._num_streams += 1
        is_elsewhere = self.is_elsewhere and device is None
        return Stream(self, f"stream {self._num_streams}", is_elsewhere=is_elsewhere)


def _named(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Arguments of an operator with their schema; none of one of higher order, which has none."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        yield from zip(schema.arguments, args, strict=False)
        named = {one.name: one for one in schema.arguments}
        yield from ((named[key], value) for key, value in kwargs.items() if key in named)


def _name_and_written(func: Any, args: Any, kwargs: Any) -> tuple[str, list[Any]]:
    """An operator's name, and the arguments that it writes.

    Operators of higher order are taken to write none.
    """
    if not hasattr(func, "_schema"):
        return func.name(), []
    arguments = _named(func, args, kwargs)
    written = [v for a, v in arguments if a.alias_info is not None and a.alias_info.is_write]
    return func._schema.name.removeprefix("aten::"), written


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of products; half of them where attention is causal, as its kernels leave the others out."""
    count = operator_flops(func, args, kwargs, result)
    is_causal = any(a.name == "is_causal" and v for a, v in _named(func, args, kwargs))
    return count // 2 if is_causal else count


def communicator(group: dist.ProcessGroup | None) -> str:
    """The name of a group's own stream."""
    one = group or dist.group.WORLD
    assert one is not None
    return f"communicator {one.group_name}"


class Stream:
    """``torch.cuda.Stream`` of a recording."""

    def __init__(self, recorder: Recorder, name: str, *, is_elsewhere: bool = False) -> None:
        self._recorder = recorder
        self.name = name
        self.is_elsewhere = is_elsewhere

    def wait_event(self, event: Event | None) -> None:
        """Go on when an event is there."""
        if event is not None and event.number is not None:
            self._recorder.program.append(Wait(self.name, event.number))

    def wait_stream(self, other: Stream) -> None:
        """Go on when another stream has done what it has now."""
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """An event for what is enqueued now."""
        event = event or Event(self._recorder)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host."""
        self.record_event().synchronize()


class Event:
    """``torch.cuda.Event`` of a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._is_elsewhere = False
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Be there when a stream has done what it has now."""
        self.number = self._recorder.new_event()
        stream = stream or self._recorder.current_of()
        self._is_elsewhere = stream.is_elsewhere
        self._recorder.program.append(Record(self.number, stream.name))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or self._recorder.current_of()).wait_event(self)

    def synchronize(self) -> None:
        """Block the host."""
        if self.number is not None:
            self._recorder.program.append(HostWait(self.number, "synchronize"))

    def elapsed_time(self, end: Event) -> float:
        """Nothing is measured here."""
        return 0.0

    def query(self) -> bool:
        """Never known to be there: the host is far ahead."""
        if self.number is not None and self._is_elsewhere != self._recorder.is_elsewhere:
            raise AssertionError("a query makes a context on the device that is current")
        return False


class Work:
    """The handle of an asynchronous collective."""

    def __init__(self, recorder: Recorder, event: Event) -> None:
        self.event = event
        self._recorder = recorder

    def wait(self, *_: object) -> bool:
        """Let the current stream wait."""
        self._recorder.current.wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        """Whether its values are there: everything has run in the host's order."""
        return True
