"""Code that Dynamo must not trace, even if a compiled function calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

BY_AUTOGRAD = "what autograd calls runs eagerly"
"""Dynamo would trace the Python that the engine calls if compiled code calls ``backward()``."""
UNDER_LOCK = "Dynamo calls this under a lock, for which it would wait while it traces it"


def untraced(reason: str) -> Callable[[Function], Function]:
    """Decorate a function that runs eagerly, with all that it calls.

    ``reason`` is what Dynamo reports where the function breaks a graph.
    """

    def decorate(function: Function) -> Function:
        decorated: Function = torch.compiler.disable(function, reason=reason)
        return decorated

    return decorate


__all__ = ["BY_AUTOGRAD", "UNDER_LOCK", "untraced"]
