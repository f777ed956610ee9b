"""State dicts of the model's units and of optimizers, by upstream's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule

from fsdp_dynamo.config import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    settings_of,
)
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.state_dict import optim_state
from fsdp_dynamo.state_dict.broadcast import broadcast_from_first


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the form in which all units in ``module`` write their state dicts.

    Args:
        module: units, or a module that has them.
        state_dict_type: the form.
        state_dict_config: its options, of the class of that form; ``None``: their defaults.
        optim_state_dict_config: the same, for optimizers.

    Returns:
        What was chosen before.

    Raises:
        FSDPTypeError: a configuration of another form.
        FSDPStateError: units in ``module`` have different settings, or it has none.
    """
    before = get_state_dict_type(module)
    chosen = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
    for unit in units_in(module):
        unit.state_dict_settings = chosen
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The form in which the units in ``module`` write their state dicts.

    Raises:
        FSDPStateError: units in ``module`` have different settings, or it has none.
    """
    found: list[StateDictSettings] = []
    for unit in units_in(module):
        if unit.state_dict_settings not in found:
            found.append(unit.state_dict_settings)
    if len(found) == 1:
        return found[0]
    raise FSDPStateError(
        expected="units that all have the same settings",
        got=f"{len(found)} different ones" if found else "no unit",
        where="state_dict_type",
        fix="Set the type on the whole model.",
    )


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """``set_state_dict_type`` while open, with the same arguments and errors.

    Args:
        module: units, or a module that has them.
        state_dict_type: the form.
        state_dict_config: its options.
        optim_state_dict_config: its options for optimizers.
    """
    before = set_state_dict_type(
        module, state_dict_type, state_dict_config, optim_state_dict_config
    )
    try:
        yield
    finally:
        for unit in units_in(module):
            unit.state_dict_settings = before


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any] | None = None,
    group: object = None,
) -> dict[str, Any]:
    """The state of an optimizer of ``model`` with plain FQNs for keys; all ranks must call it.

    Its form is that of the model's ``state_dict_type``.

    Args:
        model: units, or a module that has them.
        optim: an optimizer of parameters of ``model``.
        optim_state_dict: in place of ``optim.state_dict()``; it may lack ``"param_groups"``.
        group: accepted; the units' own groups are used.

    Returns:
        ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. Entries of the
        state that belong to no parameter are copied.

    Raises:
        DivergenceError: ranks have states of different parameters, or one that is not as
            large as its parameter and not the same on all ranks.
        FSDPValueError: the optimizer has a parameter that the model has not, or ``model`` is a
            part of a unit.
    """
    settings = get_state_dict_type(model)
    named = optim_state.named_places(model, units_in(model))
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    return optim_state.save(named, optim, given, settings)


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: Mapping[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """From ``optim_state_dict`` of any sharding (full), or of this one, to what
    ``optim.load_state_dict`` takes.

    There is no communication, unless the model's ``FullOptimStateDictConfig`` has ``rank0_only``:
    then every rank must call it, and gets what rank 0 has.

    Args:
        model: units, or a module that has them.
        optim: an optimizer of parameters of ``model``.
        optim_state_dict: in the form of the model's ``state_dict_type``; it may lack
            ``"param_groups"``.
        is_named_optimizer: keep names instead of numbers, for an optimizer that loads these.
        load_directly: load the result into ``optim``, too.
        group: with ``rank0_only``, whose first rank has the states; by default, the model's.

    Returns:
        ``{"state": {number: {...}}, "param_groups": [...]}`` with this rank's parts.

    Raises:
        FSDPValueError: an FQN that the model does not have, a tensor of another shape, no
            ``"state"``, or parameter groups that cannot be told apart.
    """
    settings = get_state_dict_type(model)
    units = units_in(model)
    named = optim_state.named_places(model, units)
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        groups = units[0].config.groups.all if group is None else (group,)
        optim_state_dict = broadcast_from_first(optim_state_dict, groups)
    result = optim_state.load(named, optim, optim_state_dict, settings, is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside a compiled one, whose prefix is in no key."""
    inner: nn.Module = model._orig_mod if isinstance(model, OptimizedModule) else model
    return inner


__all__ = [
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "set_state_dict_type",
    "state_dict_type",
]
