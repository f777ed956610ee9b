"""Reduction of flat gradients: issue, wait, accumulate into the original parameters' gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo import events
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.gather_plan import GatherPlan
from fsdp_dynamo.comm.in_flight import InFlight
from fsdp_dynamo.comm.process_groups import Hierarchy
from fsdp_dynamo.comm.streams import HostCopy, SideStreams, side_streams
from fsdp_dynamo.core.flat_parameter import FlatParameter, Undecided, UnshardedGrad
from graph_passes.markers import NO_VALUE
from graph_passes.wire_format import WireFormat


@dataclass
class PendingReduce:
    """A gradient reduction in flight.

    Attributes:
        flat: owner of the gradient.
        in_flight: the collective issued last.
        sharded_grad: its output.
        over_replicas: starts the second collective, over replicas or between nodes; ``None`` if
            there is none or it has started.
        unused: indices of parameters without a gradient on this rank.
        is_partial: whether the reduction over replicas is left to a later backward.
        held: buffers that an earlier collective may still read.
        stream: stream on which it was issued, or ``None`` on CPUs. It is finished there too,
            because the gradient's memory belongs to that stream.
    """

    flat: FlatParameter
    in_flight: InFlight
    sharded_grad: torch.Tensor
    over_replicas: Callable[[], InFlight] | None = None
    unused: Collection[int] = ()
    is_partial: bool = False
    held: Sequence[torch.Tensor] = ()
    stream: Any = None

    def advance(self) -> None:
        """Wait for the first collective and start the second one, if there is one."""
        if self.over_replicas is not None:
            self.in_flight.wait()
            self.in_flight, self.over_replicas = self.over_replicas(), None

    def advance_on_side_stream(self, streams: SideStreams) -> None:
        """Advance on the stream of replicas, so that the current stream does not wait."""
        self.held = self.in_flight.buffers
        with streams.over_replicas():
            self.advance()

    def on_stream(self) -> AbstractContextManager[object]:
        """Enqueue the work inside on the issuing stream; the current stream then follows it."""
        streams = side_streams(self.flat.device)
        if streams is None or self.stream is None:
            return nullcontext()
        return streams.on_followed(self.stream)

    def finish(self) -> torch.Tensor | None:
        """Wait; return the reduced gradient, ``None`` if it still waits for replicas."""
        self.advance()
        flat = self.flat
        self.in_flight.wait()
        self.held = ()
        waiting = flat.grad_sum
        if self.is_partial:
            waiting.keep_partial(self.sharded_grad, self.unused)
            return None
        if waiting.settings.all_reduce_hook is not None:
            waiting.settings.all_reduce_hook(self.sharded_grad)
        if waiting.settings.grad_scale != 1:
            self.sharded_grad.mul_(waiting.settings.grad_scale)
        return self.sharded_grad


def issue_reduce(
    flat: FlatParameter, given: UnshardedGrad, has_unused: bool = True
) -> PendingReduce:
    """Start the mean over ranks of an unsharded gradient.

    ``has_unused``: whether parameters may have no gradient in it.
    """
    if flat.hierarchy is not None:
        return _issue_on_levels(flat, flat.hierarchy, given, has_unused)
    groups = flat.groups.reductions
    is_all_reduced = len(groups) > 1 or not flat.is_sharded
    is_partial = is_all_reduced and not flat.grad_sum.settings.all_reduces
    if is_partial:
        groups = groups[:1] if flat.is_sharded else ()
    elif not flat.is_sharded:
        _add_partial(flat, given.flat)
    if not groups:
        return PendingReduce(flat, InFlight([]), given.flat, is_partial=is_partial)
    if flat.comm_hook is not None:
        return _call_comm_hook(flat, flat.comm_hook, given)
    output = flat.new_shard(flat.layout.plan, given.flat) if flat.is_sharded else given.flat
    wire = flat.wires.reduce if flat.is_sharded else flat.wires.replicas
    in_flight = _issue_mean(flat, groups[0], output, given, wire, has_unused, flat.reduce_plan)
    over_replicas = None
    if len(groups) > 1:
        over_replicas = partial(_issue_over_replicas, flat, groups[1], output)
    return PendingReduce(flat, in_flight, output, over_replicas, is_partial=is_partial)


def _call_comm_hook(
    flat: FlatParameter, hook: Callable[..., object], given: UnshardedGrad
) -> PendingReduce:
    """Reduce with the user's hook, which blocks."""
    grad = output = given.flat
    if flat.is_sharded:
        output = flat.new_shard(flat.layout.plan, grad)
        if not given.has_message:
            grad = flat.reduce_plan.message_of(grad, flat.group.size())
    event = _begin(flat, output, grad)
    began_ns = events.blocked_since(event)
    hook(*((grad, output) if flat.is_sharded else (grad,)))
    events.complete(event, began_ns)
    return PendingReduce(flat, InFlight([]), output)


