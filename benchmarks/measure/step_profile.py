"""Profile of one step: its collectives in order, and its peak bytes by category.

Both are read from one profiled step. torch's profiler sees every allocation of its allocators and
every operator with its operands' storages, whether called by hooks, autograd or generated code. So
all peers are counted by the same rule:

- **shards**: parameters (and buffers) that live between steps;
- **optimizer**: its state;
- **unsharded**: outputs of all-gathers, and what is copied out of them;
- **gradients**: what is reduced, what the reduction gives, and ``.grad`` after backward;
- **activations**: everything else (temporaries too).
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._profiler import (  # the event tree has no public reader
    _EventType as EventType,
)
from torch.profiler import profile

from fsdp_dynamo.comm.collective_log import kind_of_tag

CATEGORIES = ("shards", "optimizer", "unsharded", "gradients", "activations")


class Collective(NamedTuple):
    """One collective that was issued.

    ``num_bytes`` is the unsharded (larger) side for all-gather, reduce-scatter and all-to-all.
    """

    op: str
    num_bytes: int


@dataclass
class StepProfile:
    """Collectives and peak memory of one step.

    Attributes:
        collectives: in order of issue.
        peak_bytes: at the moment of the highest total, by category.
        most_bytes: each category's own highest, at whatever moment.
    """

    collectives: list[Collective] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    most_bytes: dict[str, int] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Number of collectives by kind."""
        return dict(Counter(c.op for c in self.collectives))

    def num_bytes(self) -> dict[str, int]:
        """Bytes of the unsharded side, by kind."""
        total: Counter[str] = Counter()
        for collective in self.collectives:
            total[collective.op] += collective.num_bytes
        return dict(total)


class _Role(NamedTuple):
    """Role of an operator's arguments: positions of outputs and inputs among the tensors."""

    op: str | None
    unsharded: Callable[[list[list[Any]]], list[Any]] = lambda _: []
    gradients: Callable[[list[list[Any]]], list[Any]] = lambda _: []


def _first(arguments: list[list[Any]]) -> list[Any]:
    return arguments[0]


def _last(arguments: list[list[Any]]) -> list[Any]:
    return arguments[-1]


def _both(arguments: list[list[Any]]) -> list[Any]:
    return [*arguments[0], *arguments[1]]


# c10d's operators: every way to call a collective ends in one of them. Arguments that are not
# tensors are dropped, lists are kept as lists.
_ROLES = {
    "c10d::_allgather_base_": _Role("all_gather", unsharded=_first),
    "c10d::allgather_into_tensor_coalesced_": _Role("all_gather", unsharded=_first),
    "c10d::allgather_": _Role("all_gather"),  # outputs are lists of lists: the profiler has none
    "c10d::_reduce_scatter_base_": _Role("reduce_scatter", gradients=_both),
    "c10d::reduce_scatter_tensor_coalesced_": _Role("reduce_scatter", gradients=_both),
    "c10d::reduce_scatter_": _Role("reduce_scatter", gradients=_last),
    "c10d::alltoall_base_": _Role("all_to_all", gradients=_both),
    "c10d::allreduce_": _Role("all_reduce", gradients=_first),
    "c10d::allreduce_coalesced_": _Role("all_reduce", gradients=_first),
    "c10d::broadcast_": _Role("broadcast"),
    # FSDP2 copies out of the gathered buffer into the unsharded parameters.
    "fsdp::split_with_sizes_copy": _Role(None, unsharded=_both),
    "fsdp::all_gather_copy_in": _Role(None, unsharded=_last),
    "fsdp::chunk_cat": _Role(None, gradients=_last),
}


# Our collectives on gloo are sends and receives, told apart by their tag. A reduce-scatter by sends
# and receives moves what an all-to-all moves; gloo's own reduce-scatter moves twice that.
_TAGGED_ROLES = {
    "all_gather": _Role("all_gather", unsharded=_first),
    "reduce_scatter": _Role("all_to_all", gradients=_first),
}
_SEND = "c10d::send"
_RECEIVE = "c10d::recv_"


