"""State dicts of units and optimizers by FSDP1's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import OptimizedModule

from fsdp_dynamo.api import (
    FullOptimStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    coerce_enum,
    settings_of,
)
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.state_dict import optim_state
from fsdp_dynamo.state_dict.conversion import broadcast_from_first
from fsdp_dynamo.state_dict.optim_state import copied


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Choose the form of the state dicts of all units in ``module``.

    Args:
        module: a unit, or a module that contains units.
        state_dict_type: the form.
        state_dict_config: options of that form's class; ``None``: defaults.
        optim_state_dict_config: options for optimizers; ``None``: defaults.

    Returns:
        The previous settings.

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
    """Return the settings of state dicts that all units in ``module`` share.

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
        "state_dict_type: expected units that all have the same settings, got "
        f"{f'{len(found)} different ones' if found else 'no unit'}. Set the type on the whole "
        "model."
    )


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Choose the form of state dicts inside the context; see ``set_state_dict_type``."""
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
    """Return the state of an optimizer with plain FQNs for keys; all ranks must call it.

    Its form is the model's ``state_dict_type``.

    Args:
        model: a unit, or a module that contains units.
        optim: an optimizer of parameters of ``model``.
        optim_state_dict: replaces ``optim.state_dict()``; it may lack ``"param_groups"``.
        group: ignored: the units' own groups are used.

    Returns:
        ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``. Entries of the
        state that belong to no parameter are copied.

    Raises:
        DivergenceError: ranks have states of different parameters, or a state that is neither
            placed as its parameter nor equal on all ranks.
        FSDPValueError: the optimizer has a parameter that the model lacks, or ``model`` is a
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
    """Convert a result of ``optim_state_dict`` to the argument of ``optim.load_state_dict``.

    A full state dict may come from any sharding, other forms only from this one. There is no
    communication, unless the model's ``FullOptimStateDictConfig`` has ``rank0_only``: then every
    rank must call it, and rank 0's state dict is broadcast.

    Args:
        model: a unit, or a module that contains units.
        optim: an optimizer of parameters of ``model``.
        optim_state_dict: in the form of the model's ``state_dict_type``; it may lack
            ``"param_groups"``.
        is_named_optimizer: keep names instead of numbers, for an optimizer that loads names.
        load_directly: also load the result into ``optim``.
        group: with ``rank0_only``, the group whose first rank has the states; default: the model's.

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
    """Return the model inside a compiled one, whose prefix is in no key."""
    inner: nn.Module = model._orig_mod if isinstance(model, OptimizedModule) else model
    return inner


# -- FSDP1's older names, one for each form and direction ------------------------------------------


_FULL, _SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
Given = Mapping[str, Any]
OptimInput = Iterable[Any] | None


class OptimStateKeyType(Enum):
    """Kind of key that stands for a parameter in an optimizer state dict.

    - ``PARAM_NAME``: its plain FQN.
    - ``PARAM_ID``: its number in the optimizer, as in ``optim.state_dict()``.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: OptimInput = None,
    rank0_only: bool = True,
    group: object = None,
) -> dict[str, Any]:
    """Return whole states on the CPU, on rank 0 alone (``{}`` elsewhere) or on all ranks.

    Args:
        model: the outermost unit.
        optim: an optimizer of its parameters.
        optim_input: ignored: ``optim`` has it.
        rank0_only: give other ranks an empty dict.
        group: ignored.

    Returns:
        States by plain FQN; see ``optim_state_dict``.
    """
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    with state_dict_type(model, _FULL, None, config):
        return optim_state_dict(model, optim)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: object = None
) -> dict[str, Any]:
    """Return this rank's parts, for torch.distributed.checkpoint; see ``full_optim_state_dict``."""
    with state_dict_type(model, _SHARDED):
        return optim_state_dict(model, optim)


