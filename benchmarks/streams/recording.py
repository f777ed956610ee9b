"""Records, on a CPU, the program that a run would have on an accelerator.

Inside ``record_program`` the module ``torch.cpu`` has streams and events, this project takes the
CPU for a device whose host runs ahead, and collectives have a stream for each communicator, as with
NCCL. Every operator of aten is a launch on the stream that is current. Values are right, because
everything still runs in the host's order; what the streams would do is in the program. Whoever asks
``torch.cpu`` for streams is recorded: so is torch's own ``fully_shard``.

What a collective brings is NaN until it has been waited for, and a storage is before it is freed:
what is read too early or too late, in the host's order, changes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.streams.program import (
    COMPUTING,
    Allocate,
    Free,
    HostAccess,
    HostWait,
    Kind,
    Launch,
    Program,
    Record,
    Wait,
)
from fsdp_dynamo.comm import collectives, streams

_KINDS: dict[str, Kind] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
}
_NAN_BYTE = 0xFF
"""Floating-point numbers of such bytes are NaN in every format."""
_BLOCKING = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")


class Recorder:
    """What has been enqueued so far."""

    def __init__(self) -> None:
        self.program: Program = []
        self.current = Stream(self, COMPUTING)
        self.default = self.current
        self.is_quiet = False
        self._numbers: dict[int, tuple[int, StorageWeakRef]] = {}
        self._host: set[int] = set()
        self.coalesced: list[Poisoned] | None = None  # by the launch that is being put together
        self._num_buffers = self._num_events = self._num_streams = 0

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
        """Numbers of all tensors in ``values``, with their bytes."""
        tensors = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
        return {
            self.buffer(one.untyped_storage()): one.numel() * one.itemsize
            for one in tensors
            if one.layout is torch.strided and one.untyped_storage().nbytes()
        }

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
        if is_view or not (reads or out) or self.is_quiet:
            return result
        writes |= {number: size for number, size in out.items() if number not in reads}
        touched = {**reads, **writes}
        if self._host and touched.keys() <= self._host:
            self.program.append(HostAccess(name, tuple(touched)))
            return result
        flops = flop_registry.get(getattr(func, "overloadpacket", func))
        count = 0 if flops is None else flops(*args, **kwargs, out_val=result)
        self.program.append(
            Launch(
                name, self.current.name, tuple(reads), tuple(writes), "compute",
                sum(touched.values()), int(count),
            )
        )  # fmt: skip
        if name in _BLOCKING:
            self.program.append(HostWait(None, name))
        return result

    def collective(
        self, kind: Kind, group: dist.ProcessGroup | None, tensors: list[torch.Tensor], *,
        is_async: bool,
    ) -> Work | None:  # fmt: skip
        """Append a collective; its output comes first."""
        self.sweep()
        output, sent = self.buffers(tensors[0]), self.buffers(tensors[-1])
        stream = self.current
        if is_async:
            stream = Stream(self, communicator(group))
            stream.wait_event(self.current.record_event())
        num_bytes = max(one.numel() * one.itemsize for one in tensors)
        self.program.append(
            Launch(
                kind, stream.name, tuple(sent), tuple(output), kind, num_bytes, 0,
                communicator(group),
            )
        )  # fmt: skip
        if not is_async:
            return None
        with self.quiet():
            poisoned = [Poisoned(tensors[0])]
        if self.coalesced is not None:
            self.coalesced += poisoned
            poisoned = []
        return Work(self, stream.record_event(), poisoned)

    def new_event(self) -> int:
        """A number for an event."""
        self._num_events += 1
        return self._num_events

    def new_stream(self) -> str:
        """A name for a stream."""
        self._num_streams += 1
        return f"stream {self._num_streams}"


def _name_and_written(func: Any, args: Any, kwargs: Any) -> tuple[str, list[Any]]:
    """An operator's name, and the arguments that it writes.

    Operators of higher order, which have no schema, are taken to write none.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return func.name(), []
    arguments = list(zip(schema.arguments, args, strict=False))
    named = {one.name: one for one in schema.arguments}
    arguments += [(named[key], value) for key, value in kwargs.items() if key in named]
    written = [v for a, v in arguments if a.alias_info is not None and a.alias_info.is_write]
    return schema.name.removeprefix("aten::"), written


def communicator(group: dist.ProcessGroup | None) -> str:
    """The name of a group's own stream."""
    one = group or dist.group.WORLD
    assert one is not None
    return f"communicator {one.group_name}"


class Stream:
    """``torch.cuda.Stream`` of a recording."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.name = name

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
        self.number: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Be there when a stream has done what it has now."""
        self.number = self._recorder.new_event()
        name = (stream or self._recorder.current).name
        self._recorder.program.append(Record(self.number, name))

    def wait(self, stream: Stream | None = None) -> None:
        """Let a stream wait."""
        (stream or self._recorder.current).wait_event(self)

    def synchronize(self) -> None:
        """Block the host."""
        if self.number is not None:
            self._recorder.program.append(HostWait(self.number, "synchronize"))

    def elapsed_time(self, end: Event) -> float:
        """Nothing is measured here."""
        return 0.0

    def query(self) -> bool:
        """Never known to be there: the host is far ahead."""
        return False


