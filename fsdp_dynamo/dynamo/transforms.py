"""``torch.func``'s transforms around a unit: its collectives, views and hooks are outside of them.

Inside, new tensors are wrappers without memory that could be sent, and hooks would be on wrappers
that an outer backward never sees.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    temporarily_clear_interpreter_stack,
    temporarily_pop_interpreter_stack,
)
from torch.autograd import forward_ad

_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Leave all transforms that are active while open."""
    if _functorch.peek_interpreter_stack() is None:
        return _NOTHING
    return temporarily_clear_interpreter_stack()


def is_in_reverse_mode() -> bool:
    """Whether ``torch.func.grad``, ``vjp`` or ``jacrev`` is active, whose backward is its own."""
    return _functorch.peek_interpreter_stack() is not None and any(
        one.key() == TransformType.Grad for one in retrieve_all_functorch_interpreters()
    )


def below_transforms(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the outer graph that a tensor consists of: its value, and a tangent in ``jvp``."""
    top = _functorch.peek_interpreter_stack()
    if top is None or not _functorch.is_functorch_wrapped_tensor(tensor):
        return [tensor]
    found = [tensor]
    if _functorch.maybe_get_level(tensor) == top.level():
        if top.key() == TransformType.Jvp:
            tangent = forward_ad.unpack_dual(tensor).tangent  # its primal is another view
            found += [] if tangent is None else [tangent]
        found = [_functorch.get_unwrapped(one) for one in found]
    with temporarily_pop_interpreter_stack():
        return [below for one in found for below in below_transforms(one)]
