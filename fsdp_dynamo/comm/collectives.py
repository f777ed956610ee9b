"""Asynchronous collectives, each with a handle to wait on.

All choices that depend on a process group's backend are made here:

- gloo's own all-gather and all-to-all copy the data that they transfer, and its reduce-scatter
  sends as many bytes as an all-reduce. Sends and receives between all ranks, and a local sum, do
  neither.
- Gradients are averaged by the backend or by the local sum. float16 sums overflow and float16
  quotients underflow easily, so float16 gradients are divided in two parts, before and after.

Hooks and lowered graph nodes call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log, point_to_point, wire_codec
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.point_to_point import Work
from fsdp_dynamo.comm.profiler_ranges import profiler_range
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.comm.watchdog import refusal_of
from fsdp_dynamo.torch_features import all_gather_single, reduce_scatter_single
from graph_passes.wire_format import WireFormat

Transport = Literal["library", "all_to_all", "point_to_point"]


def transport_of(group: dist.ProcessGroup, device: torch.device) -> Transport:
    """The transport of a group's collectives on a device (a group may have several backends).

    ``"point_to_point"``: sends and receives, for gloo's CPU tensors. ``"all_to_all"``: a
    reduce-scatter is an all-to-all and a local sum, other collectives are the backend's own: for
    backends named gloo that cannot send (simulations, debugging wrappers). ``"library"``: all
    collectives are the backend's own.
    """
    backend = group._get_backend(device)
    if type(backend).__name__ == "ProcessGroupGloo" and device.type == "cpu":
        return "point_to_point"
    return "all_to_all" if backend.name() == "gloo" else "library"


def issue_all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
    label: str = "",
    use: str = "",
    wire: WireFormat | None = None,
) -> InFlight:
    """Start gathering every rank's shard ``(n,)`` into ``output`` ``(n * world_size,)``.

    Args:
        label: FQN of the unit, for the comparison of collectives between ranks.
        use: see ``collective_log.record``.
        wire: the format in which shards travel; ``None``: as they are.
    """
    entry = collective_log.record(group, "all_gather", label, output.numel(), use, wire)
    with profiler_range("all_gather", label):
        if wire is None:
            works = _gather_works(output, shard, group, entry)
            return InFlight(works, (output, shard), event, group=group, entry=entry)
        return _issue_encoded_gather(output, shard, group, event, entry, wire)


def _issue_encoded_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    entry: collective_log.Entry,
    wire: WireFormat,
    may_lack: bool = False,
) -> InFlight:
    """Every rank decodes the same messages, its own among them."""
    sent = wire_codec.encode(shard, 1, wire, may_lack)
    received = sent.new_empty(sent.numel() * group.size())
    if event is not None:
        event.message_bytes = received.nbytes
    works = _gather_works(received, sent, group, entry)
    finish = partial(wire_codec.decode, output, received, group.size(), wire)
    return InFlight(works, (output, sent, received), event, finish, group, entry)


def _gather_works(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, entry: collective_log.Entry
) -> Sequence[Work]:
    if transport_of(group, output.device) != "point_to_point":
        return [all_gather_single(output, shard, group=group, async_op=True)]
    tag = collective_log.message_tag(*entry.signature)
    try:
        return point_to_point.issue_all_gather(output, shard, group, tag)
    except point_to_point.UnreachableError as error:
        raise refusal_of(error, group, entry) from None


def _exchange_works(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    entry: collective_log.Entry,
) -> tuple[Sequence[Work], list[torch.Tensor]]:
    tag = collective_log.message_tag(*entry.signature)
    try:
        return point_to_point.issue_exchange(output, unsharded, group, tag)
    except point_to_point.UnreachableError as error:
        raise refusal_of(error, group, entry) from None


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, label: str = ""
) -> None:
    """Gather every rank's shard outside of a step (for full parameters), and wait."""
    issue_all_gather(output, shard, group, None, label, collective_log.FULL_PARAMS).wait()


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
) -> InFlight:
    """Start the mean over ranks of ``unsharded`` ``(n * world_size,)``, which may be overwritten.

    Args:
        output: this rank's part of it ``(n,)`` (a reduce-scatter), or ``unsharded`` itself (an
            all-reduce).
        label: see ``issue_all_gather``.
        sums_only: divide first, then sum.
        wire: the format in which parts travel to the ranks that sum them, and, in an all-reduce,
            from these to all.
        may_lack: whether ``NO_VALUE`` may be among the elements.
    """
    kind = "all_reduce" if output is unsharded else "reduce_scatter"
    entry = collective_log.record(group, kind, label, unsharded.numel(), wire=wire)
    with profiler_range(kind, label):
        if wire is not None:
            issue = _issue_encoded_mean
            if output is unsharded:
                issue = _issue_encoded_all_reduce
            return issue(output, unsharded, group, event, entry, wire, may_lack)
        return _issue_reduce_mean(output, unsharded, group, event, entry, sums_only)