class Poisoned:
    """The output of a collective that nobody has waited for."""

    def __init__(self, output: torch.Tensor) -> None:
        self._output = output.detach()
        self._brought = self._output.clone()
        self._output.untyped_storage().fill_(_NAN_BYTE)

    def cure(self) -> None:
        """Give it what the collective has brought, unless it was freed before."""
        if self._output.untyped_storage().nbytes():
            self._output.data.copy_(self._brought)


class Work:
    """The handle of an asynchronous collective."""

    def __init__(self, recorder: Recorder, event: Event, poisoned: list[Poisoned]) -> None:
        self.event = event
        self._recorder = recorder
        self._poisoned = poisoned

    def wait(self, *_: object) -> bool:
        """Let the current stream wait."""
        self._recorder.current.wait_event(self.event)
        with self._recorder.quiet():
            while self._poisoned:
                self._poisoned.pop().cure()
        return True

    def is_completed(self) -> bool:
        """Whether its values are there: everything has run in the host's order."""
        return True


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code, which is made before the recording, runs inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.is_quiet or getattr(func, "namespace", "") == "c10d":
            return func(*args, **kwargs)
        return self._recorder.operator(func, args, kwargs, lambda: func(*args, **kwargs))


def _recorded_collective(recorder: Recorder, name: str, real: Callable[..., Any]) -> Any:
    def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        named = ("output_tensor", "output", "input_tensor", "input", "tensor")
        tensors = [one for one in args if isinstance(one, torch.Tensor)]
        tensors += [kwargs[key] for key in named if key in kwargs]
        with recorder.quiet():
            real(*args, group=group, async_op=False, **kwargs)
        return recorder.collective(_KINDS[name], group, tensors, is_async=async_op)

    return call


@contextmanager
def _coalesced(recorder: Recorder, group: dist.ProcessGroup, *_: Any, **__: Any) -> Iterator[Work]:
    """Collectives as one launch, with one handle, which may be waited for once they are issued."""
    recorder.coalesced = poisoned = []
    handle = Work(recorder, Event(recorder), poisoned)
    try:
        yield handle
    finally:
        recorder.coalesced = None
    handle.event.record(Stream(recorder, communicator(group)))


@contextmanager
def _current(recorder: Recorder, stream: Stream | None) -> Iterator[None]:
    before = recorder.current
    recorder.current = before if stream is None else stream
    try:
        yield
    finally:
        recorder.current = before


def _wait_each(works: Any, *_: object) -> None:
    for work in works:
        work.wait()


def _replacements(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """Objects, names and what is there while a program is recorded."""
    cpu: Any = torch.cpu
    yield cpu, "Stream", lambda *_, **__: Stream(recorder, recorder.new_stream())
    yield cpu, "Event", lambda *_, **__: Event(recorder)
    yield cpu, "current_stream", lambda *_: recorder.current
    coalesced = partial(_coalesced, recorder)
    yield distributed_c10d, "_coalescing_manager", coalesced
    yield cpu, "default_stream", lambda *_: recorder.default
    yield cpu, "stream", lambda stream: _current(recorder, stream)
    yield cpu, "synchronize", lambda *_: recorder.program.append(HostWait(None, "synchronize"))
    yield streams, "host_runs_ahead", lambda device: True
    yield streams, "_by_device", {}
    copy_to_host = streams.SideStreams.copy_to_host

    def copied(side: streams.SideStreams, tensor: torch.Tensor) -> streams.HostCopy:
        copy = copy_to_host(side, tensor)
        recorder.lives_on_host(copy.host)
        return copy

    yield streams.SideStreams, "copy_to_host", copied
    yield collectives, "transport_of", lambda group, device: "library"
    yield collectives, "wait_on_device", _wait_each
    yield collectives, "wait_until_settled", _wait_each
    for name in _KINDS:
        for module in (dist, collectives):
            if hasattr(module, name):
                real = getattr(module, name)
                yield module, name, _recorded_collective(recorder, name, real)

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        if num_bytes == 0:
            with recorder.quiet():
                storage.fill_(_NAN_BYTE)
            recorder.resized(storage, 0)
            return resize(storage, 0)
        result = resize(storage, num_bytes)
        recorder.resized(storage, num_bytes)
        return result

    yield torch.UntypedStorage, "resize_", resized


@contextmanager
def record_program() -> Iterator[Recorder]:
    """Record what this thread enqueues while the context is open.

    Yields:
        The recorder; its ``program`` is complete when the context has closed.
    """
    recorder = Recorder()
    with ExitStack() as stack:
        for where, name, what in list(_replacements(recorder)):
            stack.enter_context(mock.patch.object(where, name, what, create=True))
        stack.enter_context(_Operators(recorder))
        yield recorder
        recorder.sweep()