def _issue_on_levels(
    flat: FlatParameter, hierarchy: Hierarchy, given: UnshardedGrad, has_unused: bool
) -> PendingReduce:
    """Start the mean in the node; the mean between nodes follows, in the wire format."""
    in_node, plan = flat.reduce_plans
    secondary = flat.new_shard(in_node, given.flat)
    output = flat.new_shard(plan, given.flat)  # the first mean waits for it, so the second does
    in_flight = _issue_mean(flat, hierarchy.node, secondary, given, plan=in_node)
    between = partial(
        _issue_mean,
        flat,
        hierarchy.across,
        output,
        UnshardedGrad(secondary),
        flat.wires.reduce,
        has_unused,
        plan,
    )
    return PendingReduce(flat, in_flight, output, between)


@torch.no_grad()
def reduce_frozen(flats: Sequence[FlatParameter]) -> None:
    """Reduce pending gradients of parameters that were frozen since.

    Later gradients are not theirs, so their sums are complete. Every rank must call it, before a
    forward and before a sum is added to a gradient.
    """
    for flat in flats:
        waiting = flat.grad_sum
        _reduce_frozen_partial(flat)
        frozen = waiting.frozen_since()
        if not frozen:
            continue
        pending = issue_reduce(flat, flat.sum_to_reduce(waiting.take_of(frozen)))
        pending.unused = set(range(len(flat.originals))) - frozen
        reduced = pending.finish()
        if reduced is not None:
            reduced = flat.as_grad(reduced).to(flat.home)
            waiting.keep_reduced(frozen, flat.shard_layout.split(reduced))
        waiting.accumulation.refresh()


def without_frozen(
    grads: Mapping[FlatParameter, list[torch.Tensor | None]],
) -> list[tuple[FlatParameter, list[torch.Tensor | None]]]:
    """Drop gradients of parameters that were frozen since the forward, as autograd does.

    Their pending gradients are reduced first. Every rank must call it.
    """
    found = []
    for flat, own in grads.items():
        frozen = flat.module_parameters.frozen_now()
        for index in frozen:
            own[index] = None
        if frozen:
            reduce_frozen([flat])
        if len(frozen) < len(own):
            found.append((flat, own))
    return found


def _reduce_frozen_partial(flat: FlatParameter) -> None:
    waiting = flat.grad_sum
    frozen = waiting.frozen_in_partial()
    if not frozen:
        return
    used = waiting.in_partial
    grad = waiting.pop_partial()
    assert grad is not None
    in_flight = _issue_over_replicas(flat, flat.groups.reductions[-1], grad)
    reduced = PendingReduce(flat, in_flight, grad).finish()
    assert reduced is not None
    parts = flat.shard_layout.split(flat.as_grad(reduced).to(flat.home))
    waiting.accumulate_partial(parts, frozen, used)


def unused_of(grads: Sequence[torch.Tensor | None]) -> frozenset[int]:
    """Return the indices of parameters without a gradient."""
    return frozenset([index for index, grad in enumerate(grads) if grad is None])


def _issue_over_replicas(
    flat: FlatParameter, group: dist.ProcessGroup, output: torch.Tensor
) -> InFlight:
    if flat.is_sharded:
        _add_partial(flat, output)
    return _issue_mean(flat, group, output, UnshardedGrad(output), flat.wires.replicas)


def _add_partial(flat: FlatParameter, grad: torch.Tensor) -> None:
    """Add the gradient that earlier backwards have left to this reduction over replicas."""
    partial_grad = flat.grad_sum.pop_partial()
    if partial_grad is not None:
        grad.add_(partial_grad)


def _issue_mean(
    flat: FlatParameter,
    group: dist.ProcessGroup,
    output: torch.Tensor,
    given: UnshardedGrad,
    wire: WireFormat | None = None,
    has_unused: bool = True,
    plan: GatherPlan | None = None,
) -> InFlight:
    grad = given.flat
    event = _begin(flat, output, grad)
    settings = flat.grad_sum.settings
    if settings.reduce_scatter is None or output is grad:
        return collectives.issue_reduce_mean(
            output,
            grad,
            group,
            event,
            flat.unit_fqn,
            sums_only=settings.sums_only,
            wire=wire,
            may_lack=has_unused,
            plan=plan,
            has_message=given.has_message,
            memory=settings.reduce_memory,
        )
    if plan is not None and not given.has_message:
        grad = plan.message_of(grad, group.size())
    return collectives.issue_custom_mean(
        settings.reduce_scatter, output, grad, group, event, settings.sums_only
    )


