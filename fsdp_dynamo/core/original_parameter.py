"""One parameter of the user's model, the places that hold it, and the mark of its owner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from fsdp_dynamo.core.dtensors import (
    Placing,
    TensorParallel,
    as_local_parameter,
    local_of,
    set_local,
    share_hooks,
)
from fsdp_dynamo.errors import FSDPStateError

_OWNER = "_fsdp_dynamo_owner"
_UPSTREAMS_MARK = "_fsdp_flattened"
REPLACED = "_fsdp_dynamo_replaced"
"""Mark of a parameter in whose place a DTensor is: the FQN that its unit has for it."""


class TensorClass:
    """Factory of tensors of ``like``'s class, which wraps one tensor of its shape and dtype."""

    def __init__(self, like: Any) -> None:
        self._class, self._context = type(like), like.__tensor_flatten__()[1]
        [self._name] = _wrapped(like)

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor that a tensor of the class wraps."""
        memory: torch.Tensor = getattr(tensor, self._name)
        return memory

    def has(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is self._class

    def around(self, memory: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        """Make a tensor of the class around ``memory``, with the other attributes of ``like``."""
        made: torch.Tensor = self._class.__tensor_unflatten__(
            {self._name: memory}, self._context, memory.shape, memory.stride()
        )
        if like is not None:
            self.copy_attributes(like, made)
        return made

    def copy_attributes(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all attributes but the wrapped tensor, such as a scale, to another tensor."""
        for name, value in source.__dict__.items() if source is not target else ():
            if name != self._name:
                target.__dict__[name] = value


def _wrapped(tensor: Any) -> list[str]:
    """Return the names of wrapped tensors: ``_tensor``, but not a scalar scale."""
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [name for name in names if getattr(tensor, name).dim() or not tensor.dim()]


def wraps_one(tensor: Any) -> bool:
    """Return whether a tensor of a subclass wraps one tensor of its own shape and dtype."""
    wrapped = [getattr(tensor, name) for name in _wrapped(tensor)]
    return [(one.shape, one.dtype) for one in wrapped] == [(tensor.shape, tensor.dtype)]


@dataclass
class OriginalParameter:
    """One parameter of the user's model and every place that holds it.

    Attributes:
        param: the object that optimizers hold.
        fqn: FQN relative to the unit.
        sites: ``(module, name, FQN)`` of every place; several if the parameter is tied.
        parallel: how tensor parallelism has split it, or ``None``.
        tensor_class: class of its local tensor if that is a subclass with gather hooks.
        keeps_dtype: whether mixed precision leaves its dtype.
        dim: dimension along which it is sharded.
        placing: mesh and placements of its DTensors.
        whole: plain parameter that modules hold in its place while it is summoned.
        guard: raises if a backward gives ``whole`` a gradient, which would be lost.
    """

    param: nn.Parameter
    fqn: str
    sites: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    parallel: TensorParallel | None = None
    tensor_class: TensorClass | None = None
    keeps_dtype: bool = False
    dim: int = 0
    placing: Placing = field(init=False)
    whole: nn.Parameter | None = None
    guard: _WholeGradientGuard | None = None

    def unwrap_dtensor(self) -> None:
        """Replace a DTensor of tensor parallelism by a plain parameter of its local tensor."""
        self.param, self.parallel = as_local_parameter(self.param)
        if self.parallel is not None:
            self._put_into_modules(self.param)

    def unwrap_subclass(self) -> None:
        """Replace a parameter of a tensor subclass by a plain parameter that shares its memory."""
        old = self.param
        self.tensor_class = TensorClass(old)
        plain = nn.Parameter(self.tensor_class.memory(old).detach(), old.requires_grad)
        own = self.tensor_class.around(plain.detach()).__dict__
        self._replace_param(plain, {k: v for k, v in old.__dict__.items() if k not in own})

    # -- this rank's part --------------------------------------------------------------------------

    def become_dtensor(self, placing: Placing, part: torch.Tensor) -> None:
        """Replace the parameter by a DTensor. Optimizers must not hold the parameter yet."""
        self.placing = placing
        new = self._parameter_around(part)
        self._replace_param(new, self.param.__dict__)

    def _replace_param(self, new: nn.Parameter, attributes: Mapping[str, Any]) -> None:
        """Make ``new`` the parameter in all places, with the old one's hooks and ``attributes``."""
        old, self.param = self.param, new
        new.__dict__.update(attributes)
        share_hooks(old, new)
        setattr(old, REPLACED, self.fqn)
        self._put_into_modules(new)

    @property
    def part(self) -> torch.Tensor:
        """This rank's elements."""
        local = local_of(self.param)
        return local if self.tensor_class is None else self.tensor_class.memory(local)

    def _parameter_around(self, part: torch.Tensor) -> nn.Parameter:
        made: Any = self.placing.dtensor(self._local(part))
        param: Any = nn.Parameter(made, requires_grad=self.param.requires_grad)
        param._spec = made._spec  # shared with gradients: torch compares identity first
        return param  # type: ignore[no-any-return]

    def _local(self, part: torch.Tensor) -> torch.Tensor:
        own, before = _as_own_object(part), local_of(self.param)
        if self.tensor_class is None:
            return own
        return self.tensor_class.around(own, before if self.tensor_class.has(before) else None)

    def part_of(self, value: torch.Tensor) -> torch.Tensor:
        return self.placing.part_of(value.detach())

    def show_part(self, part: torch.Tensor) -> None:
        if self.param.is_meta is not part.is_meta:
            self._swap(self._parameter_around(part))
        else:
            set_local(self.param, self._local(part), self.placing)

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's elements of the gradient, or ``None``."""
        grad = self.param.grad
        if grad is None:
            return None
        if not isinstance(grad, DTensor) or not self.placing.holds(grad):
            # A use outside of the model's forward has made a gradient of other placements.
            grad = self.param.grad = self.placing.dtensor(self.placing.part_of(grad).clone())
        return grad._local_tensor

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        if part is None:
            self.param.grad = None
        else:
            put_grad(self.param, self.as_param(part))

    def add_grad(self, part: torch.Tensor) -> None:
        if self.param.grad is None:
            self.param.grad = self.as_param(part)
        else:
            self.grad.add_(part)  # type: ignore[union-attr]

    def as_param(self, part: torch.Tensor) -> torch.Tensor:
        """Make a DTensor placed as the parameter whose local elements are ``part``."""
        return self.placing.dtensor(_as_own_object(part))

    @property
    def is_replicated(self) -> bool:
        return self.placing.is_replicated

    def copy(self, memo: dict[int, Any]) -> None:
        """Put a copy of the DTensor, without its gradient, into the memo of a deep copy.

        torch copies only DTensors without a storage offset.
        """
        if id(self.param) in memo:
            return
        copied = self._parameter_around(self.part.clone())
        memo[id(self.param)] = copied
        copied.__dict__.update(deepcopy(self.param.__dict__, memo))

    def show_whole(self, value: torch.Tensor, fqn: str) -> nn.Parameter:
        """Make modules hold ``value`` as a plain parameter until ``end_whole``; return it."""
        self.whole = nn.Parameter(value, requires_grad=self.param.requires_grad)
        self.whole.__dict__.update(self.param.__dict__)
        self._put_into_modules(self.whole)
        is_guarded = self.held.requires_grad and not self.held.is_inference()
        self.guard = _WholeGradientGuard(self, fqn) if is_guarded else None
        return self.held

    def end_whole(self) -> None:
        """Make modules hold the DTensor again."""
        guard, self.guard = self.guard, None
        if self.whole is not None:
            if guard is not None:
                guard.stay_on(self.whole)
            setattr(self.whole, REPLACED, self.fqn)
            self.whole = None
            self._put_into_modules(self.param)

    @property
    def held(self) -> nn.Parameter:
        """The object that modules hold between steps."""
        return self.param if self.whole is None else self.whole

    def _put_into_modules(self, param: nn.Parameter) -> None:
        for module, name, _ in self.sites:
            module._parameters[name] = param

    def _swap(self, new: nn.Parameter) -> None:
        """Swap the parameter's content with ``new``; the object and its identity stay."""
        new.__dict__.update({**self.param.__dict__, **new.__dict__})
        share_hooks(self.param, new)
        torch.utils.swap_tensors(self.param, new)

    # -- its places ------------------------------------------------------------------------------

    def present(self) -> Sequence[torch.Tensor]:
        """Return the distinct objects that modules hold now; empty if it was removed."""
        found = [module._parameters.get(name) for module, name, _ in self.sites]
        return list({id(param): param for param in found if param is not None}.values())

    def replace(self, new: nn.Parameter) -> None:
        """Put the held parameter back into modules and give it the state of ``new``.

        Its ``requires_grad`` and its gradient, mostly ``None``, become those of ``new``. The caller
        copies the values.
        """
        setattr(new, REPLACED, self.fqn)
        self.param.requires_grad_(new.requires_grad)
        self.grad = None if new.grad is None else self.part_of(new.grad).clone()
        if self.whole is not None:
            self.whole = new
        self._put_into_modules(self.held)


