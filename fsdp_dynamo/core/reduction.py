"""Reduction of flat gradients: issue, wait, accumulate into the original parameters' gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.core.flat_parameter import FlatParameter
from graph_passes.markers import NO_VALUE

MAX_REDUCES = 2
"""Reductions in flight: each keeps an unsharded gradient (on gloo almost two) alive."""


@dataclass
class PendingReduce:
    """A gradient reduction in flight.

    Attributes:
        flat: owner of the gradient.
        in_flight: the collective issued last.
        sharded_grad: its output.
        over_replicas: starts the reduction over replicas, once; ``None`` where there are none.
        unused: indices of parameters of which this rank has no gradient.
    """

    flat: FlatParameter
    in_flight: collectives.InFlight
    sharded_grad: torch.Tensor
    over_replicas: Callable[[], collectives.InFlight] | None = None
    unused: Collection[int] = ()

    def advance(self) -> None:
        """Start the reduction over replicas, if there is one."""
        if self.over_replicas is not None:
            self.in_flight.wait()
            self.in_flight, self.over_replicas = self.over_replicas(), None

    def finish(self) -> None:
        """Wait, then add the result to the original parameters' gradients."""
        self.advance()
        self.in_flight.wait()
        self.flat.accumulate_grad(self.sharded_grad, self.unused)


def issue_reduce(flat: FlatParameter, unsharded_grad: torch.Tensor) -> PendingReduce:
    """Start the mean over ranks of an unsharded gradient ``(padded_numel,)``."""
    groups = flat.groups.reductions
    if not groups:
        return PendingReduce(flat, collectives.InFlight([]), unsharded_grad)
    output = unsharded_grad
    if flat.is_sharded:
        output = unsharded_grad.new_empty(flat.layout.shard_numel)
    if flat.comm_hook is not None:
        event = _begin(flat, output, unsharded_grad)
        began_ns = events.blocked_since(event)
        flat.comm_hook(*((unsharded_grad, output) if flat.is_sharded else (unsharded_grad,)))
        events.complete(event, began_ns)
        return PendingReduce(flat, collectives.InFlight([]), output)
    in_flight = _issue_mean(flat, groups[0], output, unsharded_grad)
    over_replicas = None
    if len(groups) > 1:
        over_replicas = partial(_issue_mean, flat, groups[1], output, output)
    return PendingReduce(flat, in_flight, output, over_replicas)


def reduce_sum(flat: FlatParameter) -> None:
    """Reduce the sum of steps under ``no_sync()``, and wait for it."""
    total = flat.grad_sum.take()
    if total is not None:
        reduced = issue_reduce(flat, total.to(flat.reduce_dtype, copy=True))
        reduced.unused = range(len(flat.originals))  # by any of the steps
        total.data.fill_(NO_VALUE)  # a graph whose backward is still to come may have it, too
        reduced.finish()


def unused_of(grads: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Indices of parameters that have no gradient."""
    return frozenset(index for index, grad in enumerate(grads) if grad is None)


def _issue_mean(
    flat: FlatParameter, group: dist.ProcessGroup, output: torch.Tensor, grad: torch.Tensor
) -> collectives.InFlight:
    event = _begin(flat, output, grad)
    return collectives.issue_reduce_mean(output, grad, group, event, flat.unit_fqn)


def _begin(flat: FlatParameter, output: torch.Tensor, grad: torch.Tensor) -> events.Event | None:
    kind: events.Kind = "all_reduce" if output is grad else "reduce_scatter"
    return events.begin(flat.unit_fqn, kind, "backward", grad.nbytes)


class ReduceQueue:
    """Reductions in flight, at most ``MAX_REDUCES``, finished in order of issue."""

    def __init__(self) -> None:
        self._pending: deque[PendingReduce] = deque()

    def advance(self) -> None:
        """Start the reductions over replicas that follow those in flight."""
        for pending in self._pending:
            pending.advance()

    def make_room(self) -> None:
        """Finish the oldest until another one may be issued."""
        while len(self._pending) >= MAX_REDUCES:
            self._pending.popleft().finish()

    def issue(
        self, flat: FlatParameter, unsharded_grad: torch.Tensor, unused: Collection[int]
    ) -> None:
        """Start another one; ``unused`` are indices of parameters without a gradient."""
        pending = issue_reduce(flat, unsharded_grad)
        pending.unused = unused
        self._pending.append(pending)

    def finish(self) -> None:
        """Finish all."""
        while self._pending:
            self._pending.popleft().finish()

    def abandon(self) -> None:
        """Drop all after an error."""
        while self._pending:
            self._pending.popleft().in_flight.abandon()