def _role(event: Any) -> _Role | None:
    """Role of an event's arguments; ``None`` for other operators."""
    if event.tag != EventType.TorchOp:
        return None
    if event.name not in (_SEND, _RECEIVE):
        return _ROLES.get(event.name)
    tag = event.extra_fields.inputs[-1]
    role = _TAGGED_ROLES.get(kind_of_tag(tag) or "") if isinstance(tag, int) else None
    if role is not None and role.op == "all_gather" and event.name == _SEND:
        return role._replace(unsharded=lambda _: [])  # what is sent is the shard
    return role


def _tensors(argument: Any) -> list[Any] | None:
    """The tensors of one argument of an operator; ``None`` where there is none."""
    if isinstance(argument, list):
        return [one for part in argument for one in (_tensors(part) or [])]
    return [argument] if hasattr(argument, "storage_data_ptr") else None


def _num_bytes(tensors: Iterable[Any]) -> int:
    total = 0
    for tensor in tensors:
        numel = 1
        for size in tensor.sizes:
            numel *= size
        total += numel * tensor.dtype.itemsize
    return total


class StepProfiler:
    """Profiles one step of a model.

    Args:
        model: its parameters and buffers are the shards.
        optimizer: its state is counted; anything with a ``state`` mapping.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self._kind: dict[int, str] = {}
        self._live: dict[int, int] = {}
        self._model = model
        self._hold(_optimizer_tensors(optimizer), "optimizer")
        self._hold([*model.parameters(), *model.buffers()], "shards")
        self._grads: dict[int, int] = {}

    def _hold(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage.nbytes():
                self._kind[storage.data_ptr()] = kind
                self._live[storage.data_ptr()] = storage.nbytes()

    def note_gradients(self) -> None:
        """Record the storages of the parameters' ``.grad``; call it after backward."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                storage = local(parameter.grad).untyped_storage()
                self._grads[storage.data_ptr()] = storage.nbytes()

    @contextmanager
    def recording(self) -> Iterator[StepProfile]:
        """Profile what runs inside; the yielded object is complete afterwards."""
        result = StepProfile()
        profiler = profile(profile_memory=True, record_shapes=True)
        with without_announcements():
            profiler.start()
        try:
            yield result
        finally:
            with without_announcements():
                profiler.stop()
        events = _in_order(profiler)
        result.collectives.extend(_collectives(events))
        result.peak_bytes, result.most_bytes = self._peak(events)

    def _peak(self, events: list[Any]) -> tuple[dict[str, int], dict[str, int]]:
        """Walk allocations and frees; categories at the highest total, and each one's highest."""
        allocated = {e.extra_fields.ptr for e in events if e.tag == EventType.Allocation}
        for address, num_bytes in self._grads.items():
            if address not in allocated | self._live.keys():  # buckets that outlive steps
                self._live[address] = num_bytes
                self._kind[address] = "gradients"
        blocks = _blocks(events, self._live)
        for event in events:
            role = _role(event)
            if role is None:
                continue
            arguments = [t for a in event.extra_fields.inputs if (t := _tensors(a))]
            if not arguments:
                continue
            for kind, pick in (("unsharded", role.unsharded), ("gradients", role.gradients)):
                for tensor in pick(arguments):
                    blocks.name(tensor.storage_data_ptr, event.start_time_ns, kind)
        blocks.name_last(self._grads, "gradients")
        return blocks.peak(self._kind)


class _Block(NamedTuple):
    """A stretch of memory from its allocation to its release."""

    address: int
    num_bytes: int
    born_ns: int
    freed_ns: int


