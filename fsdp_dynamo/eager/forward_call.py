"""One forward call of a unit: its parameter views in autograd, and the state of its backward."""

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
from fsdp_dynamo.core.module_parameters import restore_version
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.private_api import never_compiled_itself
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.eager.end_of_calls import EndOfCalls, sums
from fsdp_dynamo.events import NO_GRAPH_TASK, Step, current_step


@dataclass(eq=False)
class ForwardCall:
    """One forward call of a unit, with the state that its backward needs.

    Attributes:
        unit: the called unit.
        trainable: its flat parameters with a trained parameter.
        views: parameter views of this call, one list per flat parameter.
        order: position in the order in which forwards ended.
        backward_id: number of the backward that ran the pre-backward last; 0: none.
        graph_task: the engine's number of that backward. Reentrant checkpointing runs the backward
            of each segment as a nested backward with its own number.
        segment_grads: gradients of the views from segments of the current backward.
        is_tracked: whether autograd tracks the views.
        left: modules of the unit that have not run yet.
        began: position in the order in which the forwards of the process began.
        step: step of the call.
    """

    unit: Unit
    trainable: tuple[FlatParameter, ...]
    views: list[list[torch.Tensor]] = field(default_factory=list)
    order: int = -1
    backward_id: int = 0
    graph_task: int = NO_GRAPH_TASK
    segment_grads: list[torch.Tensor | None] | None = None
    is_tracked: bool = False
    left: set[nn.Module] = field(default_factory=set)
    began: int = field(default_factory=itertools.count().__next__)
    step: Step | None = field(default_factory=current_step)

    def show_views(self) -> None:
        for flat, views in zip(self.unit.flats, self.views, strict=True):
            flat.module_parameters.set_views(views)

    def grads_by_flat(
        self, grads: Sequence[torch.Tensor | None]
    ) -> Iterator[tuple[FlatParameter, Sequence[torch.Tensor | None]]]:
        """Yield each trainable flat parameter with the gradients of its views."""
        remaining = iter(grads)
        for flat in self.trainable:
            yield flat, [*itertools.islice(remaining, len(flat.originals))]

    def add_segment(self, grads: Sequence[torch.Tensor | None]) -> None:
        before = self.segment_grads
        self.segment_grads = list(grads) if before is None else sums(before, grads)


class Schedule(Protocol):
    """Receiver of the end of a call's backward."""

    def post_backward(self, call: ForwardCall, grads: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of all views of trainable flat parameters; ``None``: no gradient."""


def begin_call(
    unit: Unit, schedule: Schedule, end: EndOfCalls | None, left: Iterable[nn.Module] | None = None
) -> ForwardCall:
    """Show the modules of an unsharded unit new views of its unsharded buffers.

    Args:
        unit: an unsharded unit.
        schedule: receiver of the views' gradients.
        end: end of the unit's calls; ``None``: autograd does not track the views.
        left: modules of the unit that this call is for; default: all.
    """
    call = ForwardCall(unit, unit.trainable)
    call.left = set(unit.modules if left is None else left)
    tracked: Iterator[torch.Tensor] = iter(())
    if call.trainable and end is not None:
        call.is_tracked = True
        tracked = iter(_UnshardedViews.apply(call, schedule, end.leaf))  # type: ignore[no-untyped-call]
    for flat in unit.flats:
        if call.is_tracked and flat.is_trainable:
            views = [*itertools.islice(tracked, len(flat.originals))]
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
    """Autograd node that makes the parameter views of a call and gets all their gradients.

    The engine runs its backward once every use of every view has given its gradient: that is the
    end of the call's backward. (Reentrant checkpointing runs one more node for each segment.) It
    returns no gradients: the reduction sets the parameters' ``.grad`` later.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, call: ForwardCall, schedule: Schedule, end: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Weak references, because the call and the unit hold the views, whose grad_fn is this node:
        # after a failed backward this cycle would never be freed. Until the backward, the hooks on
        # the unit's outputs keep call, schedule and unit alive.
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
# A forward may register a parametrization on a view. ``ParametrizationList`` then calls
# ``view.set_(view)``. That changes nothing but raises the version counter, after which autograd
# would refuse all views of the buffer. So the version is reset.


@functools.cache
def let_forwards_register_parametrizations() -> None:
    """Support parametrizations of views, from now on.

    The hook is never compiled itself: graphs of other models in which buffers are registered stay
    whole.
    """
    register_module_buffer_registration_hook(_buffer_registered)


@never_compiled_itself
def _buffer_registered(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if type(module) is ParametrizationList and tensor is not None:
        _registered(tensor)


@untraced("Dynamo traces no registration of a parametrization")
def _registered(tensor: torch.Tensor) -> None:
    if tensor._base is not None:
        restore_version(tensor._base)
