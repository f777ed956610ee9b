"""Deep copies of a wrapped model: process groups are shared, everything else is new."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPStateError, unit_name


def deep_copy(wrapper: nn.Module, unit: Unit, memo: dict[int, Any], *, is_outermost: bool) -> Any:
    """A copy of a wrapper and all below, as ``copy.deepcopy`` wants it.

    State that belongs to the process (registered name, compiled code) is left to the caller.

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
    groups = (*unit.config.groups.all, unit.config.groups.reduce, unit.settings.regathers_among)
    for group in groups:
        memo[id(group)] = group
    new = object.__new__(type(wrapper))
    memo[id(wrapper)] = new
    for name, value in wrapper.__dict__.items():
        new.__dict__[name] = copy.deepcopy(value, memo)
    return new
