"""Asynchronous collectives; each returns a handle to wait on.

All decisions that depend on the backend are made here:

- gloo: its own all-gather and all-to-all copy the data they transfer, and its reduce-scatter sends
  as many bytes as an all-reduce. Sends and receives between all ranks plus a local sum avoid both.
- Direct slices of a shard are large (``DIRECT_BYTES``): a message costs the CPU 95 microseconds
  under gloo, and under NCCL a group of small collectives costs several times as much as one.
- On a device whose host runs ahead, a collective's copies and sums are enqueued at once, before and
  behind it, on a stream of ours (``SideStreams.collecting``); an event is the handle.
- Gradients are averaged by the backend or by the local sum. float16 sums overflow and float16
  quotients underflow easily, so float16 gradients are divided in two steps, before and after.

Hooks and lowered graph nodes call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log, point_to_point, wire_codec
from fsdp_dynamo.comm.collective_log import profiler_range
from fsdp_dynamo.comm.gather_plan import GatherPlan, Pair
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.point_to_point import Work
from fsdp_dynamo.comm.registered_memory import RegisteredMemory, allocating
from fsdp_dynamo.comm.streams import SideStreams, StreamEvent, side_streams
from fsdp_dynamo.comm.watchdog import refusal_of
from fsdp_dynamo.version import all_gather_single, reduce_scatter_single
from graph_passes.wire_format import WireFormat

Transport = Literal["library", "all_to_all", "point_to_point"]
SentT = TypeVar("SentT")
_Call = Callable[..., Work | None]
_Finish = Callable[[], object] | None
_Member = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], _Finish, collective_log.Entry]

DIRECT_BYTES: dict[Transport, int | None] = {
    "point_to_point": 64 << 10,
    "all_to_all": None,
    "library": 8 << 20,
}
"""Bytes per rank from which a parameter is gathered directly; ``None``: never.

Measured: docs/decisions/0024-gather-plans.md.
"""


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """Return how a group's collectives run on a device (a group may have several backends).

    - ``"point_to_point"``: sends and receives, for gloo's CPU tensors.
    - ``"all_to_all"``: a reduce-scatter is an all-to-all and a local sum, for backends named gloo
      that cannot send (simulations, debugging wrappers).
    - ``"library"``: the backend's own collectives.
    """
    backend = group._get_backend(device)
    gloo = getattr(dist, "ProcessGroupGloo", ())  # torch may be built without it
    if isinstance(backend, gloo) and device.type == "cpu":
        return "point_to_point"
    return "all_to_all" if backend.name() == "gloo" else "library"


@dataclass
class _Enqueued:
    """Where a collective is enqueued.

    Attributes:
        group: its process group.
        streams: side streams of its device, or ``None``.
        stream: the one of them that runs it.
    """

    group: dist.ProcessGroup
    streams: SideStreams | None = field(default=None, kw_only=True)
    stream: Any = field(default=None, kw_only=True)

    def beside(self, device: torch.device, *, gathers: bool) -> AbstractContextManager[object]:
        """Make the stream for the collective current, where there are streams."""
        self.streams = side_streams(device)
        if self.streams is None:
            return nullcontext()
        self.stream, context = self.streams.collecting(self.group, gathers=gathers)
        return context

    def end(self, works: Sequence[Work], local: Iterable[_Finish]) -> StreamEvent:
        """Enqueue local work behind the collective; return an event behind it."""
        for work in works:
            work.wait()
        for call in filter(None, local):
            call()
        assert self.streams is not None
        return self.streams.after(self.stream)


@dataclass
class _Logged(_Enqueued):
    """Collective that is logged and about to be issued."""

    entry: collective_log.Entry
    event: events.Event | None = None
    memory: RegisteredMemory | None = None

    def set_message_bytes(self, num_bytes: int) -> None:
        """Record how many bytes are sent, where that is not the tensor's size."""
        if self.event is not None:
            self.event.message_bytes = num_bytes

    def send(
        self,
        issue: Callable[[Sequence[Pair], dist.ProcessGroup, int], SentT],
        pairs: Sequence[Pair],
    ) -> SentT:
        """Issue sends and receives, whose tag is that of the collective."""
        try:
            return issue(pairs, self.group, collective_log.message_tag(*self.entry.signature))
        except RuntimeError as error:
            raise refusal_of(error, self.group, self.entry) from None

    def in_flight(
        self,
        works: Sequence[Work],
        buffers: Sequence[torch.Tensor],
        finish: _Finish = None,
        temporary: Sequence[torch.Tensor] = (),
    ) -> InFlight:
        """Return the collective's handle; for the arguments see ``InFlight``.

        ``temporary`` are buffers that nothing else refers to.
        """
        if self.streams is None:
            kept = (*buffers, *temporary)
            return InFlight(works, kept, self.event, finish, self.group, self.entry)
        end = self.end(works, [finish])
        return InFlight([end], buffers, self.event, None, self.group, self.entry)


