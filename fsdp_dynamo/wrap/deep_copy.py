"""Deep copies of a wrapped model: process groups are shared, everything else is new."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPStateError, unit_name

_COPIES = "fsdp_dynamo: copies to be finished"


def deep_copy(wrapper: nn.Module, unit: Unit, memo: dict[Any, Any], *, is_outermost: bool) -> Any:
    """A copy of a wrapper and all below, as ``copy.deepcopy`` wants it.

    State that belongs to the process (registered name, compiled code) is left to the caller, who
    gives it in ``finished_copies``.

    Raises:
        FSDPStateError: a nested wrapper by itself, whose unit belongs to its root's schedule.
    """
    is_alone = not any(id(group) in memo for group in unit.config.groups.all)
    if is_alone and not is_outermost:
        raise FSDPStateError(
            expected="a copy of the outermost unit's module",
            got="a nested one by itself",
            where=unit_name(unit.fqn),
            fix="Copy the whole model, or the module before it is wrapped.",
        )
    groups = (*unit.config.groups.every, unit.settings.regathers_among)
    for group in groups:
        memo[id(group)] = group
    new = object.__new__(type(wrapper))
    memo[id(wrapper)] = new
    for name, value in wrapper.__dict__.items():
        new.__dict__[name] = copy.deepcopy(value, memo)
    memo[_COPIES].append(new)
    return new


@contextmanager
def finished_copies(memo: dict[Any, Any], finish: Callable[[Any], None]) -> Iterator[None]:
    """Finish all copies that are made inside, when the last of them has all of its attributes.

    Modules of one unit hold each other: one is copied in the middle of the other.
    """
    if _COPIES in memo:
        yield
        return
    copies = memo[_COPIES] = []
    try:
        yield
    finally:
        del memo[_COPIES]
    for copied in copies:
        finish(copied)
