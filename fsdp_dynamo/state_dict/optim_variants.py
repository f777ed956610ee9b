"""Optimizer state dicts by upstream's older names, one for each form and direction."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.config import FullOptimStateDictConfig, StateDictType
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.state_dict.broadcast import broadcast_from_first
from fsdp_dynamo.state_dict.methods import (
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)

_FULL, _SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
Given = Mapping[str, Any]


class OptimStateKeyType(Enum):
    """What stands for a parameter in an optimizer state dict.

    - ``PARAM_NAME``: its plain FQN.
    - ``PARAM_ID``: its number in the optimizer, as in ``optim.state_dict()``.
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: object = None,
    rank0_only: bool = True,
    group: object = None,
) -> dict[str, Any]:
    """Whole states on the CPU, on rank 0 alone (``{}`` elsewhere) or on all ranks.

    Args:
        model: the outermost unit.
        optim: made of its parameters.
        optim_input: accepted; nothing depends on it here.
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
    optim_input: object = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """From whole states, which every rank has, to what ``optim.load_state_dict`` takes.

    Args:
        full_optim_state_dict: by plain FQN.
        model: the outermost unit.
        optim_input: accepted; nothing depends on it here.
        optim: made of the model's parameters; needed.

    Raises:
        FSDPValueError: no ``optim``; else see ``optim_state_dict_to_load``.
    """
    with state_dict_type(model, _FULL):
        return optim_state_dict_to_load(model, _needed(optim), full_optim_state_dict)


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
    optim_input: object = None,
    optim: torch.optim.Optimizer | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """From whole states, which rank 0 alone has, to what ``optim.load_state_dict`` takes.

    Every rank must call it.

    Args:
        full_optim_state_dict: by plain FQN; what other ranks than the first pass is ignored.
        model: the outermost unit.
        optim_input: accepted; nothing depends on it here.
        optim: made of the model's parameters; needed.
        group: whose first rank has the states; the default group if not given.

    Raises:
        FSDPValueError: no ``optim``; else see ``optim_state_dict_to_load``.
    """
    given = broadcast_from_first(full_optim_state_dict, group)
    return shard_full_optim_state_dict(given, model, None, optim)


def rekey_optim_state_dict(
    optim_state_dict: Given,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: object = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Whole states by name instead of by number, or the other way; of a plain model, too.

    So a plain optimizer loads what a sharded one has saved: by number, as its own.

    Args:
        optim_state_dict: whole states, by plain FQN or by number.
        optim_state_key_type: what the result is to have.
        model: whose parameters they are.
        optim_input: accepted; nothing depends on it here.
        optim: the optimizer of ``model`` whose numbers are meant; by default, numbers are
            those of an optimizer of ``model.parameters()``.

    Raises:
        FSDPValueError: a name or a number that the model or the optimizer does not have.
    """
    names = _names(model, optim)
    ids = {name: number for number, name in enumerate(names)}
    by_name = optim_state_key_type is OptimStateKeyType.PARAM_NAME
    known: Mapping[Any, Any] = dict(enumerate(names)) if by_name else ids

    def new(key: Any) -> Any:
        if key not in known:
            if key in (ids if by_name else range(len(names))):
                return key  # it is one already
            raise FSDPValueError(
                expected="a parameter of the model and its optimizer",
                got=repr(key),
                where="optimizer state dict",
                fix="Pass the model and the optimizer whose state it is.",
            )
        return known[key]

    groups = [
        {**group, "params": [new(key) for key in group["params"]]}
        for group in optim_state_dict["param_groups"]
    ]
    state = {new(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def _needed(optim: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optim is None:
        raise FSDPValueError(
            expected="an optimizer",
            got="None",
            where="optim",
            fix="Pass optim; optim_input is not used here.",
        )
    return optim


def _names(model: nn.Module, optim: torch.optim.Optimizer | None) -> list[str]:
    """Plain FQNs of an optimizer's parameters, by number."""
    by_param = {param: plain_fqn(name) for name, param in model.named_parameters()}
    if optim is None:
        return list(by_param.values())
    return [by_param[param] for group in optim.param_groups for param in group["params"]]


__all__ = [
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]
