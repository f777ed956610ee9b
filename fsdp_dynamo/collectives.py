"""Collectives: eager ones with a handle to wait on.

Every choice that depends on the backend of a process group is made here and nowhere else:

- gloo's own reduce-scatter sends as many bytes as an all-reduce. An all-to-all and a local sum
  send half of that, so gloo groups use those.
- Gradients are averaged by the backend or with the local sum; float16 sums overflow easily, so
  float16 gradients are divided before they are summed.

The same functions run under the hooks and under lowered graph nodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fsdp_dynamo import events

# Public names since torch 2.12; the older ones warn there.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or (
    dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or (
    dist.reduce_scatter_tensor
)


class Work(Protocol):
    """Something in flight."""

    def wait(self) -> object: ...


class InFlight:
    """A collective that was issued: keeps its buffers alive until it has been waited for.

    Args:
        work: what to wait for; ``None`` if nothing was needed.
        output: where the result will be.
        source: the input, kept alive.
        event: what the recorder knows of it, or ``None`` where nothing records.
        parts: with an all-to-all, the parts of all ranks ``(world_size * n,)``, still to be
            summed into ``output`` ``(n,)``.
        combine: what makes ``output`` of ``parts``: ``torch.mean`` or ``torch.sum``.
    """

    __slots__ = ("_combine", "_output", "_parts", "_source", "_work", "event")

    def __init__(
        self,
        work: Work | None,
        output: torch.Tensor,
        source: torch.Tensor,
        event: events.Event | None = None,
        parts: torch.Tensor | None = None,
        combine: Callable[..., Any] = torch.mean,
    ) -> None:
        self._work = work
        self._output: torch.Tensor | None = output
        self._source: torch.Tensor | None = source
        self._parts = parts
        self._combine = combine
        self.event = event

    def wait(self) -> None:
        """Block until complete (on CUDA: make the current stream wait)."""
        work, self._work = self._work, None
        if work is None:
            return
        event = self.event
        began_ns = time.perf_counter_ns() if event is not None else 0
        work.wait()
        output = self._output
        assert output is not None
        if self._parts is not None:
            self._combine(self._parts.view(-1, output.numel()), dim=0, out=output)
        self._output = self._source = self._parts = None
        if event is not None:
            events.complete(event, began_ns)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves a device in a group (a group may have several)."""
    return group._get_backend(device).name()


def prefers_all_to_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether a reduce-scatter is better done as an all-to-all plus a local sum there."""
    return backend_name(group, device) == "gloo"


def issue_all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
) -> InFlight:
    """Start gathering every rank's shard ``(n,)`` into ``output`` ``(n * world_size,)``."""
    work = _all_gather(output, shard, group=group, async_op=True)
    return InFlight(work, output, shard, event)


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's shard and wait."""
    _all_gather(output, shard, group=group)


def issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
) -> InFlight:
    """Start the mean over ranks of ``unsharded`` ``(n * world_size,)``, which may be overwritten.

    ``output`` is either this rank's part of it ``(n,)`` (a reduce-scatter) or ``unsharded``
    itself (an all-reduce).
    """
    op = dist.ReduceOp.AVG
    combine: Callable[..., Any] = torch.mean
    if unsharded.dtype == torch.float16:
        unsharded.div_(group.size())
        op, combine = dist.ReduceOp.SUM, torch.sum
    if output is unsharded:
        work = dist.all_reduce(unsharded, op, group=group, async_op=True)
        return InFlight(work, output, unsharded, event)
    if prefers_all_to_all(group, unsharded.device):
        parts = torch.empty_like(unsharded)
        work = dist.all_to_all_single(parts, unsharded, group=group, async_op=True)
        return InFlight(work, output, unsharded, event, parts, combine)
    work = _reduce_scatter(output, unsharded, op, group=group, async_op=True)
    return InFlight(work, output, unsharded, event)
