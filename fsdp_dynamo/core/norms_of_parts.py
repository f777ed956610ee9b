"""Norms over several tensors of plain parts, which torch would take of this rank only, refused.

``torch.nn.utils.clip_grad_norm_`` reads nothing but ``.grad`` and calls operators on what it finds,
and of the wrapper's parameters all of that is plain tensors. So the function that takes the norm is
replaced when the first parameter is sharded (decision 16). Of any other tensors it takes the norm
as before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

from fsdp_dynamo.core.parts import parts_now
from fsdp_dynamo.errors import UnsupportedError


@functools.cache
def replace_total_norm() -> None:
    """Let torch's norms over several tensors raise where one is a plain part."""
    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def total_norm(tensors: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return original(tensors, *arguments, **named)
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        _refuse_parts(given)
        return original(given, *arguments, **named)

    clip_grad._get_total_norm = total_norm
    torch.nn.utils.get_total_norm = total_norm


def _refuse_parts(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse the norm of tensors that are parts, or gradients of parts.

    Raises:
        UnsupportedError: one is.
    """
    given = {id(tensor) for tensor in tensors}
    for part, fqn in parts_now():
        if id(part) in given:
            raise UnsupportedError(
                expected="whole gradients, or none of sharded parameters",
                got="this rank's part: each rank would take the norm of its own parts, and clip by "
                "another factor",
                where=f"torch.nn.utils.clip_grad_norm_ or get_total_norm, parameter '{fqn}'",
                fix="Call model.clip_grad_norm_(max_norm), which returns the norm over all ranks; "
                "model.clip_grad_norm_(float('inf')) takes it and clips nothing.",
            )
