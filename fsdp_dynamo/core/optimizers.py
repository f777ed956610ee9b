"""Optimizers of sharded parameters: checks before a first step, and steps on local tensors.

An optimizer must hold the DTensors, and their gradients must be reduced. State made before the
parameters were sharded is whole, and is cut here.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain
from types import MethodType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_dynamo.comm.watchdog import raise_if_failed
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.original_parameter import REPLACED
from fsdp_dynamo.dynamo.untraced import untraced
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError


class _Checked(NamedTuple):
    """Result of the check of an optimizer.

    Attributes:
        state: state that was checked; loading makes a new object.
        has_dtensors: the optimizer holds parameters of units.
    """

    state: Any
    has_dtensors: bool


_UNCHECKED = _Checked(None, has_dtensors=False)

SCALAR_STATES = frozenset({"step", "mu_product", "eta", "mu"})
"""Scalar states of torch's optimizers; only the name tells them from states of one element."""

_flats: WeakSet[FlatParameter] = WeakSet()
_checked: WeakKeyDictionary[Optimizer, _Checked] = WeakKeyDictionary()


def watch_optimizers(flats: Iterable[FlatParameter]) -> None:
    """Check every optimizer of these parameters before its first step and after each loading."""
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
    """Return whether a step runs backwards itself, which may reduce a sum."""
    return any(callable(one) for one in (*args[1:], *kwargs.values()))


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the versions of DTensors, from which units notice writes.

    Operators on lists of DTensors and fused steps do not raise them.
    """
    if _has_dtensors(optimizer) and not torch.compiler.is_compiling():
        if _has_closure(args, kwargs):
            _refuse_sums(optimizer)
        increment_version(_dtensors_of(optimizer))


def _has_dtensors(optimizer: Optimizer) -> bool:
    return _checked.get(optimizer, _UNCHECKED).has_dtensors


def _dtensors_of(optimizer: Optimizer) -> list[DTensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [param for param in params if isinstance(param, DTensor)]


def check_optimizer(optimizer: Optimizer, may_have_sums: bool = False) -> None:
    """Check an optimizer unless its current state was checked already; check its gradients.

    Raises:
        DivergenceError: a collective that was to bring the gradients was aborted.
    """
    if not torch.compiler.is_compiling():
        raise_if_failed()
    if _checked.get(optimizer, _UNCHECKED).state is not optimizer.state:
        _check(optimizer)
    if _has_dtensors(optimizer) and not may_have_sums:
        _refuse_sums(optimizer)


def mark_checked(optimizer: Optimizer) -> None:
    """Treat the optimizer's current state as checked."""
    _checked[optimizer] = _Checked(optimizer.state, _has_dtensors(optimizer))


@untraced("an optimizer is checked once, eagerly")
def _check(optimizer: Optimizer) -> None:
    _refuse_replaced(optimizer)
    managed = list(_managed_parameters(optimizer))
    for param, flat, index in managed:
        if param in optimizer.state:
            _cut_states(optimizer, flat, index, param)
    _checked[optimizer] = _Checked(optimizer.state, has_dtensors=bool(managed))


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


def _refuse_replaced(optimizer: Optimizer) -> None:
    """Raise for parameters that a DTensor has replaced: they get no gradients."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if hasattr(param, REPLACED):
                raise FSDPStateError(
                    f"{type(optimizer).__name__}.step(): expected parameters of the sharded model, "
                    f"got a parameter of shape {tuple(param.shape)} that a DTensor has replaced. "
                    "Make the optimizer of the sharded model's parameters(), and after the next "
                    "forward if you have put a new parameter into a module."
                )


@untraced("looks at gradients eagerly")
def _refuse_sums(optimizer: Optimizer) -> None:
    """Raise for a DTensor whose gradient is a plain tensor: an unreduced sum.

    torch would take a plain scalar for a replicated one.
    """
    if all(flat.grad_sum.total is None for flat in _flats):
        return
    for param in _dtensors_of(optimizer):
        grad, mesh = param.grad, param.device_mesh
        if grad is not None and not (isinstance(grad, DTensor) and grad.device_mesh == mesh):
            raise FSDPStateError(
                f"{type(optimizer).__name__}.step(), a parameter of shape {tuple(param.shape)}: "
                "expected a reduced gradient, which is a DTensor, got a plain tensor, as steps "
                "under no_sync() leave it. Run the last backward outside of no_sync()."
            )


@torch.no_grad()
def _cut_states(optimizer: Optimizer, flat: FlatParameter, index: int, param: torch.Tensor) -> None:
    """Cut state of a whole parameter to this rank's part; raise for state of another rank."""
    state = optimizer.state[param]
    whole = flat.layout.slots[index].shape
    for key, value in state.items():
        flat.originals[index].placing.require_same_rank(value)
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and value.shape == whole and (value.dim() or key not in SCALAR_STATES):
            part = flat.shard_layout.ranges[index].of(value)
            state[key] = flat.originals[index].as_param(part.clone())


