"""Records, on a CPU, the program that a run would have on an accelerator.

Inside ``record_program`` the module ``torch.cpu`` has streams and events, this project takes the
CPU for a device whose host runs ahead, and collectives have a stream for each communicator, as with
NCCL. Every operator of aten is a launch on the stream that is current. Values are right, because
everything still runs in the host's order; what the streams would do is in the program. Whoever asks
``torch.cpu`` for streams is recorded: so are torch's own ``fully_shard`` and FSDP1.

A storage is filled with NaN before it is freed: what is read too late, in the host's order,
changes the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.streams.program import HostWait, Kind
from benchmarks.streams.recorder import NAN_BYTE, Event, Recorder, Work
from fsdp_dynamo.comm import collectives, in_flight, streams

_KINDS: dict[str, Kind] = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "reduce_scatter",  # the sum follows it
}
_READING = ("tolist", "numpy", "__array__")
"""Methods that read a tensor's memory without an operator."""
_OF_LISTS: dict[str, Kind] = {"all_gather": "all_gather"}
"""FSDP1 calls it for tensors of CPUs."""


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._works: dict[int, Work] = {}  # by the storage of what they bring

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled code, which is made before the recording, runs inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace = getattr(func, "namespace", "")
        if self._recorder.is_quiet or namespace == "c10d":
            return func(*args, **kwargs)
        if namespace == "_c10d_functional":
            return self._functional(func, args, kwargs)
        return self._recorder.operator(func, args, kwargs, lambda: func(*args, **kwargs))

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a functional collective, or the wait for one, and append it."""
        with self._recorder.quiet():
            result = func(*args, **kwargs)
            torch.ops._c10d_functional.wait_tensor(result)
        name = func._schema.name.split("::")[1]
        if name == "wait_tensor":
            work = self._works.pop(args[0].untyped_storage()._cdata, None)
            if work is not None:
                work.wait()
            return result
        group = distributed_c10d._resolve_process_group(args[-1])
        work = self._recorder.collective(_KINDS[name], group, [result, args[0]], is_async=True)
        if work is not None:
            self._works[result.untyped_storage()._cdata] = work
        return result


def _recorded_collective(recorder: Recorder, kind: Kind, real: Callable[..., Any]) -> Any:
    def call(*args: Any, group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        named = ("output_tensor", "output", "input_tensor", "input", "tensor")
        tensors = [one for one in args if isinstance(one, (torch.Tensor, list))]
        tensors += [kwargs[key] for key in named if key in kwargs]
        with recorder.quiet():
            real(*args, group=group, async_op=False, **kwargs)
        return recorder.collective(kind, group, tensors, is_async=async_op)

    return call


def _wait_each(works: Any, *_: object) -> None:
    for work in works:
        work.wait()


def _replacements(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """Objects, names and what is there while a program is recorded."""
    cpu: Any = torch.cpu
    yield cpu, "Stream", lambda device=None, priority=0: recorder.new_stream(device)
    yield cpu, "Event", lambda *_, **__: Event(recorder)
    yield cpu, "current_stream", recorder.current_of
    yield distributed_c10d, "_coalescing_manager", recorder.coalesced
    yield (
        cpu,
        "default_stream",
        lambda device=None: recorder.defaults[recorder.is_elsewhere and device is None],
    )
    yield cpu, "device", recorder.on_device
    yield cpu, "stream", recorder.switched
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
    yield in_flight, "wait_on_device", lambda end, group: end.wait()
    yield in_flight, "wait_until_finished", _wait_each
    for kinds, modules in ((_KINDS, (dist, collectives)), (_OF_LISTS, (dist,))):
        for name, module in product(kinds, modules):
            if hasattr(module, name):
                real = getattr(module, name)
                yield module, name, _recorded_collective(recorder, kinds[name], real)

    def blocking(read: Callable[..., Any]) -> Callable[..., Any]:
        def on_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            recorder.read_by_host(tensor, read.__name__)
            return read(tensor, *args, **kwargs)

        return on_host

    for name in _READING:
        yield torch.Tensor, name, blocking(getattr(torch.Tensor, name))
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        if num_bytes == 0:
            with recorder.quiet():
                storage.fill_(NAN_BYTE)
            recorder.resized(storage, 0)
            return resize(storage, 0)
        result = resize(storage, num_bytes)
        recorder.resized(storage, num_bytes)
        return result

    yield torch.UntypedStorage, "resize_", resized


@contextmanager
def record_program(*, is_elsewhere: bool = False) -> Iterator[Recorder]:
    """Record what this thread enqueues while the context is open.

    Args:
        is_elsewhere: whether a device is current on which there are no tensors.

    Yields:
        The recorder; its ``program`` is complete when the context has closed.
    """
    recorder = Recorder(is_elsewhere=is_elsewhere)
    with ExitStack() as stack:
        for where, name, what in list(_replacements(recorder)):
            stack.enter_context(mock.patch.object(where, name, what, create=True))
        stack.enter_context(_Operators(recorder))
        yield recorder
        recorder.sweep()
