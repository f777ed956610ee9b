"""Gradient scalers that see an overflow in this rank's parts only.

Where parameters are sharded, the rank that holds the element that overflows would skip its step and
lower its scale, the others would not. Whether a scaler has called a step is read from the calling
frames, once for an optimizer.
"""

from __future__ import annotations

import sys

import torch
from torch.optim.optimizer import Optimizer

from fsdp_dynamo.errors import UnsupportedError


def refuse_plain_scaler(optimizer: Optimizer, where: str) -> None:
    """Refuse a step on sharded parameters that a scaler calls by what this rank has found.

    To be called in a step of the optimizer.

    Args:
        optimizer: of sharded parameters.
        where: for the message.

    Raises:
        UnsupportedError: ``torch.amp.GradScaler``; or an optimizer that unscales gradients itself
            (``fused=True``), before which ``unscale_()`` was not called.
    """
    scaler = _calling_scaler()
    if scaler is None or not scaler.is_enabled():
        return
    cls = type(scaler)
    if not _may_share(cls):
        raise UnsupportedError(
            expected="a gradient scaler that shares overflows among ranks",
            got=f"{cls.__module__}.{cls.__qualname__}: only the rank that holds the element that "
            "overflows would skip the step and lower its scale",
            where=where,
            fix="Use fsdp_dynamo.ShardedGradScaler, which is called in the same way.",
        )
    if getattr(optimizer, "grad_scale", None) is not None:  # the scaler sets it for such a step
        raise UnsupportedError(
            expected="gradients that the scaler has unscaled",
            got=f"{type(optimizer).__name__}, which unscales them in its step: the scaler has "
            "looked for overflows on this rank only",
            where=where,
            fix="Leave fused=True out, or call scaler.unscale_(optimizer) before the step.",
        )


def _may_share(cls: type[torch.amp.GradScaler]) -> bool:
    """Whether a class has methods of its own where ranks can share what one has found."""
    plain = torch.amp.GradScaler
    return (
        cls.unscale_ is not plain.unscale_
        or cls._unscale_grads_ is not plain._unscale_grads_
        or cls._maybe_opt_step is not plain._maybe_opt_step
    )


def _calling_scaler() -> torch.amp.GradScaler | None:
    """The scaler whose ``step`` has led here."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler: torch.amp.GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back  # type: ignore[assignment]
    return None