# -- local steps -----------------------------------------------------------------------------------
# Optimizer steps on local tensors, without the dispatch of DTensors.
#
# An elementwise update is correct on each rank's elements alone. During a step the optimizer's
# groups hold plain parameters that share the DTensors' memory, and its states are local tensors.
# Before and after a step it holds the DTensors and DTensor states.


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
    """Run an optimizer's steps on this rank's local tensors instead of DTensors.

    Numbers and state dicts stay the same. The host saves the dispatch of DTensors, which is most of
    a step over many small parameters. Fused steps that torch lacks for DTensors run.

    Args:
        optimizer: optimizer of a sharded model's parameters. Its ``step()`` is replaced.
        is_elementwise: assert for an optimizer that is not torch's that no element's update depends
            on another element.

    Returns:
        The optimizer.

    Raises:
        UnsupportedError: the optimizer is not known to work element by element, a step has a
            closure, or the optimizer has hooks of a step.
    """
    if type(optimizer) not in _ELEMENTWISE and not is_elementwise:
        raise UnsupportedError(
            "step_on_shards(): expected an optimizer of torch that updates element by element, "
            "such as AdamW or SGD, got "
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__}. Leave it to DTensors, "
            "or pass is_elementwise=True if no element's update depends on another element."
        )
    step, locals_ = optimizer.step, _Locals(optimizer)

    @wraps(step)
    def step_on_locals(_: optim.Optimizer, closure: Any = None) -> Any:
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() after step_on_shards(): expected no closure, "
                f"which would set gradients of DTensors during the step, got {closure!r}. Call "
                "backward() before the step."
            )
        check_optimizer(optimizer)
        hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
        if any(hooks):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step() after step_on_shards(): expected no hooks of a "
                "step, which would see local tensors, got hooks of register_step_pre_hook() or "
                "register_step_post_hook(). Do their work before or after the step."
            )
        with locals_.shown():
            return step()

    optimizer.step = MethodType(step_on_locals, optimizer)  # type: ignore[method-assign]  # schedulers want a method
    return optimizer


_memory_of = operator.attrgetter("_local_tensor")
_COMPARED = "a step on local tensors looks at the identity of states"


class _Locals:
    """Plain parameters that replace an optimizer's DTensors during a step, and their states.

    They are kept from step to step while the optimizer holds the same objects. Comparing lists of
    these objects is the host's cost of a step.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._plains: dict[Any, tuple[torch.Tensor, nn.Parameter]] = {}
        self._seen: list[Any] = []
        self._dtensors: list[DTensor] = []
        self._memories: list[torch.Tensor] = []
        self._groups: list[list[torch.Tensor]] = []
        self._states: Any = {}
        self._states_seen: list[Any] = []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Make the optimizer hold the plain parameters and their states inside the context."""
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        held = [group["params"] for group in groups]
        seen = [*chain.from_iterable((*params, None) for params in held), *_objects_of(state)]
        is_known = _are_same(seen, self._seen)
        if not (is_known and _are_same(list(map(_memory_of, self._dtensors)), self._memories)):
            self._make(held, state)
            self._seen = seen
            self._dtensors = [one for one in seen if isinstance(one, DTensor)]
            self._memories = list(map(_memory_of, self._dtensors))
        try:
            self._show_grads()
            optimizer.state = self._states
            mark_checked(optimizer)
            for group, plains in zip(groups, self._groups, strict=True):
                group["params"] = plains
            yield
        finally:
            for group, own in zip(groups, held, strict=True):
                group["params"] = own
            optimizer.state = state
            mark_checked(optimizer)
            for _, plain in self._plains.values():
                plain.grad = None
            increment_version(list(self._plains))  # from which units notice writes
            if not _are_same(_objects_of(self._states), self._states_seen):
                self._write_states_back(state)

    @untraced(_COMPARED)
    def _make(self, held: list[list[Any]], state: Any) -> None:
        params = [p for own in held for p in own if isinstance(p, DTensor)]
        known, self._plains = self._plains, {}
        for param in params:
            memory, plain = known.get(param, (None, None))
            if plain is None or memory is not param._local_tensor:
                memory = param._local_tensor
                plain = nn.Parameter(memory.detach(), requires_grad=param.requires_grad)
            self._plains[param] = memory, plain
        plains = {param: plain for param, (_, plain) in self._plains.items()}
        self._groups = [[plains.get(param, param) for param in own] for own in held]
        self._states = defaultdict(dict)
        for param, own in state.items():
            self._states[plains.get(param, param)] = (
                {key: local_of(value) for key, value in own.items()} if param in plains else own
            )
        self._states_seen = _objects_of(self._states)

    def _show_grads(self) -> None:
        for param, (_, plain) in self._plains.items():
            grad: Any = param.grad
            if grad is None:
                continue
            if getattr(grad, "_spec", None) is not param._spec:
                if isinstance(grad, DTensor) and grad.placements != param.placements:
                    grad = grad.redistribute(param.device_mesh, param.placements)
                if grad.dtype != plain.dtype:
                    plain.grad_dtype = None
            plain.grad = local_of(grad)

    @untraced(_COMPARED)
    def _write_states_back(self, state: Any) -> None:
        """Copy changed states of the plain parameters to the DTensors."""
        self._seen, self._states_seen, self._dtensors, self._memories = [], [], [], []
        left = dict(self._states)
        for param, (_, plain) in self._plains.items():
            if (states := left.pop(plain, None)) is not None:
                _copy_states(state.setdefault(param, {}), states, param)
        state.update(left)  # states of parameters that no unit holds


def _objects_of(state: Any) -> list[Any]:
    """List the parameters with states, and the names and values of these.

    A state that is no dict always compares as changed.
    """
    owns = list(state.values())
    if {*map(type, owns)} - {dict}:
        owns = [own if isinstance(own, dict) else {"": object()} for own in owns]
    return [*state, *chain.from_iterable(owns), *chain.from_iterable(map(dict.values, owns))]


def _are_same(objects: list[Any], others: list[Any]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def _copy_states(own: dict[Any, Any], states: dict[Any, Any], param: Any) -> None:
    """Make a DTensor's states those that a step has left for its local tensor."""
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