def issue_all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
    label: str = "",
    use: str = "",
    wire: WireFormat | None = None,
    plan: GatherPlan | None = None,
    memory: RegisteredMemory | None = None,
) -> InFlight:
    """Start gathering every rank's shard ``(n,)`` into ``output`` ``(n * world_size,)``.

    Args:
        label: FQN of the unit, for the comparison of collectives between ranks.
        use: see ``collective_log.record``.
        wire: wire format of the shards; ``None``: uncompressed. With a format, ``plan`` packs
            everything.
        plan: where slices of the shards lie in the output; ``None``: shards in rank order.
        memory: memory of all tensors, except for messages in a wire format; ``None``: torch's
            default.
    """
    entry = collective_log.record(group, "all_gather", label, output.numel(), use, wire)
    logged = _Logged(group, entry, event, memory)
    with profiler_range("all_gather", label), logged.beside(output.device, gathers=True):
        if wire is not None:
            return _issue_encoded_gather(output, shard, logged, wire, plan=plan)
        pairs, finish = _to_gather(output, shard, group, plan, memory)
        if memory is not None:
            memory.prepare(chain.from_iterable(pairs), group)
        messages = [message for message, _ in pairs]
        return logged.in_flight(_gather_works(pairs, logged), (output, shard), finish, messages)


def _to_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    plan: GatherPlan | None,
    memory: RegisteredMemory | None = None,
) -> tuple[list[Pair], _Finish]:
    """Messages of an all-gather, and the local work at the end."""
    if plan is None or plan.is_one_slice:
        return [(output, shard)], None
    size = group.size()
    pairs = plan.direct(output, shard, size)
    if not plan.widths:
        return pairs, None
    with allocating(memory):
        message = output.new_empty(size * plan.packed_numel)
    pairs.append((message, plan.packed(shard)))
    return pairs, partial(plan.copy_out, output.data, message, size)


def _to_reduce(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    plan: GatherPlan | None,
    has_message: bool,
) -> list[Pair]:
    """Messages of a reduce-scatter."""
    if plan is None or plan.is_one_slice:
        return [(unsharded, output)]
    size = group.size()
    pairs = plan.direct(unsharded, output, size)
    if plan.widths:
        message = plan.packed(unsharded, size) if has_message else plan.message_of(unsharded, size)
        pairs.append((message, plan.packed(output)))
    return pairs


def _issue_encoded_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    logged: _Logged,
    wire: WireFormat,
    may_lack: bool = False,
    plan: GatherPlan | None = None,
) -> InFlight:
    """Gather encoded shards; every rank decodes the same messages, its own included."""
    size = logged.group.size()
    sent = wire_codec.encode(shard, 1, wire, may_lack)
    received = sent.new_empty(sent.numel() * size)
    logged.set_message_bytes(received.nbytes)
    works = _gather_works([(received, sent)], logged)

    def finish() -> None:
        if plan is None or plan.is_one_slice:
            wire_codec.decode(output, received, size, wire)
            return
        message = torch.empty_like(output)
        wire_codec.decode(message, received, size, wire)
        plan.copy_out(output.data, message, size)

    return logged.in_flight(works, (output, shard), finish, (sent, received))


