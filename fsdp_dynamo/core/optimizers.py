"""What an optimizer of sharded parameters is checked for before its first step.

It must hold the DTensors, with gradients that were reduced. State that was made before the
parameters were sharded is whole, and is cut here; what a version with 1-D parts has saved is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.original_parameter import REPLACED
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.untraced import untraced

FORMER_ORIGIN = "fsdp_dynamo_parts_of"
"""Key in parameter groups that versions with 1-D parts have saved."""

SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are numbers: only names tell them from those of one element."""

_flats: WeakSet[FlatParameter] = WeakSet()
_checked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
"""By optimizer, the state that was checked; a loaded one is another object."""
_of_dtensors: WeakSet[Optimizer] = WeakSet()


def watch_optimizers(flats: Iterable[FlatParameter]) -> None:
    """Check every optimizer of these parameters before its first step, and after each loading."""
    _register()
    _flats.update(flats)
    _checked.clear()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    check_optimizer(optimizer, may_have_sums=_has_closure(args, kwargs))


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether a step runs backwards itself, which may be the last ones of a sum."""
    return any(callable(one) for one in (*args[1:], *kwargs.values()))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Let units notice that their DTensors were written: lists of them and fused steps leave no
    trace in a DTensor's version."""
    if optimizer in _of_dtensors and not torch.compiler.is_compiling():
        if _has_closure(args, kwargs):
            _refuse_sums(optimizer)
        increment_version(_dtensors_of(optimizer))


def _dtensors_of(optimizer: Optimizer) -> list[DTensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in params if isinstance(param, DTensor)]


def check_optimizer(optimizer: Optimizer, may_have_sums: bool = False) -> None:
    """Check an optimizer, if it was not since its state was loaded last, and its gradients."""
    if _checked.get(optimizer) is not optimizer.state:
        _check(optimizer)
    if optimizer in _of_dtensors and not may_have_sums:
        _refuse_sums(optimizer)


def note_checked(optimizer: Optimizer) -> None:
    """Take the state that an optimizer has now for one that was checked."""
    _checked[optimizer] = optimizer.state


@untraced("an optimizer is checked once, eagerly")
def _check(optimizer: Optimizer) -> None:
    _refuse_replaced(optimizer)
    managed = list(_managed_parameters(optimizer))
    _refuse_former_states(optimizer)
    for param, flat, index in managed:
        if param in optimizer.state:
            _fit(optimizer, flat, index, param)
    _checked[optimizer] = optimizer.state
    if managed:
        _of_dtensors.add(optimizer)


def _managed_parameters(
    optimizer: Optimizer,
) -> Iterator[tuple[torch.Tensor, FlatParameter, int]]:
    places = {
        id(original.param): (flat, index)
        for flat in _flats
        for index, original in enumerate(flat.originals)
    }
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) in places:
                yield param, *places[id(param)]


def _refuse_former_states(optimizer: Optimizer) -> None:
    """Raise for state of this rank's 1-D parts, which a former version has saved by number."""
    for group in optimizer.param_groups:
        if FORMER_ORIGIN in group:
            raise FSDPStateError(
                expected="state of DTensors",
                got=f"state of 1-D parts, {group[FORMER_ORIGIN]}, as former versions saved it",
                where=f"{type(optimizer).__name__}.step()",
                fix="Load it with the version that has saved it, save what FSDP.optim_state_dict("
                "model, optimizer) gives there, and load that.",
            )


def _refuse_replaced(optimizer: Optimizer) -> None:
    """Raise for parameters in whose place DTensors are: no gradient goes to them any more."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, REPLACED):
                raise FSDPStateError(
                    expected="parameters of the sharded model",
                    got=f"one of shape {tuple(param.shape)} in whose place a DTensor is now",
                    where=f"{type(optimizer).__name__}.step()",
                    fix="Make the optimizer after the model is sharded, of its parameters(); where "
                    "a parameter was put into a module since, after the forward that takes it.",
                )


@untraced("looks at gradients eagerly")
def _refuse_sums(optimizer: Optimizer) -> None:
    """Raise where the gradient of a DTensor is a plain tensor: a sum that was not reduced.

    A plain scalar torch would take for one that all ranks have.
    """
    if all(flat.grad_sum.total is None for flat in _flats):
        return
    for param in _dtensors_of(optimizer):
        grad, mesh = param.grad, param.device_mesh
        if grad is not None and not (isinstance(grad, DTensor) and grad.device_mesh == mesh):
            raise FSDPStateError(
                expected="gradients that are reduced, DTensors as their parameters",
                got="a plain tensor, as steps under no_sync() leave it",
                where=f"{type(optimizer).__name__}.step(), a parameter of shape "
                f"{tuple(param.shape)}",
                fix="Run the last backward outside of no_sync().",
            )


@torch.no_grad()
def _fit(optimizer: Optimizer, flat: FlatParameter, index: int, param: torch.Tensor) -> None:
    """Cut state of the whole parameter to this rank's part of it.

    Raises:
        FSDPValueError: state of another rank's part.
    """
    state = optimizer.state[param]
    whole = flat.layout.slots[index].shape
    for key, value in state.items():
        flat.originals[index].placing.require_own(value)
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.shape == whole and (value.dim() or key not in SCALAR_STATES):
            part = flat.shard_layout.ranges[index].of(value)
            state[key] = flat.originals[index].as_param(part.clone())
