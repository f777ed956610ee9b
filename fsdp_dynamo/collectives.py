"""Collectives: eager ones with a handle to wait on.

Every choice that depends on the backend of a process group is made here and nowhere else:

- gloo's own reduce-scatter sends as many bytes as an all-reduce. An all-to-all and a local sum
  send half of that, so gloo groups use those.
- float16 sums overflow easily, so float16 gradients are divided before they are summed; all
  others are divided after, when only the shard is left to divide.

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

    Attributes:
        event: what the recorder knows of it, or ``None`` where nothing records.
    """

    def __init__(
        self, work: Work | None, buffers: tuple[torch.Tensor, ...], event: events.Event | None
    ) -> None:
        self._work = work
        self._buffers = buffers
        self.event = event

    def wait(self) -> None:
        """Block until complete (on CUDA: make the current stream wait)."""
        if self._work is None:
            return
        began_ns = time.perf_counter_ns() if self.event is not None else 0
        self._work.wait()
        self._work = None
        self._finish(self._buffers)
        self._buffers = ()
        if self.event is not None:
            events.complete(self.event, began_ns)

    def _finish(self, buffers: tuple[torch.Tensor, ...]) -> None:
        """What is left to do on this rank when the data has come."""


class _SumOfParts(InFlight):
    """The second half of a reduce-scatter by all-to-all: the local sum."""

    def _finish(self, buffers: tuple[torch.Tensor, ...]) -> None:
        output, received, _ = buffers
        torch.sum(received.view(-1, output.numel()), dim=0, out=output)


class _Divided(InFlight):
    """Divides the output by ``divisor`` when the wrapped collective is complete."""

    def __init__(self, inner: InFlight, output: torch.Tensor, divisor: float) -> None:
        super().__init__(inner, (output,), None)
        self.event = inner.event
        self._inner = inner
        self._divisor = divisor

    def wait(self) -> None:
        if self._work is None:
            return
        self._inner.wait()
        self._work = None
        if self._divisor != 1:
            self._buffers[0].div_(self._divisor)
        self._buffers = ()


def prefers_all_to_all(group: dist.ProcessGroup) -> bool:
    """Whether a reduce-scatter on this group is better done as all-to-all plus a local sum."""
    return group.name() == "gloo"


def issue_all_gather(
    output: torch.Tensor,
    shard: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
) -> InFlight:
    """Start gathering every rank's shard ``(n,)`` into ``output`` ``(n * world_size,)``."""
    work = _all_gather(output, shard, group=group, async_op=True)
    return InFlight(work, (output, shard), event)


def all_gather(output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's shard and wait."""
    _all_gather(output, shard, group=group)


def issue_reduce_scatter(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
) -> InFlight:
    """Start summing ``unsharded`` ``(n * world_size,)`` over ranks; rank r gets part r ``(n,)``."""
    if prefers_all_to_all(group):
        received = torch.empty_like(unsharded)
        work = dist.all_to_all_single(received, unsharded, group=group, async_op=True)
        return _SumOfParts(work, (output, received, unsharded), event)
    work = _reduce_scatter(output, unsharded, group=group, async_op=True)
    return InFlight(work, (output, unsharded), event)


def issue_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, event: events.Event | None = None
) -> InFlight:
    """Start summing ``tensor`` over ranks in place."""
    work = dist.all_reduce(tensor, group=group, async_op=True)
    return InFlight(work, (tensor,), event)


def divisors(dtype: torch.dtype, world_size: int) -> tuple[float, float]:
    """What gradients are divided by before and after they are summed over the ranks."""
    if dtype == torch.float16:
        return float(world_size), 1.0
    return 1.0, float(world_size)


def issue_reduce_mean(
    output: torch.Tensor,
    unsharded: torch.Tensor,
    group: dist.ProcessGroup,
    event: events.Event | None = None,
) -> InFlight:
    """Start the mean over ranks of ``unsharded``, which is overwritten.

    ``output`` is either this rank's part of it (a reduce-scatter) or ``unsharded`` itself
    (an all-reduce).
    """
    before, after = divisors(unsharded.dtype, group.size())
    if before != 1:
        unsharded.div_(before)
    if output is unsharded:
        inner = issue_all_reduce(unsharded, group, event)
    else:
        inner = issue_reduce_scatter(output, unsharded, group, event)
    return _Divided(inner, output, after)
