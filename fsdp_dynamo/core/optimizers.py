"""What an optimizer of sharded parameters is checked for before its first step.

Element by element, an update of this rank's parts is that of the whole parameters. Optimizers that
take norms or dot products of parameters do something else on parts, and a gradient scaler may see
this rank's parts only. State that was made before the parameters were sharded is whole, and is cut
here; state of another rank's parts is refused.
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
from fsdp_dynamo.core.gradient_scalers import refuse_plain_scaler
from fsdp_dynamo.core.original_parameter import REPLACED
from fsdp_dynamo.core.parts import has_plain_parts
from fsdp_dynamo.core.state_origin import ADVICE, Place, check_origins, write_origins
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError
from fsdp_dynamo.untraced import untraced

_LIBRARIES = frozenset(
    {
        "apex",
        "bitsandbytes",
        "pytorch_optimizer",
        "timm",
        "torch",
        "torch_optimizer",
        "transformers",
    }
)
_NAMES = frozenset(
    [
        "adafactor",
        "adafactorbigvision",
        "fusedlamb",
        "fusednovograd",
        "lamb",
        "lamb32bit",
        "lamb8bit",
        "lars",
        "lars32bit",
        "lars8bit",
        "lbfgs",
        "novograd",
        "nvnovograd",
    ]
)
"""Their optimizers that look across the elements of a parameter, or across parameters."""

SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are numbers, not of the parameter's shape."""

_flats: WeakSet[FlatParameter] = WeakSet()
_checked: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
"""By optimizer, the state that was checked; a loaded one is another object."""
_of_dtensors: WeakSet[Optimizer] = WeakSet()
_saying_origin: WeakSet[Optimizer] = WeakSet()
"""Optimizers whose state dicts say whose parts they hold."""


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
    return any(map(callable, (*args[1:], *kwargs.values())))


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
    sharded = _sharded_places(optimizer)
    if sharded:
        first = _name(*next(iter(sharded.values())))
        check_origins(optimizer, sharded, first)
        refuse_plain_scaler(optimizer, first)
        if optimizer not in _saying_origin:
            optimizer.register_state_dict_post_hook(_after_state_dict)
            _saying_origin.add(optimizer)
    for param, flat, index in managed:
        _refuse_across_elements(optimizer, flat, index)
        if param in optimizer.state:
            _fit(optimizer, flat, index, param)
    _checked[optimizer] = optimizer.state
    if any(isinstance(param, DTensor) for param, _, _ in managed):
        _of_dtensors.add(optimizer)


def _after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    write_origins(optimizer, state_dict, _sharded_places(optimizer))


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


def _sharded_places(optimizer: Optimizer) -> dict[int, Place]:
    """By the ``id`` of each of its parameters that is a plain part, the place."""
    return {
        id(param): (flat, index)
        for param, flat, index in _managed_parameters(optimizer)
        if has_plain_parts(flat)
    }


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


def _refuse_across_elements(optimizer: Optimizer, flat: FlatParameter, index: int) -> None:
    if not flat.is_sharded or flat.originals[index].placing is not None:
        return  # a DTensor refuses by itself what it cannot do
    for cls in type(optimizer).__mro__:
        if cls.__name__.lower() in _NAMES and cls.__module__.partition(".")[0] in _LIBRARIES:
            raise UnsupportedError(
                expected="an optimizer that updates element by element, such as AdamW or SGD",
                got=f"{cls.__module__}.{cls.__qualname__}, which takes norms or dot products: "
                "each rank would take those of its own parts",
                where=_name(flat, index),
                fix="Wrap with use_dtensor=True, use another optimizer or "
                "ShardingStrategy.NO_SHARD, or update whole matrices with update_whole(), as "
                "examples/muon.py does.",
            )


@torch.no_grad()
def _fit(optimizer: Optimizer, flat: FlatParameter, index: int, param: torch.Tensor) -> None:
    """Cut state of the whole parameter to this rank's part of it.

    Raises:
        FSDPStateError: state of torch's own optimizers is of neither size where a plain parameter
            is split. Elsewhere it is of no rank, such as LBFGS's, which is of all parameters.
    """
    state = optimizer.state[param]
    tensors = {
        k: v
        for k, v in state.items()
        if isinstance(v, torch.Tensor) and not isinstance(v, DTensor)
        if v.dim() or (not param.dim() and k not in SCALAR_STATES)
    }
    is_dtensor = isinstance(param, DTensor)
    if not is_dtensor and any(value.shape == param.shape for value in tensors.values()):
        return
    whole = flat.layout.slots[index].shape
    part = flat.shard_layout.ranges[index]
    for key, value in tensors.items():
        if value.shape == whole:
            state[key] = flat.originals[index].as_param(part.of(value).clone())
        elif has_plain_parts(flat) and type(optimizer).__module__.startswith("torch.optim."):
            raise FSDPStateError(
                expected=f"state of this rank's part, {tuple(param.shape)}, or of the whole "
                f"parameter, {tuple(whole)}",
                got=f"'{key}' of shape {tuple(value.shape)}: another rank's, perhaps",
                where=_name(flat, index),
                fix=ADVICE,
            )


def _name(flat: FlatParameter, index: int) -> str:
    return f"optimizer of parameter '{flat.paths.fqn_of(flat.originals[index].fqn)}'"
