"""Collectives: eager ones with a handle to wait on.

Every choice that depends on the backend of a process group is made here and nowhere else:

- gloo's own all-gather and all-to-all copy what they transfer, and its reduce-scatter sends as many
  bytes as an all-reduce. Sends and receives between all ranks, and a local sum, do neither.
- Gradients are averaged by the backend or with the local sum; float16 sums overflow easily, so
  float16 gradients are divided before they are summed.

The same functions run under the hooks and under lowered graph nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collective_log, point_to_point, profiler_ranges
from fsdp_dynamo.comm.point_to_point import Work
from fsdp_dynamo.comm.watchdog import wait_for_the_end, wait_watching

# Public names since torch 2.12; the older ones warn there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)


class InFlight:
    """A collective that was issued: keeps its buffers alive until it has been waited for.

    Args:
        works: what to wait for; empty if nothing was needed.
        buffers: inputs and outputs, kept alive: they are read and written until then.
        event: what the recorder knows of it, or ``None`` where nothing records.
        finish: what is left to do locally when all has come, or ``None``.
        group: whose ranks they are. Waiting for CPU tensors blocks the host, so somebody looks
            whether one of the ranks has said that it will not come.
        entry: what it is, for messages.
    """

    __slots__ = ("_buffers", "_entry", "_event", "_finish", "_group", "_works")

    def __init__(
        self,
        works: Sequence[Work],
        buffers: Sequence[torch.Tensor] = (),
        event: events.Event | None = None,
        finish: Callable[[], None] | None = None,
        group: dist.ProcessGroup | None = None,
        entry: collective_log.Entry | None = None,
    ) -> None:
        self._works = list(works)
        self._entry = entry
        self._buffers = buffers
        self._finish = finish
        self._group = group
        self._event = event

    def wait(self) -> None:
        """Block until complete (on CUDA: make the current stream wait)."""
        event, self._event = self._event, None
        finish, self._finish = self._finish, None
        began_ns = time.perf_counter_ns() if event is not None else 0
        with self._range():
            if self._works:
                self._wait_for_works()
            if finish is not None:
                finish()
        self._buffers = ()
        if event is not None:
            events.complete(event, began_ns)

    def _range(self) -> AbstractContextManager[object]:
        """For the profiler."""
        kind, label = ("collective", "") if self._entry is None else self._entry[2:4]
        return profiler_ranges.named(kind, label, waits=True)

    def _wait_for_works(self) -> None:
        """If one fails, the others are dropped: gloo writes to no buffer of a work that is gone.

        The list is emptied, as the frames that the error holds refer to it, too.
        """
        try:
            if self._group is not None and self._buffers[0].device.type == "cpu":
                wait_watching(self._works, self._group, self._entry)
            else:
                for work in self._works:
                    work.wait()
        except RuntimeError:
            self._works.clear()
            raise
        self._works = []

    def abandon(self) -> None:
        """Wait until nothing writes to its buffers any more, whether it comes or fails."""
        self._event = self._finish = None
        if self._group is not None:
            wait_for_the_end(self._works, self._group)
        self._works, self._buffers = [], ()


Way = Literal["library", "all_to_all", "point_to_point"]


def way_of(group: dist.ProcessGroup, device: torch.device) -> Way:
    """How a group transfers shards of tensors on a device (it may have several backends).

    ``"point_to_point"``: sends and receives, for gloo's CPU tensors. ``"all_to_all"``: a
    reduce-scatter is an all-to-all and a local sum, all else is the backend's own: for what calls
    itself gloo but cannot send (a simulation, a debugging wrapper). ``"library"``: everything is
    the backend's own.
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
) -> InFlight:
    """Start gathering every rank's shard ``(n,)`` into ``output`` ``(n * world_size,)``.

    Args:
        label: FQN of the unit, for ranks that compare what they have issued.
        use: see ``order_log.note``.
    """
    entry = collective_log.note(group, "all_gather", label, output.numel(), use)
    with profiler_ranges.named("all_gather", label):
        if way_of(group, output.device) == "point_to_point":
            tag = collective_log.tag_of(*entry.what)
            works = point_to_point.issue_all_gather(output, shard, group, tag)
        else:
            works = [_all_gather(output, shard, group=group, async_op=True)]
    return InFlight(works, (output, shard), event, group=group, entry=entry)


def all_gather(
    output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, label: str = ""
) -> None:
    """Gather every rank's shard, to have whole parameters outside of a step, and wait."""
    issue_all_gather(output, shard, group, None, label, collective_log.WHOLE).wait()


def issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
    label: str = "",
) -> InFlight:
    """Start the mean over ranks of ``unsharded`` ``(n * world_size,)``, which may be overwritten.

    ``output`` is either this rank's part of it ``(n,)`` (a reduce-scatter) or ``unsharded``
    itself (an all-reduce). ``label``: see ``issue_all_gather``.
    """
    kind = "all_reduce" if output is unsharded else "reduce_scatter"
    entry = collective_log.note(group, kind, label, unsharded.numel())
    with profiler_ranges.named(kind, label):
        return _issue_reduce_mean(output, unsharded, group, event, entry)