class _WholeGradientGuard:
    """Raises when a backward reaches a whole parameter outside of its unit's forward.

    Nothing would reduce that gradient. The guard is a hook on the parameter's autograd node, which
    lives as long as a graph made meanwhile, or this object. ``torch.autograd.grad`` does not run
    it.
    """

    def __init__(self, original: OriginalParameter, fqn: str) -> None:
        with torch.inference_mode(False):  # which makes no autograd nodes
            self._node = get_gradient_edge(original.held).node

        def refuse(_grads: Sequence[torch.Tensor]) -> None:
            raise FSDPStateError(
                f"parameter '{fqn}': expected a parameter outside of its unit's forward to be used "
                "without gradients, got a backward that reaches it: nothing would reduce its "
                "gradient. Use it in its unit's forward, or in a method that is registered with "
                "register_forward_method, or detach it."
            )

        self._node.register_prehook(refuse)
        self._refuse = refuse

    def stay_on(self, param: nn.Parameter) -> None:
        """Raise for later uses of an object that modules no longer hold, too."""
        raises = self._refuse  # not `self`: its node holds the parameter, which would leak

        def refuse(used: torch.Tensor) -> None:
            used.grad = None
            raises([])

        param.register_post_accumulate_grad_hook(refuse)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return nothing: a copy of the parameter is sharded."""


def _as_own_object(part: torch.Tensor) -> torch.Tensor:
    """Return a part as its own tensor object.

    All empty parts are one object (``ShardLayout.split``): a trace would take parameters of which
    this rank has no elements for one input.
    """
    return part if part.numel() else part.detach()


def put_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Set ``.grad`` of a DTensor, of any dtype."""
    if grad.dtype != param.dtype:
        param.grad_dtype = None
    param.grad = grad


def owner_of(param: object) -> str | None:
    """Return the FQN under which a unit holds a parameter, or ``None``."""
    owner: str | None = getattr(param, _OWNER, None)
    return owner


def mark_managed(param: nn.Parameter, fqn: str) -> None:
    """Mark a parameter as held by a unit, under an FQN."""
    setattr(param, _OWNER, fqn)
    setattr(param, _UPSTREAMS_MARK, True)
