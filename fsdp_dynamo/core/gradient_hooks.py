"""Users' gradient hooks of original parameters: run, or refused.

Autograd never sees an original parameter: modules hold views of the unsharded flat parameter in its
place. Hooks that want an accumulated gradient run when the reduced one is in ``.grad``. Hooks that
want to change a gradient on its way would get this rank's, before the mean: there is none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.module_tree import join_fqn

_GUARD = -1
"""Key of ``guard_gradient``; those of users' hooks are not negative."""


def refuse_tensor_hooks(param: torch.Tensor, unit_fqn: str, fqn: str) -> None:
    """Raise for a parameter with hooks of ``register_hook()``.

    Args:
        param: an original parameter.
        unit_fqn: of its unit, for messages.
        fqn: its own, relative to the unit.

    Raises:
        FSDPStateError: it has one.
    """
    if param._backward_hooks:
        raise FSDPStateError(
            expected="hooks of register_post_accumulate_grad_hook() on a parameter",
            got="one of register_hook()",
            where=f"parameter '{join_fqn(unit_fqn, fqn)}'",
            fix="Register it with register_post_accumulate_grad_hook(), and change p.grad there: "
            "this rank's part of the mean over ranks.",
        )


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook()``, in the order of registration.

    Then the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward`` step. It has
    given them to the parameter, and a hook to an autograd node that is in no graph here.
    """
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks and (len(hooks) > 1 or _GUARD not in hooks):
        for key, hook in tuple(hooks.items()):
            if key != _GUARD:
                hook(param)
    optimizers = getattr(param, "_in_backward_optimizers", ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None


def guard_gradient(param: torch.Tensor, guard: Callable[[torch.Tensor], None]) -> None:
    """Let autograd call ``guard`` where it accumulates a gradient into an original parameter.

    It does so only if something else than the forward of the unit has used the parameter.
    """
    hooks = param._post_accumulate_grad_hooks or OrderedDict()  # type: ignore[attr-defined]
    hooks[_GUARD] = guard
    param._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]


def hand_over_guard(old: torch.Tensor, new: torch.Tensor) -> None:
    """Guard ``new`` in the place of ``old``, which is free again."""
    hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks and _GUARD in hooks:
        guard_gradient(new, hooks.pop(_GUARD))


def hand_over_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let a parameter in the place of another have its hooks; their handles hold for both."""
    hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        new._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
