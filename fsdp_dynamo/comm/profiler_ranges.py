"""Ranges in the profiler's timeline, named by unit: ``FSDP::all_gather layers.3``.

They are recorded only while a profiler runs; otherwise the cost is one check.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NO_RANGE: AbstractContextManager[None] = nullcontext()


def is_profiling() -> bool:
    """Whether torch's profiler runs in this thread."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined,no-any-return]


def profiler_range(
    operation: str, unit: str, is_wait: bool = False
) -> AbstractContextManager[object]:
    """A range around an operation of a unit.

    Args:
        operation: for example ``"all_gather"`` or ``"forward"``.
        unit: FQN, ``""`` for the root.
        is_wait: the range is the wait for an operation that was issued before.
    """
    if not is_profiling():
        return _NO_RANGE
    name = f"{operation} wait" if is_wait else operation
    return record_function(f"FSDP::{name} {unit or '(root)'}")
