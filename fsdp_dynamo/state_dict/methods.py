"""State dicts of the model's units and of optimizers, by upstream's names."""

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
    """Convert a result of ``optim_state_dict`` to what ``optim.load_state_dict`` takes.

    A full one may be of any sharding, the others of this one.

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


# -- optim variants --------------------------------------------------------------------------------
# Optimizer state dicts by upstream's older names, one for each form and direction.


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
    """Whole states on the CPU, on rank 0 alone (``{}`` elsewhere) or on all ranks.

    Args:
        model: the outermost unit.
        optim: made of its parameters.
        optim_input: accepted; ``optim`` says it.
        rank0_only: whether the other ranks get an empty one.
        group: accepted; nothing depends on it here.

    Returns:
        By plain FQN; see ``optim_state_dict``.
    """
    config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)
    with state_dict_type(model, _FULL, None, config):
        return optim_state_dict(model, optim)


def sharded_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, group: object = None
) -> dict[str, Any]:
    """This rank's parts, for torch.distributed.checkpoint.

    Args:
        model: the outermost unit.
        optim: made of its parameters.
        group: accepted; nothing depends on it here.

    Returns:
        By plain FQN; see ``optim_state_dict``.
    """
    with state_dict_type(model, _SHARDED):
        return optim_state_dict(model, optim)


def shard_full_optim_state_dict(
    full_optim_state_dict: Given,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """From whole states, which every rank has, to what ``optim.load_state_dict`` takes.

    Args:
        full_optim_state_dict: by plain FQN.
        model: the outermost unit.
        optim_input: what the optimizer was made of, where ``optim`` is not given; by default,
            ``model.parameters()``.
        optim: made of the model's parameters.

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
    """From this rank's parts to what ``optim.load_state_dict`` takes.

    Args:
        sharded_optim_state_dict: by plain FQN.
        model: the outermost unit.
        optim: made of its parameters.

    Raises:
        FSDPValueError: see ``optim_state_dict_to_load``.
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
    """From whole states, which rank 0 alone has, to what ``optim.load_state_dict`` takes.

    Every rank must call it.

    Args:
        full_optim_state_dict: by plain FQN; what other ranks than the first pass is ignored.
        model: the outermost unit.
        optim_input: see ``shard_full_optim_state_dict``.
        optim: made of the model's parameters.
        group: whose first rank has the states; by default, the model's.

    Raises:
        FSDPValueError: see ``optim_state_dict_to_load``.
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
    """Whole states by name instead of by number, or the other way; of a plain model, too.

    So a plain optimizer loads what a sharded one has saved: by number, as its own.

    Args:
        optim_state_dict: whole states, by plain FQN or by number.
        optim_state_key_type: what the result is to have; upstream's is accepted.
        model: whose parameters they are.
        optim_input: see ``shard_full_optim_state_dict``.
        optim: the optimizer of ``model`` whose numbers are meant.

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
                return key  # it is one already
            raise _unknown_key(repr(key), "a parameter of the model and its optimizer")
        return known[key]

    state = {new(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": state, "param_groups": _rekeyed_groups(optim_state_dict, new)}


def _rekeyed_groups(given: Given, new: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Groups with other keys, in order: an optimizer finds states of saved numbers by that."""
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
    """The optimizer, or one that numbers the same parameters as it does."""
    if optim is not None:
        return optim
    given = model.parameters() if optim_input is None else optim_input
    # Copies of groups: the optimizer writes its defaults into them.
    groups: Any = [dict(one) if isinstance(one, dict) else one for one in given]
    return torch.optim.SGD(groups)


def _names(model: nn.Module, optim: torch.optim.Optimizer) -> list[str]:
    """Plain FQNs of an optimizer's parameters, by number."""
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
