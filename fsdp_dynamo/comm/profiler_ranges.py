"""Ranges in the profiler's timeline, named by unit: ``FSDP::all_gather layers.3``.

They are there while a profiler runs; at other times they cost a question.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NOTHING: AbstractContextManager[None] = nullcontext()


def is_profiling() -> bool:
    """Whether a profiler of torch runs in this thread."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined,no-any-return]


def named(what: str, unit: str, waits: bool = False) -> AbstractContextManager[object]:
    """A range around what a unit does.

    Args:
        what: ``"all_gather"``, ``"forward"``.
        unit: FQN, ``""`` for the root.
        waits: for a collective that was issued before.
    """
    if not is_profiling():
        return _NOTHING
    verb = f"{what} wait" if waits else what
    return record_function(f"FSDP::{verb} {unit or '(root)'}")