def _gather_works(pairs: Sequence[Pair], logged: _Logged) -> Sequence[Work]:
    if transport_of(logged.group, pairs[0][0].device) != "point_to_point":
        return _launched(_gather_calls(pairs, logged.group), logged.group, pairs[0][0].device)
    return logged.send(point_to_point.issue_all_gathers, pairs)


def _gather_calls(pairs: Sequence[Pair], group: dist.ProcessGroup) -> list[_Call]:
    return [partial(all_gather_single, output, shard, group=group) for output, shard in pairs]


def _launched(calls: Sequence[_Call], group: dist.ProcessGroup, device: torch.device) -> list[Work]:
    """Make a backend's calls; several calls become one launch.

    On a stream of ours they are not asynchronous: then they run there, not on a stream of the
    backend's, whose kernels would have no priority. The host goes on.
    """
    is_async = side_streams(device) is None
    try:
        if len(calls) == 1:
            work = calls[0](async_op=is_async)
            return [] if work is None else [work]
        # Private API of torch: nothing public coalesces a backend's calls.
        coalesced: AbstractContextManager[Work] = dist.distributed_c10d._coalescing_manager(
            group, async_ops=is_async
        )
        with coalesced as work:
            for call in calls:
                call(async_op=is_async)
        return [work] if is_async else []
    except RuntimeError as error:
        raise refusal_of(error, group, collective_log.latest()) from None


def all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    label: str = "",
    plan: GatherPlan | None = None,
) -> None:
    """Gather every rank's shard outside of a step (for full parameters), and wait."""
    use = collective_log.FULL_PARAMS
    issue_all_gather(output, shard, group, None, label, use, plan=plan).wait()


def issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
    label: str = "",
    *,
    sums_only: bool = False,
    wire: WireFormat | None = None,
    may_lack: bool = True,
    plan: GatherPlan | None = None,
    has_message: bool = False,
    memory: RegisteredMemory | None = None,
) -> InFlight:
    """Start the mean over ranks of ``unsharded`` ``(n * world_size,)``, which may be overwritten.

    Args:
        output: this rank's part ``(n,)`` (reduce-scatter), or ``unsharded`` itself (all-reduce).
        label: FQN of the unit.
        sums_only: sum, then divide, also where the backend has means.
        wire: wire format of the parts sent to the rank that sums them and, in an all-reduce, of the
            sums sent to all ranks. With a format, ``plan`` packs everything.
        may_lack: whether elements may be ``NO_VALUE``.
        plan: where each rank's slices lie in ``unsharded``; ``None``: parts in rank order. Elements
            of no slice stay unchanged.
        has_message: whether the packed slices of ``unsharded`` are rank-major already.
        memory: as for ``issue_all_gather``.
    """
    kind = "all_reduce" if output is unsharded else "reduce_scatter"
    entry = collective_log.record(group, kind, label, unsharded.numel(), wire=wire)
    logged = _Logged(group, entry, event, memory)
    with profiler_range(kind, label), logged.beside(output.device, gathers=False):
        if wire is None:
            return _issue_reduce_mean(output, unsharded, logged, sums_only, plan, has_message)
        if output is unsharded:
            return _issue_encoded_all_reduce(output, unsharded, logged, wire, may_lack)
        given = unsharded
        if plan is not None and not has_message:
            unsharded = plan.message_of(unsharded.data, group.size())
        return _issue_encoded_mean(output, unsharded, logged, wire, may_lack, given)


