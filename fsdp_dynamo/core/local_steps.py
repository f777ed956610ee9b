"""Optimizer steps on local tensors, which do not pay for the dispatch of DTensors.

An update that works element by element is the same on each rank's elements. So during a step the
optimizer's groups hold plain parameters over the memory of the DTensors, and its states are the
local tensors of its DTensors; before and after, everything is as without.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
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
class _Shown:
    """What stands for one DTensor during steps.

    Attributes:
        of: the DTensor.
        param: a plain parameter over its local tensor.
        grad_spec: of gradients that need no look, as a former one was placed and typed.
    """

    of: DTensor
    param: nn.Parameter
    grad_spec: Any = ""


class _Locals:
    """Plain parameters in the places of an optimizer's DTensors, and their states.

    All of it is kept from step to step while the optimizer holds the same objects: comparing lists
    of them is what a step costs the host.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._seen: list[Any] = []
        self._shown: list[_Shown] = []
        self._groups: list[list[torch.Tensor]] = []
        self._states: Any = {}
        self._states_seen: list[Any] = []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Let the optimizer hold them and their states, while the context is open."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        held = [group["params"] for group in groups]
        seen = [*_memories(held), *_objects_of(state)]
        if not _are_same(seen, self._seen):
            self._make(held, state)
            self._seen = seen
        self._show_grads()
        try:
            optimizer.state = self._states
            note_checked(optimizer)
            for group, params in zip(groups, self._groups, strict=True):
                group["params"] = params
            yield
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            optimizer.state = state
            note_checked(optimizer)
            for shown in self._shown:
                shown.param.grad = None
            if not _are_same(_objects_of(self._states), self._states_seen):
                self._take_back(state)
            increment_version([shown.of for shown in self._shown])  # units notice the writes

    def _make(self, held: list[list[Any]], state: Any) -> None:
        """Make the plain parameters, and states with the local tensors of the DTensors' states."""
        plains = {
            param: nn.Parameter(param._local_tensor.detach(), requires_grad=param.requires_grad)
            for params in held
            for param in params
            if isinstance(param, DTensor)
        }
        self._shown = [_Shown(*pair) for pair in plains.items()]
        self._groups = [[plains.get(param, param) for param in params] for params in held]
        self._states = type(state)(dict)
        for param, own in state.items():
            self._states[plains.get(param, param)] = (
                {key: local_of(value) for key, value in own.items()} if param in plains else own
            )
        self._states_seen = _objects_of(self._states)

    def _show_grads(self) -> None:
        """Give the plain parameters the local tensors of the DTensors' gradients."""
        for shown in self._shown:
            grad: Any = shown.of.grad
            if grad is None:
                continue
            if getattr(grad, "_spec", None) is not shown.grad_spec:
                grad = _placed_grad(shown, grad)
            shown.param.grad = local_of(grad)

    def _take_back(self, state: Any) -> None:
        """Let the DTensors' states be what a step has left of the local tensors'."""
        self._seen = []
        left = dict(self._states)
        for shown in self._shown:
            if (states := left.pop(shown.param, None)) is not None:
                _take_states(state[shown.of], states, shown.of)
        state.update(left)  # of plain parameters


def _placed_grad(shown: _Shown, grad: Any) -> Any:
    """A gradient that is placed as its DTensor is, of which the next ones have the spec."""
    param = shown.of
    if isinstance(grad, DTensor):
        if grad.placements == param.placements:
            shown.grad_spec = grad._spec
        else:
            grad = grad.redistribute(param.device_mesh, param.placements)
    if grad.dtype != shown.param.dtype:
        shown.param.grad_dtype = None
    return grad


def _memories(held: list[list[Any]]) -> list[Any]:
    """Parameters, the memory of DTensors among them, and where groups end."""
    params = list(chain.from_iterable((*params, None) for params in held))
    return params + [param._local_tensor for param in params if isinstance(param, DTensor)]


def _objects_of(state: Any) -> list[Any]:
    """The parameters with states, and the states."""
    return [*state, *chain.from_iterable(map(dict.values, state.values()))]


def _are_same(objects: list[Any], others: list[Any]) -> bool:
    """Whether these are the same objects, not equal ones."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _take_states(own: dict[Any, Any], states: dict[Any, Any], param: Any) -> None:
    """Let a DTensor's states be what a step has left of its local tensor's."""
    for key, value in states.items():
        if key in own and local_of(own[key]) is value:
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
    for key in own.keys() - states.keys():
        del own[key]
