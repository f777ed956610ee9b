"""Users' gradient hooks of original parameters: run, or refused.

Autograd never sees an original parameter: modules hold views of the unsharded flat parameter in its
place. Hooks that want an accumulated gradient run when the reduced one is in ``.grad``. Hooks that
want to change a gradient on its way would get this rank's, before the mean: there is none.
"""

from __future__ import annotations

import torch

from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.module_tree import UnitPaths


def refuse_tensor_hooks(param: torch.Tensor, paths: UnitPaths, fqn: str) -> None:
    """Raise for a parameter with hooks of ``register_hook()``.

    Args:
        param: an original parameter.
        paths: of its unit, for messages.
        fqn: its own, relative to the unit.

    Raises:
        FSDPStateError: it has one.
    """
    if param._backward_hooks:
        raise FSDPStateError(
            expected="hooks of register_post_accumulate_grad_hook() on a parameter",
            got="one of register_hook()",
            where=f"parameter '{paths.fqn_of(fqn)}'",
            fix="Register it with register_post_accumulate_grad_hook(), and change p.grad there: "
            "this rank's part of the mean over ranks.",
        )


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Call hooks of ``register_post_accumulate_grad_hook()``, in the order of registration.

    Then the optimizers of ``torch.distributed.optim._apply_optimizer_in_backward`` step. It has
    given them to the parameter, and a hook to an autograd node that is in no graph here.
    """
    hooks = param._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    for hook in tuple(hooks.values()) if hooks else ():
        hook(param)
    optimizers = getattr(param, "_in_backward_optimizers", ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None


def hand_over_hooks(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let a parameter in the place of another have its hooks; their handles hold for both."""
    hooks = old._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks:
        new._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
