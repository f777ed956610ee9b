"""One forward call of a unit: its parameter views, tied into autograd, and its backward's state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.module_parameters import put_version_back
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.private_api import never_compiled_itself
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.eager.end_of_calls import EndOfCalls, sums
from fsdp_dynamo.events import NO_GRAPH_TASK, Step, current_step


@dataclass(eq=False)
class ForwardCall:
    """One forward call of a unit, with the state that its backward needs.

    Attributes:
        unit: the unit called.
        trainable: its flat parameters of which something is trained.
        views: the parameter views of this call, one list per flat parameter.
        order: position in the order in which the forwards ended.
        backward_id: the backward pass in which the pre-backward ran last; 0 for none.
        graph_task: the engine's number of that pass; reentrant checkpointing runs the backward of
            each of its segments as another pass, within it.
        segment_grads: gradients of the views that segments have given in this backward.
        is_tracked: whether the views are tied into autograd.
        left: modules of the unit that have not run yet.
        is_full_precision: whether its views are in the dtype of the shards.
        began: position in the order in which the forwards of the process began.
        step: of which it is a part.
    """

    unit: Unit
    trainable: tuple[FlatParameter, ...]
    views: list[list[torch.Tensor]] = field(default_factory=list)
    order: int = -1
    backward_id: int = 0
    graph_task: int = NO_GRAPH_TASK
    segment_grads: list[torch.Tensor | None] | None = None
    is_full_precision: bool = False
    is_tracked: bool = False
    left: set[nn.Module] = field(default_factory=set)
    began: int = field(default_factory=itertools.count().__next__)
    step: Step | None = field(default_factory=current_step)

    def show_views(self) -> None:
        """Let the unit's modules see the views of this call."""
        for flat, views in zip(self.unit.flats, self.views, strict=True):
            flat.module_parameters.set_views(views)

    def grads_by_flat(
        self, grads: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[FlatParameter, Sequence[torch.Tensor | None]]]:
        """The gradients of the views of each trainable flat parameter."""
        position = 0
        for flat in self.trainable:
            end = position + len(flat.originals)
            yield flat, grads[position:end]
            position = end

    def add_segment(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients that one segment gives the views."""
        before = self.segment_grads
        self.segment_grads = list(grads) if before is None else sums(before, grads)


class Schedule(Protocol):
    """Receiver of the end of a unit's backward."""

    def post_backward(self, call: ForwardCall, grads: Sequence[torch.Tensor | None]) -> None:
        """The gradients of all views of trainable parameters (``None`` where there is none)."""


def begin_call(
    unit: Unit, schedule: Schedule, end: EndOfCalls | None, left: Iterable[nn.Module] | None = None
) -> ForwardCall:
    """Show the modules of an unsharded unit views of its flat parameters, tied into autograd.

    Args:
        unit: an unsharded unit.
        schedule: told when the last gradient of the views has come.
        end: of the unit; ``None`` ties nothing into autograd.
        left: modules of the unit that this call is for; all.
    """
    call = ForwardCall(unit, unit.trainable, is_full_precision=unit.wants_full_precision)
    call.left = set(unit.modules if left is None else left)
    tracked: tuple[torch.Tensor, ...] = ()
    if call.trainable and end is not None:
        call.is_tracked = True
        tracked = _UnshardedViews.apply(call, schedule, end.leaf)  # type: ignore[no-untyped-call]
    position = 0
    for flat in unit.flats:
        if tracked and flat.is_trainable:
            after = position + len(flat.originals)
            views = list(tracked[position:after])
            position = after
            if flat.module_parameters.frozen:
                untracked = flat.make_views()
                for index in flat.module_parameters.frozen:
                    views[index] = untracked[index]
        else:
            views = flat.make_views()
        views = flat.module_parameters.as_parallel(views)
        flat.module_parameters.set_views(views)
        call.views.append(views)
    return call


class _UnshardedViews(torch.autograd.Function):
    """Forward: the parameter views. Backward: all their gradients at once.

    The engine runs the backward when every use of every view has given its gradient: that is
    the end of the call's backward. (Reentrant checkpointing has one more for each segment.) The
    parameters' own gradients are set by the reduction later, so none is returned.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: ForwardCall, schedule: Schedule, end: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Weak: the call holds the views, whose grad_fn is this node. What keeps the call and the
        # schedule alive until the backward are the hooks on the unit's outputs. They keep the unit,
        # too, which shows the views to its module: held here, none of it would go after a failed
        # backward.
        ctx.call = ref(call)
        ctx.unit = ref(call.unit)
        ctx.schedule = ref(schedule)
        return tuple(view for flat in call.trainable for view in flat.make_views())

    @staticmethod
    @untraced(BY_AUTOGRAD)
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:  # type: ignore[override]
        unit, schedule = ctx.unit(), ctx.schedule()
        if unit is not None and schedule is not None:
            call = ctx.call() or ForwardCall(unit, unit.trainable)
            schedule.post_backward(call, grads)
        return None, None, None


# -- parametrizations ------------------------------------------------------------------------------
# Parametrizations that a forward registers on the views that its modules hold.
#
# ``ParametrizationList`` calls ``set_()`` on the view, with itself. That writes nothing, but
# counts as a write, after which autograd refuses all views of the buffer: its version is put
# back.


@functools.cache
def let_forwards_register_parametrizations() -> None:
    """Let parametrizations be registered on views, from now on.

    Graphs of other models in which buffers are registered go through the hook and stay whole.
    """
    register_module_buffer_registration_hook(_buffer_registered)


@never_compiled_itself
def _buffer_registered(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if type(module) is ParametrizationList and tensor is not None:
        _registered(tensor)


@untraced("Dynamo traces no registration of a parametrization")
def _registered(tensor: torch.Tensor) -> None:
    if tensor._base is not None:
        put_version_back(tensor._base)
