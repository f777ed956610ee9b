"""A unit's forward between its pre- and post-forward hooks.

``run_unit`` serves eager and hooks mode: pre-forward, the body (plain or compiled), post-forward.
``prepare_inputs`` serves graph mode too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_dynamo.comm.collective_log import profiler_range
from fsdp_dynamo.core.unit import Unit, UnitState
from fsdp_dynamo.dynamo.private_api import (
    below_transforms,
    is_in_reverse_mode,
    outside_transforms,
    refuse_tracers,
    with_side_effects,
)
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced
from fsdp_dynamo.eager.forward_call import ForwardCall
from fsdp_dynamo.eager.schedule import Root
from fsdp_dynamo.eager.views_while_traced import shared_inputs, views_while_traced
from fsdp_dynamo.errors import UnsupportedError, unit_name
from fsdp_dynamo.pytree import map_tensors, tensors_of


def run_unit(
    root: Root,
    unit: Unit,
    module: nn.Module,
    body: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    input_dtype: torch.dtype | None,
) -> Any:
    """Run the forward of one of a unit's modules between the unit's hooks.

    ``body`` is the module or its compiled form. Floating-point inputs are cast to ``input_dtype``,
    if there is one.
    """
    if root.in_backward and unit.machine.state is UnitState.BACKWARD_PRE:
        # Activation checkpointing recomputes: the pre-backward has already unsharded the unit and
        # shown its views.
        args, kwargs = prepare_inputs(unit.device, input_dtype, args, kwargs)
        with views_while_traced(unit):
            return cast_output(unit.output_dtype, body(*args, **kwargs))
    if is_in_reverse_mode() and unit.flats:
        raise _reverse_mode_error(unit)
    outermost = root.is_outside
    if outermost:
        refuse_tracers()
    try:
        with outside_transforms():
            call = root.pre_forward(unit)
    except BaseException:
        if outermost:
            root.reset()
        raise
    try:
        args, kwargs = prepare_inputs(unit.device, input_dtype, args, kwargs)
        with profiler_range("forward", unit.fqn), views_while_traced(unit):
            output = cast_output(unit.output_dtype, body(*args, **kwargs))
        unit.require_kept_views()
        output = _clone_freed_outputs(unit, output)
    except BaseException as error:
        cause = shared_inputs(error, unit.fqn)
        root.fail_forward(unit)
        if cause is not None:
            raise cause from error
        raise
    with outside_transforms():
        root.post_forward(unit, call, module)
    if torch.is_grad_enabled():
        _register_pre_backward(root, call, output)
    return output


def _clone_freed_outputs(unit: Unit, output: Any) -> Any:
    """Clone outputs, differentiably, that lie in memory that is freed after the forward."""
    storages = [storage for flat in unit.flats for storage in flat.storages_to_free()]
    freed = [range(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]
    for tensor in tensors_of(output):
        if _lies_in(tensor, freed):
            return map_tensors(lambda one: one.clone() if _lies_in(one, freed) else one, output)
    return output


def _lies_in(tensor: torch.Tensor, memory: Sequence[range]) -> bool:
    if is_traceable_wrapper_subclass(tensor):
        names = tensor.__tensor_flatten__()[0]
        return any(_lies_in(getattr(tensor, name), memory) for name in names)
    try:
        address = tensor.data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return False
    return any(address in addresses for addresses in memory)


def _register_pre_backward(root: Root, call: ForwardCall, output: Any) -> None:
    """Start the unit's backward with the first gradient of an output.

    If the caller changes an output in place that is a view, autograd gives it a new node and never
    runs the old one. It does run that of the view's base.
    """
    hook = partial(_pre_backward, root, call)
    for tensor in tensors_of(output):
        for own in below_transforms(tensor):
            if own.requires_grad:
                own.register_hook(hook)
                base = own._base
                if base is not None and base.grad_fn is not None:
                    base.grad_fn.register_prehook(hook)


def _reverse_mode_error(unit: Unit) -> UnsupportedError:
    return UnsupportedError(
        f"{unit_name(unit.fqn)}: expected loss.backward() or torch.autograd.grad(), which run the "
        "unit's hooks, got torch.func.grad, vjp or jacrev, which run none. Call "
        "torch.autograd.grad() instead, or use torch.func.jvp or jacfwd."
    )


@untraced(BY_AUTOGRAD)
def _pre_backward(root: Root, call: ForwardCall, grad: object) -> None:
    root.pre_backward(call)


def prepare_inputs(
    device: torch.device | None,
    dtype: torch.dtype | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move inputs to ``device`` and cast floating-point inputs to ``dtype`` (``None``: do not)."""
    if dtype is None and device is None:
        return args, kwargs

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if device is not None and tensor.device != device:
            tensor = tensor.to(device)
        if dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        return tensor

    return map_tensors(convert, args), map_tensors(convert, kwargs)


def cast_output(dtype: torch.dtype | None, output: Any) -> Any:
    """Cast the floating-point tensors of an output to ``dtype`` (``None``: do not)."""
    if dtype is None:
        return output
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, output
    )


def keep_module_precision(module: nn.Module, own: torch.dtype) -> None:
    """Make one module of a mixed-precision unit compute in ``own``; cast inputs and outputs."""
    casts = _Casts(own)
    module.register_forward_pre_hook(casts.inputs, with_kwargs=True, prepend=True)
    module.register_forward_hook(casts.output)


class _Casts:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.given: torch.dtype | None = None  # dtype of the last call's inputs

    def inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [t.dtype for t in tensors_of((args, kwargs)) if t.is_floating_point()]
        with_side_effects(setattr, self, "given", given[0] if given else None)
        return prepare_inputs(None, self.dtype, args, kwargs)

    def output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return cast_output(self.given, output)
