"""Gradients that steps under ``no_sync()`` leave unsharded, in all modes.

They are the user's as any others: until they are reduced, each original parameter's ``.grad`` is
its view of the sum, in its unsharded shape (as upstream shows it). What the user does to it in
place is done to the sum; what the user sets to ``None`` is dropped when the sum is used next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fsdp_dynamo.errors import FSDPStateError


class Accumulation:
    """What a root's units share. Compiled code is guarded by both flags.

    Attributes:
        sync: whether the step that runs reduces its gradients.
        has_sums: whether a flat parameter holds a sum of unsharded gradients.
    """

    def __init__(self, flats: Sequence[Any] = ()) -> None:
        self.sync = True
        self.has_sums = False
        self._flats = tuple(flats)

    def refresh(self) -> None:
        """Look again, after sums came or went."""
        self.has_sums = any(flat.unsharded_grad_sum is not None for flat in self._flats)


class UnshardedSum:
    """Sum of the unsharded gradients of one flat parameter, shown by its original parameters.

    Args:
        total: the sum ``(padded_numel,)``.
        views: of ``total.data``, one for each parameter in its unsharded shape. A version counter
            of their own: a graph that has saved ``total`` does not mind the user's changes.
        params: by FQN, the parameters that show the views.
    """

    def __init__(
        self,
        total: torch.Tensor,
        views: Sequence[torch.Tensor],
        params: Mapping[str, torch.Tensor],
    ) -> None:
        self.total = total
        self._views = views
        self._params = params
        for param, view in zip(params.values(), views, strict=True):
            _put_grad(param, view)

    def drop_dropped(self) -> None:
        """Set to zero what the user has set to ``None``.

        Raises:
            FSDPStateError: a ``.grad`` is another tensor, of which nobody knows whether it is
                reduced.
        """
        grads = [param.grad for param in self._params.values()]
        for fqn, grad, view in zip(self._params, grads, self._views, strict=True):
            if grad is not None and grad is not view:
                raise FSDPStateError(
                    expected="the gradient that steps under no_sync() have left in .grad",
                    got=f"another tensor of shape {tuple(grad.shape)}",
                    where=f"parameter '{fqn}'",
                    fix="Change it in place (p.grad.mul_(...)), or drop it (p.grad = None), "
                    "until a step without no_sync() has reduced it.",
                )
        for grad, view in zip(grads, self._views, strict=True):
            if grad is None:
                view.zero_()

    def add(self, grad: torch.Tensor) -> None:
        """Add an unsharded gradient ``(padded_numel,)``."""
        self.drop_dropped()
        self.total.data.add_(grad)  # a graph may have saved it for its backward
        for param, view in zip(self._params.values(), self._views, strict=True):
            if param.grad is None:
                _put_grad(param, view)

    def hide(self) -> bool:
        """Let the parameters have no gradient; returns whether the user had left any."""
        self.drop_dropped()
        shown = False
        for param in self._params.values():
            shown = shown or param.grad is not None
            param.grad = None
        return shown


def _put_grad(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Set ``.grad``, whose shape, dtype and device autograd compares with those of the data."""
    data = param.data
    param.data = grad
    param.grad = grad
    param.data = data
