"""A model's and its optimizers' tensors as what torch.distributed.checkpoint writes and reads.

What is written has the form of upstream's state dicts, ``{"model": {fqn: ...}, "optim": {"state":
{fqn: {...}}, "param_groups": [...]}}``, so FSDP2 and a plain model read it, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_dynamo.config import (
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import CheckpointError
from fsdp_dynamo.state_dict import optim_state
from fsdp_dynamo.state_dict.methods import state_dict_type, uncompiled

MODEL, OPTIM = "model", "optim"
_SHOWN = 3

Optimizers = Sequence[torch.optim.Optimizer]


_SETTINGS = StateDictSettings(
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(shares_memory=True),
    ShardedOptimStateDictConfig(shares_memory=True),
)


def _in_parts(model: nn.Module) -> AbstractContextManager[None]:
    """While open, state dicts are of parts; those of a model without units are what they are."""
    has_units = bool(units_in(model))
    form = (_SETTINGS.state_dict_type, _SETTINGS.state_dict_config)
    return state_dict_type(model, *form) if has_units else nullcontext()


def _model_state(model: nn.Module) -> dict[str, Any]:
    with _in_parts(model):
        state: dict[str, Any] = model.state_dict()
    return state


def to_save(
    model: nn.Module, optimizers: Optimizers, agree: optim_state.Agree
) -> tuple[dict[str, Any], dict[str, Any]]:
    """This rank's parts of all tensors, and what else is in the model's state dict (extra states).

    Args:
        agree: as for ``optim_state.save``, which alone would communicate.

    Raises:
        FSDPValueError: two optimizers have the same parameter, or a unit above the model holds one.
    """
    model = uncompiled(model)
    named = optim_state.named_places(model, units_in(model))
    found = _model_state(model)
    others = {k: v for k, v in found.items() if not isinstance(v, torch.Tensor)}
    state: dict[str, Any] = {MODEL: {k: v for k, v in found.items() if k not in others}}
    if optimizers:
        state[OPTIM] = optim_state.save_several(named, optimizers, _SETTINGS, agree)
    return state, others


def copied(value: Any) -> Any:
    """All tensors on the CPU, none of them shared with the training; other values as copies."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(copied(one) for one in value)
    return copy.deepcopy(value)


# -- loading -------------------------------------------------------------------------------------


def model_to_load(index: Metadata, others: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The model's own memory, for torch.distributed.checkpoint to fill.

    Args:
        others: what else is in the saved state dict (extra states).

    Raises:
        CheckpointError: the checkpoint is one of another model.
    """
    model = uncompiled(model)
    optim_state.named_places(model, units_in(model))
    state = _model_state(model)
    saved = {path[1]: index.state_dict_metadata[key] for key, path in _below(index, MODEL)}
    _require_same_keys({*saved, *others}, set(state), "state dict")
    for fqn, entry in saved.items():
        shape = entry.size if isinstance(entry, TensorStorageMetadata) else ()
        _require_shape(f"{MODEL}.{fqn}", shape, state[fqn])
    return {MODEL: {fqn: state[fqn] for fqn in saved}}


def optimizers_to_load(index: Metadata, model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """New memory for the states of optimizers, as the checkpoint has them; flat, with its keys.

    Nothing need exist in the optimizers.

    Raises:
        CheckpointError: the checkpoint has none, or of parameters that the optimizers lack.
    """
    if not optimizers:
        return {}
    model = uncompiled(model)
    named = optim_state.named_places(model, units_in(model))
    own = {place.fqn: place for one in optimizers for _, _, place in named.of(one)}
    entries = list(_below(index, OPTIM))
    if not entries:
        raise CheckpointError(
            expected="states of optimizers",
            got="none in the checkpoint",
            where="checkpoint",
            fix="Load without optimizers.",
        )
    saved = {path[2] for _, path in entries if path[1] == "state"}
    _require_same_keys(saved, set(own), "optimizers' parameters", may_lack=True)
    result: dict[str, Any] = {}
    for key, path in entries:
        entry = index.state_dict_metadata[key]
        result[key] = None
        if not isinstance(entry, TensorStorageMetadata):
            continue
        shape, dtype = tuple(entry.size), entry.properties.dtype
        if path[1] == "state" and len(path) == 4:
            result[key] = optim_state.empty_like_saved(own[path[2]], path[3], shape, dtype)
        else:  # within a list, or a learning rate
            result[key] = torch.empty(shape, dtype=dtype)
    return result


def _below(index: Metadata, top: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Keys and paths of what a checkpoint has below ``top``."""
    for key in index.state_dict_metadata:
        path = index.planner_data[key]
        if path[0] == top:
            yield key, path


def giver(
    state: Mapping[str, Any], index: Metadata, model: nn.Module, optimizers: Optimizers
) -> Callable[[], None]:
    """What gives the optimizers their states, once ``optimizers_to_load`` has been filled.

    Raises:
        FSDPValueError: their parameter groups are not those that were saved.
    """
    model = uncompiled(model)
    merged = unflatten_state_dict(dict(state), {key: index.planner_data[key] for key in state})
    named = optim_state.named_places(model, units_in(model))
    states = merged[OPTIM].get("state", {})
    ready = []
    for optimizer in optimizers:
        fqns = {place.fqn for _, _, place in named.of(optimizer)}
        own = {fqn: one for fqn, one in states.items() if fqn in fqns}
        given = {"state": own, "param_groups": merged[OPTIM]["param_groups"]}
        ready.append((optimizer, optim_state.load(named, optimizer, given, _SETTINGS)))

    def give() -> None:
        for optimizer, one in ready:
            optimizer.load_state_dict(one)

    return give


def take(state: Mapping[str, Any], others: Mapping[str, Any], model: nn.Module) -> None:
    """Give the model what was filled: parts are its own memory already, other values are not."""
    model = uncompiled(model)
    with _in_parts(model):
        model.load_state_dict({**state[MODEL], **others})


def _require_same_keys(
    saved: set[str], own: set[str], what: str, *, may_lack: bool = False
) -> None:
    unexpected, missing = saved - own, set() if may_lack else own - saved
    if unexpected or missing:
        raise CheckpointError(
            expected=f"a checkpoint of this model's {what}",
            got=" and ".join(
                f"{len(some)} that {what_is} ({_listed(some)})"
                for some, what_is in ((unexpected, "it lacks"), (missing, "are not saved"))
                if some
            ),
            where="checkpoint",
            fix="Build the model and the optimizers as they were when it was saved.",
        )


def _require_shape(key: str, saved: Iterable[int], own: object) -> None:
    shape = tuple(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
    if tuple(saved) != shape:
        raise CheckpointError(
            expected=f"shape {shape}, as the model has it",
            got=f"{tuple(saved)} in the checkpoint",
            where=f"'{key}'",
            fix="Build the model as it was when it was saved.",
        )


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    return ", ".join(f"'{name}'" for name in shown[:_SHOWN]) + more
