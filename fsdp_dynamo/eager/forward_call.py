"""One forward call of a unit: its parameter views, tied into autograd, and its backward's state."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from fsdp_dynamo.comm.collective_log import NO_GRAPH_TASK
from fsdp_dynamo.core.unit import Unit


@dataclass(eq=False)
class ForwardCall:
    """One forward call of a unit, with the state that its backward needs.

    Attributes:
        unit: the unit called.
        views: the parameter views of this call, one list per flat parameter.
        order: position in the order in which the forwards ended.
        backward_id: the backward pass in which the pre-backward ran last; 0 for none.
        graph_task: the engine's number of that pass; reentrant checkpointing runs the backward of
            each of its segments as another pass, within it.
        segment_grads: gradients of the views that segments have given in this backward.
        began: position in the order in which the forwards of the process began.
    """

    unit: Unit
    views: list[list[torch.Tensor]] = field(default_factory=list)
    order: int = -1
    backward_id: int = 0
    graph_task: int = NO_GRAPH_TASK
    segment_grads: list[torch.Tensor | None] | None = None
    began: int = field(default_factory=itertools.count().__next__)

    def show_views(self) -> None:
        """Let the unit's modules see the views of this call."""
        for flat, views in zip(self.unit.flats, self.views, strict=True):
            flat.module_parameters.set_views(views)

    def add_segment(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients that one segment gives the views."""
        if self.segment_grads is None:
            self.segment_grads = list(grads)
            return
        for i, (total, grad) in enumerate(zip(self.segment_grads, grads, strict=True)):
            if grad is not None:
                self.segment_grads[i] = grad if total is None else total + grad


OnGradients: TypeAlias = Callable[[ForwardCall, Sequence[torch.Tensor | None]], None]


def begin_call(unit: Unit, on_gradients: OnGradients) -> ForwardCall:
    """Show the modules of an unsharded unit views of its flat parameters, tied into autograd.

    Args:
        unit: an unsharded unit.
        on_gradients: a method, called with the gradients of all views of trainable parameters
            (``None`` where there is none) when the last of them has come.
    """
    call = ForwardCall(unit)
    trainable = unit.trainable
    tracked: tuple[torch.Tensor, ...] = ()
    if trainable and torch.is_grad_enabled():
        shards = [flat.sharded for flat in trainable]
        tracked = _UnshardedViews.apply(call, on_gradients, *shards)  # type: ignore[no-untyped-call]
    position = 0
    for flat in unit.flats:
        if tracked and flat.requires_grad:
            end = position + len(flat.originals)
            views = list(tracked[position:end])
            position = end
        else:
            views = flat.make_views()
        flat.module_parameters.set_views(views)
        call.views.append(views)
    return call


class _UnshardedViews(torch.autograd.Function):
    """Forward: the parameter views. Backward: all their gradients at once.

    The engine runs the backward when every use of every view has given its gradient: that is
    the end of the unit's backward. (Reentrant checkpointing has one more for each segment.) The
    shards' own gradients are set by the reduction later, so none is returned.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: ForwardCall, on_gradients: OnGradients, *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Weak: the call holds the views, whose grad_fn is this node. What keeps the call and the
        # schedule alive until the backward are the hooks on the unit's outputs. They keep the unit,
        # too, which shows the views to its module: held here, none of it would go after a failed
        # backward.
        ctx.call = weakref.ref(call)
        ctx.unit = weakref.ref(call.unit)
        ctx.on_gradients = weakref.WeakMethod(on_gradients)
        ctx.num_shards = len(shards)
        return tuple(view for flat in call.unit.trainable for view in flat.make_views())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        unit, on_gradients = ctx.unit(), ctx.on_gradients()
        if unit is not None and on_gradients is not None:
            on_gradients(ctx.call() or ForwardCall(unit), grads)
        num_shards: int = ctx.num_shards
        return (None,) * (num_shards + 2)