class _Blocks:
    """Blocks of a step with their categories."""

    def __init__(self, blocks: list[_Block]) -> None:
        self._by_address: dict[int, list[_Block]] = {}
        for block in blocks:
            self._by_address.setdefault(block.address, []).append(block)
        self._kinds: dict[_Block, str] = {}
        self._all = blocks

    def name(self, address: int | None, at_ns: int, kind: str) -> None:
        """Set the category of the block at an address and time, unless it has one."""
        for block in self._by_address.get(address or 0, ()):
            if block.born_ns <= at_ns < block.freed_ns:
                self._kinds.setdefault(block, kind)

    def name_last(self, addresses: Iterable[int], kind: str) -> None:
        """Set the category of the latest blocks at addresses, unless they have one."""
        for address in addresses:
            for block in self._by_address.get(address, ())[-1:]:
                self._kinds.setdefault(block, kind)

    def peak(self, standing: dict[int, str]) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes by category when the total was highest, and each category's own highest.

        Args:
            standing: address to category of what lived before the step.
        """
        changes: list[tuple[int, int, str]] = []
        for block in self._all:
            before = block.born_ns == 0
            kind = standing.get(block.address) if before else None
            kind = kind or self._kinds.get(block, "activations")
            changes.append((block.born_ns, block.num_bytes, kind))
            changes.append((block.freed_ns, -block.num_bytes, kind))
        live = dict.fromkeys(CATEGORIES, 0)
        at_peak, most = dict(live), dict(live)
        for _, num_bytes, kind in sorted(changes):
            live[kind] += num_bytes
            most[kind] = max(most[kind], live[kind])
            if sum(live.values()) > sum(at_peak.values()):
                at_peak = dict(live)
        return at_peak, most


def _blocks(events: list[Any], standing: dict[int, int]) -> _Blocks:
    """Blocks from allocation events; what stood before the step is born at 0.

    Args:
        events: in order of time.
        standing: address to bytes of what lived before the step.
    """
    born: dict[int, tuple[int, int]] = {a: (n, 0) for a, n in standing.items()}
    blocks = []
    for event in events:
        if event.tag != EventType.Allocation:
            continue
        memory, now = event.extra_fields, event.start_time_ns
        if memory.alloc_size > 0:
            born[memory.ptr] = (memory.alloc_size, now)
        elif memory.ptr in born:
            num_bytes, since = born.pop(memory.ptr)
            blocks.append(_Block(memory.ptr, num_bytes, since, now))
    forever = 1 << 62
    blocks.extend(_Block(a, n, since, forever) for a, (n, since) in born.items())
    return _Blocks(blocks)


def _in_order(profiler: profile) -> list[Any]:
    """All events of a finished profile by time."""
    waiting = list(profiler.profiler.kineto_results.experimental_event_tree())
    events = []
    while waiting:
        event = waiting.pop()
        events.append(event)
        waiting.extend(event.children)
    return sorted(events, key=lambda event: event.start_time_ns)


def _collectives(events: list[Any]) -> list[Collective]:
    found = []
    num_sends: Counter[str] = Counter()
    for event in events:
        role = _role(event)
        if role is None or role.op is None or event.name == _RECEIVE:
            continue
        arguments = [t for a in event.extra_fields.inputs if (t := _tensors(a))]
        if not arguments:
            continue
        num_bytes = max(_num_bytes(tensors) for tensors in arguments)
        if event.name in ("c10d::allgather_", _SEND):  # only the shard is recorded
            num_bytes *= torch.distributed.get_world_size()
        if event.name == _SEND:  # one to every other rank: the first stands for all
            num_sends[role.op] += 1
            if (num_sends[role.op] - 1) % (torch.distributed.get_world_size() - 1):
                continue
        found.append(Collective(role.op, num_bytes))
    return found


def _optimizer_tensors(optimizer: Any) -> list[torch.Tensor]:
    """Tensors of an optimizer's state, the inner optimizer's where it is wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    states = inner.state.values() if hasattr(inner, "state") else ()
    return [value for state in states for value in state.values() if torch.is_tensor(value)]


@contextmanager
def without_announcements() -> Iterator[None]:
    """Suppress Kineto's messages at start and stop, which no log level hides."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