def _issue_encoded_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    logged: _Logged,
    wire: WireFormat,
    may_lack: bool,
    given: torch.Tensor | None = None,
) -> InFlight:
    """Exchange encoded parts between all ranks; a rank adds what it decodes to its own part.

    ``given`` is a tensor to be kept until the collective has ended.
    """
    group = logged.group
    rank, size = group.rank(), group.size()
    sent = wire_codec.encode(unsharded, size, wire, may_lack, rank)
    logged.set_message_bytes(sent.nbytes)
    own = unsharded.data.view(size, -1)[rank]
    if logged.streams is None:  # do not hold the other parts until the wait
        own = output.data.view(-1).copy_(own)
    works: Sequence[Work]
    parts: torch.Tensor | Sequence[torch.Tensor]
    if transport_of(group, sent.device) == "point_to_point":
        first = sent.new_empty(sent.numel() // size)
        works, (parts,) = logged.send(point_to_point.issue_exchanges, [(sent, first)])
    else:
        received = torch.empty_like(sent)
        call = partial(dist.all_to_all_single, received, sent, group=group)
        works = _launched([call], group, sent.device)
        parts = received.view(size, -1)
    finish = partial(wire_codec.add_decoded, output, own, parts, wire, size, rank)
    kept = (output, unsharded if given is None else given)
    return logged.in_flight(works, kept, finish, (sent, *parts))


def _issue_encoded_all_reduce(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    logged: _Logged,
    wire: WireFormat,
    may_lack: bool,
) -> InFlight:
    """Reduce-scatter encoded parts, then all-gather the encoded sums."""
    group, entry = logged.group, logged.entry
    whole, size = unsharded.data.view(-1), group.size()
    if missing := -whole.numel() % size:
        whole = torch.nn.functional.pad(whole, (0, missing))
    part = whole.new_empty(whole.numel() // size)
    summed = _issue_encoded_mean(part, whole, replace(logged, event=None), wire, may_lack)
    logged.set_message_bytes(size * wire.num_bytes(part.numel()))

    def send_to_all() -> None:
        summed.wait()
        then = collective_log.record(group, "all_gather", entry.label, whole.numel(), entry.use)
        sums = replace(logged, entry=then, event=None)
        _issue_encoded_gather(whole, part, sums, wire, may_lack).wait()
        if missing:
            output.data.view(-1).copy_(whole[:-missing])

    return logged.in_flight([], (output,), send_to_all, summed.buffers)


def _issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    logged: _Logged,
    sums_only: bool,
    plan: GatherPlan | None,
    has_message: bool,
) -> InFlight:
    group = logged.group
    op, divisor = divide_first(unsharded, group, sums_only)
    divide = divide_after(output, op, divisor)
    if output is unsharded:
        call = partial(dist.all_reduce, unsharded, op, group=group)
        return logged.in_flight(_launched([call], group, output.device), (unsharded,), divide)
    with allocating(logged.memory):
        pairs = _to_reduce(output, unsharded, group, plan, has_message)
    if logged.memory is not None:
        logged.memory.prepare(chain.from_iterable(pairs), group)
    parts = [part for _, part in pairs]
    messages = [whole for whole, _ in pairs]
    transport = transport_of(group, unsharded.device)
    works: Sequence[Work]
    if transport == "library":
        works = _launched(_reduce_calls(pairs, op, group), group, output.device)
        finish = divide
    elif transport == "point_to_point":
        works, received = logged.send(point_to_point.issue_exchanges, pairs)
        finish = partial(_sum_parts, parts, received, divisor)
    else:
        rows = [torch.empty_like(whole) for whole, _ in pairs]
        works = []
        for some, (whole, _) in zip(rows, pairs, strict=True):
            call = partial(dist.all_to_all_single, some, whole, group=group)
            works += _launched([call], group, output.device)
        finish = partial(_sum_rows, parts, rows, divisor)
    return logged.in_flight(works, (output, unsharded), finish, messages)


def _reduce_calls(pairs: Sequence[Pair], op: Any, group: dist.ProcessGroup) -> list[_Call]:
    return [partial(reduce_scatter_single, part, whole, op, group=group) for whole, part in pairs]


def issue_custom_gather(
    comm: Any,
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    plan: GatherPlan,
) -> InFlight:
    """Gather with the user's ``AllGather``, in place in a tensor of its ``allocate``."""
    size = group.size()
    enqueued = _Enqueued(group)
    with enqueued.beside(output.device, gathers=True):
        message = comm.allocate((output.numel(),), dtype=output.dtype, device=output.device)
        given = message.view(size, -1)[group.rank()].copy_(shard)
        copy_out: _Finish = partial(plan.copy_out, output, message, size)
        if plan.is_one_slice:
            copy_out = partial(output.copy_, message)
        call = partial(comm, message, given, group)
        return _issue_custom(call, enqueued, (output, shard), [message], event, copy_out)


def issue_custom_mean(
    comm: Any,
    output: torch.Tensor,
    grad: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    sums_only: bool,
) -> InFlight:
    """Reduce a rank-major gradient with the user's ``ReduceScatter``, in tensors it allocates."""
    where: dict[str, Any] = {"dtype": grad.dtype, "device": grad.device}
    enqueued = _Enqueued(group)
    with enqueued.beside(output.device, gathers=False):
        op, divisor = divide_first(grad, group, sums_only)
        divide = divide_after(output, op, divisor)
        given = comm.allocate((grad.numel(),), **where).copy_(grad)
        part = comm.allocate((output.numel(),), **where)

        def finish() -> None:
            output.copy_(part)
            if divide is not None:
                divide()

        call = partial(comm, part, given, group, op)
        return _issue_custom(call, enqueued, (output, grad), [part, given], event, finish)


def _issue_custom(
    call: Callable[..., Any],
    enqueued: _Enqueued,
    buffers: Sequence[torch.Tensor],
    temporary: Sequence[torch.Tensor],
    event: events.Event | None,
    finish: _Finish,
) -> InFlight:
    """Start a collective of the user's on the current stream; for the buffers see ``in_flight``.

    It may return a handle, or finish its work on the host or on the current stream.
    """
    work = call(async_op=enqueued.streams is None)
    works: list[Work] = [work] if isinstance(work, Work) else []
    if enqueued.streams is None:
        return InFlight(works, (*buffers, *temporary), event, finish)
    return InFlight([enqueued.end(works, [finish])], buffers, event)


def _sum_parts(
    outputs: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], divisor: float
) -> None:
    for output, some in zip(outputs, parts, strict=True):
        point_to_point.sum_parts(output, some, divisor)