def _begin(flat: FlatParameter, output: torch.Tensor, grad: torch.Tensor) -> events.Event | None:
    kind: events.Kind = "all_reduce" if output is grad else "reduce_scatter"
    return events.begin(flat.unit_fqn, kind, "backward", grad.nbytes)


class ReduceQueue:
    """Reductions in flight, finished in order of issue.

    Each keeps an unsharded gradient alive, almost two on gloo.

    Gradients of offloaded parameters are then copied to the host, which adds those that have
    arrived.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingReduce] = deque()
        self._copies: deque[tuple[FlatParameter, Collection[int], HostCopy]] = deque()
        self._undecided: Undecided = []
        # The memory of what is undecided is of this one's stream.
        self._last_undecided: PendingReduce | None = None

    def advance(self) -> None:
        """Start pending second collectives, and add gradients that have arrived on the host."""
        for pending in self._pending:
            if pending.over_replicas is not None:
                with pending.on_stream():
                    pending.advance()
        while self._copies and self._copies[0][-1].is_done:
            self._accumulate_copy()

    def make_room(self, max_reduces: int) -> None:
        while len(self._pending) >= max_reduces:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        pending = self._pending.popleft()
        with pending.on_stream():  # the gradient's memory belongs to that stream
            flat, grad = pending.flat, pending.finish()
            streams = side_streams(flat.device) if flat.is_offloaded else None
            if grad is not None and streams is not None:
                copy = streams.copy_to_host(flat.as_grad(grad))
                self._copies.append((flat, pending.unused, copy))
            elif grad is not None:
                self._accumulate(flat, grad, pending.unused)
                self._last_undecided = pending if self._undecided else None

    def _accumulate_copy(self) -> None:
        flat, unused, copy = self._copies.popleft()
        self._accumulate(flat, copy.wait(), unused)

    def _accumulate(self, flat: FlatParameter, grad: torch.Tensor, unused: Collection[int]) -> None:
        if self._undecided and any(flat is other for other, _, _ in self._undecided):
            self._decide()  # of an earlier backward: gradients are added in order
        self._undecided += flat.accumulate_grad(grad, unused)

    def _decide(self) -> None:
        undecided, self._undecided = self._undecided, []
        last, self._last_undecided = self._last_undecided, None
        if undecided:
            with nullcontext() if last is None else last.on_stream():
                FlatParameter.add_present(undecided)

    def issue(
        self, flat: FlatParameter, unsharded_grad: UnshardedGrad, unused: Collection[int]
    ) -> None:
        """Start a reduction; ``unused`` are indices of parameters without a gradient."""
        if flat.grad_sum.partial is not None:
            unused = set(unused) - flat.grad_sum.in_partial  # unused in each of the backwards
        pending = issue_reduce(flat, unsharded_grad, bool(unused))
        pending.unused = unused
        self._pending.append(pending)
        streams = side_streams(flat.device)
        if streams is None:
            return
        pending.stream = streams.current()
        # A partial gradient of earlier backwards was made on the computing stream: then the second
        # collective is issued there, by `advance`.
        if pending.over_replicas and flat.grad_sum.partial is None:
            pending.advance_on_side_stream(streams)

    def issue_sum(self, flat: FlatParameter) -> None:
        """Start the reduction of the gradients that steps under ``no_sync()`` have left, if any."""
        unused = set(range(len(flat.originals))) - flat.grad_sum.used()
        total = flat.grad_sum.take()
        if total is not None:
            self.make_room(flat.grad_sum.settings.max_reduces)
            self.issue(flat, flat.sum_to_reduce(total), unused)
            # A graph whose backward is still to come may hold the sum: it must not add it again.
            total.data.fill_(NO_VALUE)

    def finish(self) -> None:
        while self._pending:
            self._finish_oldest()
        while self._copies:
            self._accumulate_copy()
        self._decide()

    def abandon(self) -> None:
        self._undecided = []
        while self._pending:
            self._pending.popleft().in_flight.abandon()
        while self._copies:
            self._copies.popleft()[-1].wait()