def shard_full_optim_state_dict(
    full_optim_state_dict: Given,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert whole states, which every rank has, to the argument of ``optim.load_state_dict``.

    Args:
        full_optim_state_dict: states by plain FQN.
        model: the outermost unit.
        optim_input: argument of the optimizer's constructor, if ``optim`` is not given; default:
            ``model.parameters()``.
        optim: an optimizer of the model's parameters.

    Raises:
        FSDPValueError: see ``optim_state_dict_to_load``.
    """
    with state_dict_type(model, _FULL):
        if optim is not None:
            return optim_state_dict_to_load(model, optim, full_optim_state_dict)
        numbered = _optimizer(model, optim_input, None)
        states = {"state": full_optim_state_dict["state"]}
        result = optim_state_dict_to_load(model, numbered, states)
    ids = {name: number for number, name in enumerate(_names(model, numbered))}
    result["param_groups"] = _rekeyed_groups(full_optim_state_dict, ids.__getitem__)
    return result


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: Given, model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert this rank's parts to the argument of ``optim.load_state_dict``.

    They are the result of ``sharded_optim_state_dict``. For other arguments and errors
    see ``shard_full_optim_state_dict``.
    """
    with state_dict_type(model, _SHARDED):
        return optim_state_dict_to_load(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: Given | None,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Convert whole states, which rank 0 alone has, to the argument of ``optim.load_state_dict``.

    Every rank must call it. The first rank of ``group`` has the states; default: of the model's
    groups. For other arguments and errors see ``shard_full_optim_state_dict``.
    """
    groups = units_in(model)[0].config.groups.all if group is None else (group,)
    given = broadcast_from_first(full_optim_state_dict, groups)
    return shard_full_optim_state_dict(given, model, optim_input, optim)


def rekey_optim_state_dict(
    optim_state_dict: Given,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert whole states between keys by name and by number, also of a plain model.

    A plain optimizer can then load what a sharded one has saved: by number, as its own.

    Args:
        optim_state_dict: whole states, by plain FQN or by number.
        optim_state_key_type: kind of keys of the result; FSDP1's enum is accepted.
        model: owner of the parameters.
        optim_input: see ``shard_full_optim_state_dict``.
        optim: optimizer of ``model`` that defines the numbers.

    Returns:
        A new dict of the same states. In each group, parameters are sorted.

    Raises:
        FSDPValueError: a name or a number that the model or the optimizer does not have, or
            both kinds of keys.
    """
    wanted = coerce_enum(OptimStateKeyType, optim_state_key_type, "optim_state_key_type")
    names = _names(model, _optimizer(model, optim_input, optim))
    ids = {name: number for number, name in enumerate(names)}
    by_name = wanted is OptimStateKeyType.PARAM_NAME
    kinds = {type(key).__name__ for key in optim_state_dict["state"]}
    if len(kinds) > 1:
        raise _unknown_key(" and ".join(sorted(kinds)), "keys of one kind")
    known: Mapping[Any, Any] = dict(enumerate(names)) if by_name else ids

    def new(key: Any) -> Any:
        if key not in known:
            if key in (ids if by_name else range(len(names))):
                return key  # of the wanted kind already
            raise _unknown_key(repr(key), "a parameter of the model and its optimizer")
        return known[key]

    state = {new(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": state, "param_groups": _rekeyed_groups(optim_state_dict, new)}


def _rekeyed_groups(given: Given, new: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return copies of the groups with sorted new keys: optimizers match saved numbers by order."""
    return [
        {**copied(group, is_deep=True), "params": sorted(new(key) for key in group["params"])}
        for group in given["param_groups"]
    ]


def _unknown_key(got: str, expected: str) -> FSDPValueError:
    return FSDPValueError(
        f"optimizer state dict: expected {expected}, got {got}. Pass the model and the optimizer "
        "whose state it is."
    )


def _optimizer(
    model: nn.Module, optim_input: OptimInput, optim: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """Return the optimizer, or one that numbers the same parameters alike."""
    if optim is not None:
        return optim
    given = model.parameters() if optim_input is None else optim_input
    # Copies of groups: the optimizer writes its defaults into them.
    groups: Any = [dict(one) if isinstance(one, dict) else one for one in given]
    return torch.optim.SGD(groups)


def _names(model: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    by_param = {param: plain_fqn(name) for name, param in model.named_parameters()}
    return [by_param[param] for group in optim.param_groups for param in group["params"]]


__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "get_state_dict_type",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_state_dict_type",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
]