def _issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None,
    entry: collective_log.Entry,
) -> InFlight:
    op, divisor = _divide_first(unsharded, group)
    if output is unsharded:
        work = dist.all_reduce(unsharded, op, group=group, async_op=True)
        return InFlight([work], (unsharded,), event, group=group, entry=entry)
    way = way_of(group, unsharded.device)
    if way == "library":
        work = _reduce_scatter(output, unsharded, op, group=group, async_op=True)
        return InFlight([work], (output, unsharded), event, group=group, entry=entry)
    if way == "point_to_point":
        tag = collective_log.tag_of(*entry.what)
        works, parts = point_to_point.issue_exchange(output, unsharded, group, tag)
        finish = partial(point_to_point.sum_parts, output, parts, divisor)
    else:
        whole = torch.empty_like(unsharded)
        works = [dist.all_to_all_single(whole, unsharded, group=group, async_op=True)]
        finish = partial(_sum_rows, output, whole.view(group.size(), -1), divisor)
    return InFlight(works, (output, unsharded), event, finish, group, entry)


def _sum_rows(output: torch.Tensor, rows: torch.Tensor, divisor: int) -> None:
    """Write the sum of ``rows`` ``(world_size, n)`` over ``divisor`` into ``output`` ``(n,)``.

    One pass: with hundreds of ranks, adding row by row takes two to three times as long.
    """
    torch.sum(rows, 0, out=output.data.view(-1))
    if divisor != 1:
        output.data.div_(divisor)


def _divide_first(unsharded: torch.Tensor, group: dist.ProcessGroup) -> tuple[Any, int]:
    """The reduction, and what a local sum is divided by; float16 is divided here, in place."""
    if unsharded.dtype != torch.float16:
        return dist.ReduceOp.AVG, group.size()
    unsharded.div_(group.size())
    return dist.ReduceOp.SUM, 1


# -- several as one launch -------------------------------------------------------------------------

Events = Sequence[events.Event | None]


def issue_all_gathers(
    outputs: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    noted: Events,
    labels: Sequence[str],
) -> list[InFlight]:
    """``issue_all_gather`` of several tensors of one dtype as one launch, without a copy.

    Args:
        outputs: of each.
        shards: what each gathers.
        group: of all.
        noted: what the recorder knows of each.
        labels: FQN of the unit of each.

    Returns:
        One handle a tensor. Where the backend gives one for all, waiting for the first waits for
        all, and waiting for the others returns at once.
    """
    if len(outputs) == 1 or way_of(group, outputs[0].device) != "library":
        each = zip(outputs, shards, noted, labels, strict=True)
        return [
            issue_all_gather(out, shard, group, event, name) for out, shard, event, name in each
        ]
    entries = [
        collective_log.note(group, "all_gather", label, output.numel())
        for output, label in zip(outputs, labels, strict=True)
    ]
    with profiler_ranges.named("all_gather", ", ".join(labels)), _one_launch(group) as launch:
        for output, shard in zip(outputs, shards, strict=True):
            _all_gather(output, shard, group=group, async_op=True)
    return _shared(launch, outputs, shards, group, noted, entries)


def issue_reduce_means(
    outputs: Sequence[torch.Tensor],
    unsharded: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    noted: Events,
    labels: Sequence[str],
) -> list[InFlight]:
    """``issue_reduce_mean`` of several tensors of one dtype, all reduce-scatters or all
    all-reduces, as one launch; arguments and handles as of ``issue_all_gathers``."""
    if len(outputs) == 1 or way_of(group, outputs[0].device) != "library":
        each = zip(outputs, unsharded, noted, labels, strict=True)
        return [
            issue_reduce_mean(out, whole, group, event, name) for out, whole, event, name in each
        ]
    kind = "all_reduce" if outputs[0] is unsharded[0] else "reduce_scatter"
    entries = [
        collective_log.note(group, kind, label, whole.numel())
        for whole, label in zip(unsharded, labels, strict=True)
    ]
    ops = [_divide_first(whole, group)[0] for whole in unsharded]
    with profiler_ranges.named(kind, ", ".join(labels)), _one_launch(group) as launch:
        for output, whole, op in zip(outputs, unsharded, ops, strict=True):
            if output is whole:
                dist.all_reduce(whole, op, group=group, async_op=True)
            else:
                _reduce_scatter(output, whole, op, group=group, async_op=True)
    return _shared(launch, outputs, unsharded, group, noted, entries)


def _one_launch(group: dist.ProcessGroup) -> AbstractContextManager[Work]:
    """The backend's calls in the context become one, begun at its end, with one handle."""
    # Private: only this manager reaches a backend's coalesced calls; none is public.
    manager: AbstractContextManager[Work] = dist.distributed_c10d._coalescing_manager(
        group, async_ops=True
    )
    return manager


def _shared(
    launch: Work,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    noted: Events,
    entries: Sequence[collective_log.Entry],
) -> list[InFlight]:
    each = zip(outputs, inputs, noted, entries, strict=True)
    return [
        InFlight([launch], (out, sent), event, group=group, entry=entry)
        for out, sent, event, entry in each
    ]