def _issue_encoded_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    entry: collective_log.Entry,
    wire: WireFormat,
    may_lack: bool,
) -> InFlight:
    """A message from each rank to each other; a rank adds what it has decoded to its own part."""
    rank, size = group.rank(), group.size()
    sent = wire_codec.encode_for_others(unsharded, size, rank, wire, may_lack)
    if event is not None:
        event.message_bytes = sent.nbytes
    output.data.view(-1).copy_(unsharded.data.view(size, -1)[rank])
    works: Sequence[Work]
    if transport_of(group, sent.device) == "point_to_point":
        first = sent.new_empty(sent.numel() // size)
        works, parts = _exchange_works(first, sent, group, entry)
        del parts[rank]
    else:
        received = torch.empty_like(sent)
        works = [dist.all_to_all_single(received, sent, group=group, async_op=True)]
        messages = received.view(size, -1)
        parts = [some for some in (messages[:rank], messages[rank + 1 :]) if len(some)]
    finish = partial(wire_codec.add_decoded, output, parts, wire, size)
    return InFlight(works, (output, sent, *parts), event, finish, group, entry)


def _issue_encoded_all_reduce(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    entry: collective_log.Entry,
    wire: WireFormat,
    may_lack: bool,
) -> InFlight:
    """A part is summed by each rank, as above, and then sent to all: its rank decodes it, too."""
    whole, size = unsharded.data.view(-1), group.size()
    if missing := -whole.numel() % size:
        whole = torch.nn.functional.pad(whole, (0, missing))
    part = whole.new_empty(whole.numel() // size)
    summed = _issue_encoded_mean(part, whole, group, None, entry, wire, may_lack)
    if event is not None:
        event.message_bytes = size * wire.num_bytes(part.numel())

    def send_to_all() -> None:
        summed.wait()
        then = collective_log.record(group, "all_gather", entry.label, whole.numel(), entry.use)
        _issue_encoded_gather(whole, part, group, None, then, wire, may_lack).wait()
        if missing:
            output.data.view(-1).copy_(whole[:-missing])

    return InFlight([], (output, *summed.buffers), event, send_to_all, group, entry)


def _issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    entry: collective_log.Entry,
    sums_only: bool,
) -> InFlight:
    op, divisor = divide_first(unsharded, group, sums_only)
    divide = divide_after(output, op, divisor)
    if output is unsharded:
        work = dist.all_reduce(unsharded, op, group=group, async_op=True)
        return InFlight([work], (unsharded,), event, divide, group, entry)
    transport = transport_of(group, unsharded.device)
    if transport == "library":
        work = reduce_scatter_single(output, unsharded, op, group=group, async_op=True)
        return InFlight([work], (output, unsharded), event, divide, group, entry)
    if transport == "point_to_point":
        works, parts = _exchange_works(output, unsharded, group, entry)
        finish = partial(point_to_point.sum_parts, output, parts, divisor)
    else:
        received = torch.empty_like(unsharded)
        works = [dist.all_to_all_single(received, unsharded, group=group, async_op=True)]
        finish = partial(_sum_rows, output, received.view(group.size(), -1), divisor)
    return InFlight(works, (output, unsharded), event, finish, group, entry)


def issue_custom(
    comm: Callable[..., Any],
    output: torch.Tensor,
    given: torch.Tensor,
    group: dist.ProcessGroup,
    *args: object,
    event: events.Event | None = None,
    finish: Callable[[], object] | None = None,
) -> InFlight:
    """Start a collective of the user's, FSDP2's ``AllGather`` or ``ReduceScatter``.

    It may give a handle to wait for, or have done its work: on the host or on the current stream,
    which others then wait for.
    """
    work = comm(output, given, group, *args, async_op=True)
    works: list[Work] = [work] if isinstance(work, Work) else []
    streams = side_streams(output.device)
    if streams is not None:
        works.append(streams.after_current())
    return InFlight(works, (output, given), event, finish)


def _sum_rows(output: torch.Tensor, rows: torch.Tensor, divisor: float) -> None:
    """Write the sum of ``rows`` ``(world_size, n)`` over ``divisor`` into ``output`` ``(n,)``.

    One pass: with hundreds of ranks, adding row by row takes two to three times as long.
    """
    torch.sum(rows, 0, out=output.data.view(-1))
    if divisor != 1:
        output.data.div_(divisor)


def divide_first(
    unsharded: torch.Tensor, group: dist.ProcessGroup, sums_only: bool = False
) -> tuple[Any, float]:
    """The reduction, and the divisor of its result: of a local sum, and of any reduction by SUM.

    float16 is divided here, in place, by a power of two near the root of the number of ranks. With
    ``sums_only`` the other dtypes are divided by their number.
    """
    size = group.size()
    if unsharded.dtype == torch.float16:
        first = 1 << ((size - 1).bit_length() + 1) // 2
        unsharded.div_(first)
        return dist.ReduceOp.SUM, size / first
    if not sums_only:
        return dist.ReduceOp.AVG, size
    unsharded.div_(size)
    return dist.ReduceOp.SUM, 1


def divide_after(output: torch.Tensor, op: Any, divisor: float) -> Callable[[], object] | None:
    """What remains to be done when a backend has reduced into ``output``."""
    if op == dist.ReduceOp.AVG or divisor == 1:
        return None
    return partial(output.data.div_, divisor)


# -- several as one launch -------------------------------------------------------------------------

Events = Sequence[events.Event | None]
Wires = Sequence[WireFormat | None]


def issue_all_gathers(
    outputs: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    recorded: Events,
    labels: Sequence[str],
    wires: Wires,
) -> list[InFlight]:
    """``issue_all_gather`` of several tensors of one dtype as one launch, without a copy.

    Args:
        outputs: one per tensor.
        shards: one per tensor.
        group: the process group.
        recorded: the recorded event, if any, of each.
        labels: FQN of the unit of each.
        wires: the format of each; one launch has the tensors' own only.

    Returns:
        One handle per tensor. If the backend has one handle for all, waiting for the first waits
        for all, and waiting for the others returns at once.
    """
    if _is_apart(outputs, group, wires):
        each = zip(outputs, shards, recorded, labels, wires, strict=True)
        return [
            issue_all_gather(output, shard, group, event, label, wire=wire)
            for output, shard, event, label, wire in each
        ]
    calls = [
        partial(all_gather_single, output, shard, group=group, async_op=True)
        for output, shard in zip(outputs, shards, strict=True)
    ]
    return _launch("all_gather", calls, outputs, shards, group, recorded, labels)


def issue_reduce_means(
    outputs: Sequence[torch.Tensor],
    unsharded: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    recorded: Events,
    labels: Sequence[str],
    wires: Wires,
    may_lack: Sequence[bool] = (),
) -> list[InFlight]:
    """``issue_reduce_mean`` of several tensors of one dtype as one launch.

    All are reduce-scatters or all are all-reduces. Arguments and handles are those of
    ``issue_all_gathers``, but for ``may_lack``, of each tensor; empty: all may.
    """
    if _is_apart(outputs, group, wires):
        lacking = may_lack or [True] * len(outputs)
        each = zip(outputs, unsharded, recorded, labels, wires, lacking, strict=True)
        return [
            issue_reduce_mean(output, grad, group, event, label, wire=wire, may_lack=lacks)
            for output, grad, event, label, wire, lacks in each
        ]
    kind = "all_reduce" if outputs[0] is unsharded[0] else "reduce_scatter"
    calls, divisions = [], []
    for output, grad in zip(outputs, unsharded, strict=True):
        op, divisor = divide_first(grad, group)
        divisions.append(divide_after(output, op, divisor))
        tensors = (grad,) if output is grad else (output, grad)
        collective: Callable[..., Any] = (
            dist.all_reduce if output is grad else reduce_scatter_single
        )
        calls.append(partial(collective, *tensors, op, group=group, async_op=True))
    return _launch(kind, calls, outputs, unsharded, group, recorded, labels, divisions)


def _is_apart(outputs: Sequence[torch.Tensor], group: dist.ProcessGroup, wires: Wires) -> bool:
    """Whether collectives are issued one by one."""
    if len(outputs) == 1 or any(wires):
        return True
    return transport_of(group, outputs[0].device) != "library"


class _Shared:
    """The one handle of several collectives, waited for once.

    Whenever one of gloo's is waited for, it writes its outputs, which may have been divided since.
    """

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work

    def wait(self) -> None:
        """Wait for all of them, if nobody has."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


def _launch(
    kind: str,
    calls: Sequence[Callable[[], object]],
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    recorded: Events,
    labels: Sequence[str],
    finishes: Sequence[Callable[[], object] | None] = (),
) -> list[InFlight]:
    """Make the backend's calls as one launch; returns a handle per call."""
    unsharded = outputs if kind == "all_gather" else inputs
    pairs = zip(labels, unsharded, strict=True)
    entries = [collective_log.record(group, kind, label, one.numel()) for label, one in pairs]
    # Private: only this manager reaches a backend's coalesced calls; none is public.
    coalesced: AbstractContextManager[Work] = dist.distributed_c10d._coalescing_manager(
        group, async_ops=True
    )
    with profiler_range(kind, ", ".join(labels)), coalesced as work:
        for call in calls:
            call()
    each = zip(outputs, inputs, recorded, finishes or [None] * len(calls), entries, strict=True)
    shared = _Shared(work)
    return [
        InFlight([shared], (output, sent), event, finish, group, entry)
        for output, sent, event, finish, entry in each
    ]
