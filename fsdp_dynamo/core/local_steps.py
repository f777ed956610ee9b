"""Optimizer steps on local tensors, which do not pay for the dispatch of DTensors.

An update that works element by element is the same on each rank's elements. So during a step the
optimizer's groups hold plain parameters over the memory of the DTensors, and its states are the
local tensors of its DTensors; before and after, everything is as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.optimizers import SCALAR_STATES, check_optimizer, note_checked
from fsdp_dynamo.errors import UnsupportedError

_ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
_Optimizer = TypeVar("_Optimizer", bound=optim.Optimizer)


def step_on_shards(optimizer: _Optimizer, *, is_elementwise: bool = False) -> _Optimizer:
    """Let an optimizer's steps compute on this rank's local tensors in place of DTensors.

    The numbers are the same, and so are state dicts; the host saves the dispatch of DTensors, which
    is most of a step over many small parameters. Fused steps that torch has not for DTensors run.

    Args:
        optimizer: of a sharded model's parameters. Its ``step()`` is replaced.
        is_elementwise: vouches for an optimizer that is not one of torch's: no element's update
            depends on another element.

    Returns:
        The optimizer.

    Raises:
        UnsupportedError: an optimizer that is not known to work element by element; in a step, a
            closure.
    """
    if type(optimizer) not in _ELEMENTWISE and not is_elementwise:
        raise UnsupportedError(
            expected="an optimizer of torch that updates element by element, such as AdamW or SGD",
            got=f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            where="step_on_shards()",
            fix="Leave it to DTensors, or pass is_elementwise=True if no element's update depends "
            "on another element.",
        )
    step, locals_ = optimizer.step, _Locals(optimizer)

    @wraps(step)
    def step_on_locals(_: optim.Optimizer, closure: Any = None) -> Any:
        if closure is not None:
            raise UnsupportedError(
                expected="no closure: it would give gradients to the DTensors while a step is "
                "under way",
                got=repr(closure),
                where=f"{type(optimizer).__name__}.step() after step_on_shards()",
                fix="Call backward() before the step.",
            )
        check_optimizer(optimizer)
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if any(hooks):
            raise UnsupportedError(
                expected="no hooks of a step: they would see this rank's local tensors",
                got="some of register_step_pre_hook() or register_step_post_hook()",
                where=f"{type(optimizer).__name__}.step() after step_on_shards()",
                fix="Do what they do before or after the step.",
            )
        with locals_.shown():
            return step()

    optimizer.step = MethodType(step_on_locals, optimizer)  # type: ignore[method-assign]  # schedulers want a method
    return optimizer


@dataclass(eq=False)
class _Local:
    """What stands for one DTensor during steps.

    Attributes:
        of: the DTensor.
        memory: its local tensor.
        param: a plain parameter over it.
        own: the DTensor's states, as the optimizer holds them between steps.
        states: those of ``param``, as the optimizer holds them in a step.
    """

    of: torch.Tensor
    memory: torch.Tensor
    param: nn.Parameter
    own: dict[Any, Any] | None = None
    states: dict[Any, Any] | None = None


class _Locals:
    """Plain parameters in the places of an optimizer's DTensors."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._known: dict[int, _Local] = {}

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the optimizer hold them and their states, while the context is open."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        held = [group["params"] for group in groups]
        every = [param for params in held for param in params]
        pairs = [(param, self._local(param)) for param in every if isinstance(param, DTensor)]
        in_step: Any = type(state)(dict)
        for param in every:
            if param in state and id(param) not in self._known:
                in_step[param] = state[param]
        for param, local in pairs:
            if (states := _states_of(local, state.get(param))) is not None:
                in_step[local.param] = states
        try:
            optimizer.state = in_step
            note_checked(optimizer)
            for group, params in zip(groups, held, strict=True):
                group["params"] = [
                    self._known[id(p)].param if id(p) in self._known else p for p in params
                ]
            yield
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            optimizer.state = state
            note_checked(optimizer)
            for param, local in pairs:
                local.param.grad = None
                local.states = in_step.pop(local.param, None)
                if local.states is not None:
                    if local.own is None:
                        local.own = state[param]
                    _take_back(local.own, local.states, param)
            state.update(in_step)  # of plain parameters
            increment_version([param for param, _ in pairs])  # units notice that they were written

    def _local(self, param: Any) -> _Local:
        """What stands for a DTensor, with the gradient's local tensor."""
        memory = param._local_tensor
        local = self._known.get(id(param))
        if local is None or local.memory is not memory:
            plain = nn.Parameter(memory.detach(), requires_grad=param.requires_grad)
            local = self._known[id(param)] = _Local(param, memory, plain)
        grad = param.grad
        if grad is not None:
            if isinstance(grad, DTensor) and grad.placements != param.placements:
                grad = grad.redistribute(param.device_mesh, param.placements)
            grad = local_of(grad)
            if grad.dtype != memory.dtype:
                local.param.grad_dtype = None
            local.param.grad = grad
        return local


def _states_of(local: _Local, own: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """The local tensors of a DTensor's states."""
    if own is not local.own or own is None or local.states is None or len(own) != len(local.states):
        local.own = own
        local.states = None if own is None else {}
    if own is None or local.states is None:
        return None
    for key, value in own.items():
        local.states[key] = value._local_tensor if isinstance(value, DTensor) else value
    return local.states


def _take_back(own: dict[Any, Any], states: dict[Any, Any], param: Any) -> None:
    """Let a DTensor's states be what a step has left of the local tensor's."""
    for key, value in states.items():
        before = own.get(key)
        if before is value or (isinstance(before, DTensor) and before._local_tensor is value):
            continue
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and key not in SCALAR_STATES and value.shape == param._local_tensor.shape:
            value = DTensor.from_local(
                value,
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        own[key] = value
    if len(own) > len(states):
        for key in own.keys() - states.keys():
            del own[key]