def _sum_rows(
    outputs: Sequence[torch.Tensor], received: Sequence[torch.Tensor], divisor: float
) -> None:
    """Sum the rows of each ``received`` ``(world_size * n,)`` into an output ``(n,)``, and divide.

    One call per output: with hundreds of ranks, adding row by row takes two to three times as long.
    """
    for output, rows in zip(outputs, received, strict=True):
        flat = output.data.view(-1)
        torch.sum(rows.view(-1, flat.numel()), 0, out=flat)
        if divisor != 1:
            flat.div_(divisor)


def divide_first(
    unsharded: torch.Tensor, group: dist.ProcessGroup, sums_only: bool = False
) -> tuple[Any, float]:
    """Choose the reduction, and the divisor that is left for its result.

    The divisor applies to local sums and to SUM. float16 is divided here already, in place, by a
    power of two near the root of the number of ranks.
    """
    size = group.size()
    if unsharded.dtype == torch.float16:
        first = 1 << ((size - 1).bit_length() + 1) // 2
        unsharded.div_(first)
        return dist.ReduceOp.SUM, size / first
    return dist.ReduceOp.SUM if sums_only else dist.ReduceOp.AVG, size


def divide_after(output: torch.Tensor, op: Any, divisor: float) -> _Finish:
    """Division left once a backend has reduced into ``output``; ``None`` if none is."""
    if op == dist.ReduceOp.AVG or divisor == 1:
        return None
    return partial(output.data.div_, divisor)


# -- several as one launch -------------------------------------------------------------------------

Events = Sequence[events.Event | None]
Wires = Sequence[WireFormat | None]
Plans = Sequence[GatherPlan | None]


def issue_all_gathers(
    outputs: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    recorded: Events,
    labels: Sequence[str],
    wires: Wires,
    plans: Plans,
) -> list[InFlight]:
    """Issue ``issue_all_gather`` for several tensors of one dtype as one launch.

    Sequences have one item per tensor.

    Returns:
        One handle per tensor. If the backend has one handle for all, waiting for the first waits
            for all, and waiting for the others returns at once.
    """
    if _is_apart(outputs, group, wires):
        each = zip(outputs, shards, recorded, labels, wires, plans, strict=True)
        return [
            issue_all_gather(output, shard, group, event, label, wire=wire, plan=plan)
            for output, shard, event, label, wire, plan in each
        ]
    launch = _Launch("all_gather", group, recorded, labels)
    with launch.beside(outputs[0].device, gathers=True):
        for output, shard, plan in zip(outputs, shards, plans, strict=True):
            pairs, finish = _to_gather(output, shard, group, plan)
            messages = [message for message, _ in pairs]
            calls = _gather_calls(pairs, group)
            launch.add(calls, output.numel(), (output, shard), messages, finish)
        return launch.issue()


