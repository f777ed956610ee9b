"""``SHARD_GRAD_OP`` within a budget: the units that stay unsharded between forward and backward.

The last of the forward are kept first::

    forward    AG(1) F(1)  AG(2) F(2)  AG(3) F(3) |           B(3) RS(3)  AG(2) B(2) ...
    budget                                   [kept 3]

The backward begins with them. So nothing would hide the gather of the last one, whose bytes are
free again soonest; of a unit before it, another unit's backward hides the gather. Every kept unit
saves its own bytes of communication, whichever it is.

Decided from sizes and the order of modules alone, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from fsdp_dynamo.agreement.comparison import require_same
from fsdp_dynamo.config import ShardingStrategy
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError

_RESHARDING = {
    ShardingStrategy.SHARD_GRAD_OP: ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_SHARD_ZERO2: ShardingStrategy.HYBRID_SHARD,
}
"""Strategies that keep units, and what a unit has that is not kept."""


def check_budget(budget_bytes: object, strategy: ShardingStrategy) -> None:
    """Raise unless a budget, if there is one, is a number of bytes for a strategy that keeps units.

    Raises:
        FSDPTypeError: it is no whole number.
        FSDPValueError: it is negative, or the strategy keeps nothing.
    """
    if budget_bytes is None:
        return
    where = "argument 'unsharded_budget_bytes'"
    fix = "Pass the bytes that units may hold between forward and backward, such as 4 << 30."
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
        raise FSDPTypeError(expected="an int or None", got=repr(budget_bytes), where=where, fix=fix)
    if budget_bytes < 0:
        raise FSDPValueError(expected="0 or more", got=str(budget_bytes), where=where, fix=fix)
    if strategy not in _RESHARDING:
        raise FSDPValueError(
            expected=f"one of {', '.join(one.name for one in _RESHARDING)}",
            got=strategy.name,
            where=where,
            fix="Choose one of these strategies, or leave the budget out.",
        )


def keep_within(root: nn.Module, units: Mapping[nn.Module, Unit], budget_bytes: int | None) -> None:
    """Let units that do not fit into a budget reshard after their forward.

    One that is larger than what is left is passed over. The root of the units is not counted: it
    stays unsharded in any case.

    Args:
        root: the module of the first unit.
        units: by their outermost module.
        budget_bytes: of unsharded flat parameters; ``None``: all are kept.

    Raises:
        DivergenceError: ranks have other budgets.
    """
    if budget_bytes is None:
        return
    for group in next(iter(units.values())).config.groups.all:
        require_same(group, "argument 'unsharded_budget_bytes'", str(budget_bytes))
    left = budget_bytes
    for module in reversed([*root.modules()]):
        if module is root or module not in units:
            continue
        unit = units[module]
        resharding = _RESHARDING.get(unit.config.strategy)
        held = sum(flat.unsharded_bytes for flat in unit.flats)
        if resharding is None:  # it reshards, or is whole, as a policy says
            continue
        if held <= left:
            left -= held
        else:
            unit.config = replace(unit.config, strategy=resharding)