def issue_reduce_means(
    outputs: Sequence[torch.Tensor],
    unsharded: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    recorded: Events,
    labels: Sequence[str],
    wires: Wires,
    plans: Plans,
    may_lack: Sequence[bool] = (),
) -> list[InFlight]:
    """Issue ``issue_reduce_mean`` for several tensors of one dtype as one launch.

    All are reduce-scatters, or all are all-reduces. Sequences have one item per tensor; an empty
    ``may_lack`` means that all may.
    """
    if _is_apart(outputs, group, wires):
        lacking = may_lack or [True] * len(outputs)
        each = zip(outputs, unsharded, recorded, labels, wires, lacking, plans, strict=True)
        return [
            issue_reduce_mean(
                output, grad, group, event, label, wire=wire, may_lack=lacks, plan=plan
            )
            for output, grad, event, label, wire, lacks, plan in each
        ]
    is_scattered = outputs[0] is not unsharded[0]
    launch = _Launch("reduce_scatter" if is_scattered else "all_reduce", group, recorded, labels)
    with launch.beside(outputs[0].device, gathers=False):
        for output, grad, plan in zip(outputs, unsharded, plans, strict=True):
            op, divisor = divide_first(grad, group)
            divide = divide_after(output, op, divisor)
            pairs: list[Pair] = []
            if is_scattered:
                pairs = _to_reduce(output, grad, group, plan, has_message=False)
            calls = _reduce_calls(pairs, op, group)
            if not is_scattered:
                calls = [partial(dist.all_reduce, grad, op, group=group)]
            messages = [whole for whole, _ in pairs]
            launch.add(calls, grad.numel(), (output, grad), messages, divide)
        return launch.issue()


def _is_apart(outputs: Sequence[torch.Tensor], group: dist.ProcessGroup, wires: Wires) -> bool:
    """Whether collectives are issued one by one."""
    if len(outputs) == 1 or any(wires):
        return True
    return transport_of(group, outputs[0].device) != "library"


class _Shared:
    """Handle shared by several collectives; waits once.

    gloo writes the outputs again at every wait, but they may have been divided since the first.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> None:
        """Wait for all of them, unless done before."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class _Launch(_Enqueued):
    """Collectives of one kind that become one launch."""

    def __init__(
        self, kind: str, group: dist.ProcessGroup, recorded: Events, labels: Sequence[str]
    ) -> None:
        super().__init__(group)
        self._kind = kind
        self._recorded = recorded
        self._labels = labels
        self._calls: list[_Call] = []
        self._members: list[_Member] = []

    def add(
        self,
        calls: Sequence[_Call],
        numel: int,
        buffers: Sequence[torch.Tensor],
        temporary: Sequence[torch.Tensor],
        finish: _Finish,
    ) -> None:
        """Add the next collective.

        Args:
            numel: elements of the unsharded side.
            buffers: tensors that it reads and writes.
            temporary: such tensors that nothing else refers to.
            finish: local work at its end.
        """
        label = self._labels[len(self._members)]
        entry = collective_log.record(self.group, self._kind, label, numel)
        self._calls += calls
        self._members.append((buffers, temporary, finish, entry))

    def issue(self) -> list[InFlight]:
        """Make the calls; return a handle for each collective."""
        device = self._members[0][0][0].device
        with profiler_range(self._kind, ", ".join(self._labels)):
            works = _launched(self._calls, self.group, device)
        if self.streams is not None:
            end = self.end(works, [finish for _, _, finish, _ in self._members])
            works, self._members = [end], [(kept, (), None, e) for kept, _, _, e in self._members]
        else:
            works = [_Shared(works[0])]
        return [
            InFlight(works, (*kept, *temporary), event, finish, self.group, entry)
            for (kept, temporary, finish, entry), event in zip(
                self._members, self._recorded, strict=True
            )
        ]
