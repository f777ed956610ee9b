"""Support for our units in ``torch.distributed.checkpoint.state_dict``.

``get_state_dict``, ``set_state_dict`` and related functions know torch's own wrappers only. For any
other model they assume that optimizer states are unsharded, and would save one rank's elements as
the whole tensor. All of them use four internal functions, which this module replaces. The
replacements call torch's own function for a model without our units.

``DefaultLoadPlanner`` ignores values that a file has and the state dict lacks, such as states of
frozen parameters. Its set-up is replaced by one that raises.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from fsdp_dynamo.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from fsdp_dynamo.comm.process_groups import is_first_of
from fsdp_dynamo.core.dtensors import is_state_dict_value
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, UnsupportedError
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.state_dict import methods, optim_state
from fsdp_dynamo.state_dict.conversion import broadcast_from_first
from fsdp_dynamo.state_dict.methods import uncompiled

Optimizers = Sequence[torch.optim.Optimizer]


@contextmanager
def _configured(model: nn.Module, info: Any) -> Iterator[None]:
    """Inside the context, state dicts have the form that torch's ``StateDictOptions`` ask for."""
    to_cpu = info.cpu_offload
    form: Any = (
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=to_cpu, shares_memory=True),
        ShardedOptimStateDictConfig(offload_to_cpu=to_cpu, shares_memory=True),
    )
    if info.full_state_dict:
        form = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=to_cpu, rank0_only=to_cpu),
            FullOptimStateDictConfig(offload_to_cpu=to_cpu, rank0_only=to_cpu),
        )
    with methods.state_dict_type(model, *form):
        yield


def _model_state(model: nn.Module, info: Any) -> dict[str, Any]:
    if not info.handle_model:
        return {}
    with _configured(model, info):
        state: dict[str, Any] = model.state_dict()
    if info.full_state_dict and info.cpu_offload:  # including parameters that no unit holds
        state = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        if not _is_first(model):
            return {}
    if info.ignore_frozen_params:
        for name, param in model.named_parameters():
            if not param.requires_grad:
                state.pop(plain_fqn(name), None)
    prefixes = tuple(info.submodule_prefixes)
    if not prefixes:
        return state
    kept = {name: value for name, value in state.items() if name.startswith(prefixes)}
    if info.keep_submodule_prefixes:
        return kept
    longest = {name: max((p for p in prefixes if name.startswith(p)), key=len) for name in kept}
    return {name[len(longest[name]) :]: value for name, value in kept.items()}


def _load_model_state(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
    # Ranks that receive rank 0's values pass an empty dict, which torch reads as "optimizer only".
    given = _received(model, state_dict if info.handle_model else {}, info)
    if not given:
        return nn.Module().load_state_dict({})  # a report without missing or unexpected keys
    with _configured(model, info):
        return model.load_state_dict(given, strict=info.strict)


def _optim_state(model: nn.Module, optimizers: Optimizers, info: Any) -> dict[str, Any]:
    if not info.handle_optim:
        return {}
    named = optim_state.named_places(model, units_in(model))
    for optimizer in optimizers:
        _make_states(optimizer, named)
    with _configured(model, info):
        settings = methods.get_state_dict_type(model)
    merged = optim_state.save_several(named, optimizers, settings)
    if info.full_state_dict and info.cpu_offload and not _is_first(model):
        return {}
    if info.flatten_optimizer_state_dict:
        return flatten(merged)
    return merged


@contextmanager
def _first_states(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside the context, give an optimizer that has no states those of its first step."""
    if optimizer.state or _needs_closure(optimizer):
        yield
        return
    with _without_gradients(optimizer):  # torch makes no states if there are gradients
        try:
            torch_state_dict._init_optim_state(optimizer)
            yield
        finally:
            optimizer.state.clear()


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    try:
        for param in params:
            param.grad = None
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _make_states(optimizer: torch.optim.Optimizer, named: optim_state.NamedParams) -> None:
    """Give an optimizer without states those of its first step, to load into.

    Raises:
        FSDPStateError: it has gradients but no states; states made now would still be there at the
            step that uses these gradients.
        UnsupportedError: its step needs a closure.
    """
    if not optimizer.state and _needs_closure(optimizer):
        raise UnsupportedError(
            f"{type(optimizer).__name__}: expected an optimizer that has states or whose step() "
            "works without a closure, got no states and a step() that needs one. Load with "
            "fsdp_dynamo.checkpoint, or set a full state dict."
        )
    of_units = [place for _, _, place in named.of(optimizer) if place.flat is not None]
    with_grad = [place for place in of_units if place.param.grad is not None]
    if optimizer.state or not with_grad:
        # Parameters outside units do not count: they may have gradients on some ranks only.
        with _without_gradients(optimizer):
            torch_state_dict._init_optim_state(optimizer)
        return
    with _first_states(optimizer):
        if any(optimizer.state.values()):
            raise FSDPStateError(
                f"{type(optimizer).__name__}, parameter '{with_grad[0].fqn}': expected an "
                "optimizer that has made a step, or parameters without gradients, got gradients "
                "and no states: the state dict would lack the states. Call optimizer.zero_grad() "
                "or optimizer.step() first."
            )


def _load_optim_state(
    model: nn.Module, optimizers: Optimizers, state_dict: dict[str, Any], info: Any
) -> None:
    if not info.handle_optim:
        return
    given = _received(model, state_dict, info)
    named = optim_state.named_places(model, units_in(model))
    if "state" not in given:
        given = unflatten(given, {place.fqn for place in named.places.values()})
    with _configured(model, info):
        settings = methods.get_state_dict_type(model)
    ready = []
    for optimizer in optimizers:
        with _first_states(optimizer):
            if info.strict:
                _require_states(optimizer, given["state"], named)
            fqns = {place.fqn for _, _, place in named.of(optimizer)}
            own = {
                "state": {fqn: state for fqn, state in given["state"].items() if fqn in fqns},
                "param_groups": given["param_groups"],
            }
            allows_missing = not info.strict
            ready.append(
                optim_state.load(named, optimizer, own, settings, allows_missing=allows_missing)
            )
    for optimizer, loaded in zip(optimizers, ready, strict=True):
        optimizer.load_state_dict(loaded)


def _require_states(
    optimizer: torch.optim.Optimizer, states: dict[str, Any], named: optim_state.NamedParams
) -> None:
    """Raise, as torch does, if a checkpoint lacks the state of a trained parameter."""
    for _, _, place in named.of(optimizer):
        if optimizer.state.get(place.param) and place.fqn not in states:
            raise FSDPValueError(
                f"parameter '{place.fqn}': expected a state for every parameter that has one in "
                "the optimizer, got none in the checkpoint. Use StateDictOptions(strict=False) to "
                "start without it."
            )


def _received(model: nn.Module, state_dict: dict[str, Any], info: Any) -> dict[str, Any]:
    if not info.broadcast_from_rank0:
        return state_dict
    received: dict[str, Any] = broadcast_from_first(state_dict, _groups_of(model))
    return received


def _is_first(model: nn.Module) -> bool:
    return is_first_of(_groups_of(model))


def _groups_of(model: nn.Module) -> tuple[dist.ProcessGroup, ...]:
    units = units_in(model)
    if any(original.parallel for unit in units for original in unit.originals()):
        assert dist.group.WORLD is not None
        return (dist.group.WORLD,)
    return units[0].config.groups.all


def _replace(name: str, ours: Callable[..., Any]) -> None:
    original = getattr(torch_state_dict, name)

    @functools.wraps(original)
    def either(model: nn.Module, *arguments: Any, **named: Any) -> Any:
        inner = uncompiled(model)
        if units_in(inner):
            return ours(inner, *arguments, **named)
        return original(model, *arguments, **named)

    setattr(torch_state_dict, name, either)


_replace("_get_model_state_dict", _model_state)
_replace("_load_model_state_dict", _load_model_state)
_replace("_get_optim_state_dict", _optim_state)
_replace("_load_optim_state_dict", _load_optim_state)


def _require_all_states(template: Any, saved: Any) -> None:
    """Raise if a file has states that the template lacks, of a parameter in the template's groups.

    torch reads only the template's states. A parameter that is frozen when the template is made has
    none there, though the file may have some: the optimizer would go on without them.

    Args:
        template: nested dicts that torch reads into.
        saved: names in the file, nested as the template.
    """
    if not (isinstance(template, dict) and isinstance(saved, dict)):
        return
    for key, value in template.items():
        _require_all_states(value, saved.get(key))
    if fqns := fqns_of(template):
        template, saved = unflatten(template, fqns), unflatten(saved, fqns)
    states, groups = template.get("state"), template.get("param_groups")
    if not (isinstance(states, dict) and isinstance(groups, list)):
        return
    values = [v for state in states.values() if isinstance(state, dict) for v in state.values()]
    is_ours = any(map(is_state_dict_value, values))
    members = {fqn for group in groups if is_ours for fqn in group["params"]}
    for fqn, state in saved.get("state", {}).items():
        lost = set(state) - set(states.get(fqn, ())) if fqn in members else ()
        if lost:
            raise FSDPValueError(
                f"parameter '{fqn}': expected the optimizer's state dict to have all states in the "
                f"file, got none for {sorted(map(str, lost))}; the parameter may be frozen. Call "
                "requires_grad_(True) on it while the state dict is made, load with "
                "fsdp_dynamo.checkpoint, or pass DefaultLoadPlanner(allow_partial_load=True)."
            )


_set_up_planner = default_planner.DefaultLoadPlanner.set_up_planner


@functools.wraps(_set_up_planner)
def _set_up_for_ours(
    planner: Any, state_dict: Any, metadata: Any = None, is_coordinator: bool = False
) -> None:
    paths = getattr(metadata, "planner_data", None)
    if paths and not planner.allow_partial_load:
        _require_all_states(state_dict, unflatten_state_dict(dict.fromkeys(paths), paths))
    _set_up_planner(planner, state_dict, metadata, is_coordinator)


_planners: Any = default_planner.DefaultLoadPlanner
_planners.set_up_planner = _set_up_for_ours


# -- flattened -------------------------------------------------------------------------------------
# Optimizer state dicts with one key per value, for ``flatten_optimizer_state_dict=True``.
#
# The keys are torch's: ``state.FQN.NAME`` and, for each parameter, ``param_groups.FQN.SETTING``. So
# groups without parameters are left out.


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten ``{"state": {fqn: {...}}, "param_groups": [{"params": [fqn, ...], ...}]}``."""
    flat: dict[str, Any] = dict(_leaves("state", nested["state"]))
    for group in nested["param_groups"]:
        settings = {k: v for k, v in group.items() if k != "params"}
        for owner in group["params"]:
            flat.update({f"param_groups.{owner}.{name}": v for name, v in settings.items()})
    return flat


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield key, value
        return
    for name, one in value.items():
        yield from _leaves(f"{key}.{name}", one)


def unflatten(flat: Mapping[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """Nest a flat state dict, with one group per parameter.

    Keys of parameters not in ``fqns`` are dropped.
    """
    states: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        owner = _owner_of(rest, fqns)
        if owner is None:
            continue
        *outer, name = rest[len(owner) + 1 :].split(".")
        place = (states if kind == "state" else groups).setdefault(owner, {})
        for one in outer:
            place = place.setdefault(one, {})
        place[name] = value
    return {
        "state": states,
        "param_groups": [{**settings, "params": [owner]} for owner, settings in groups.items()],
    }


def fqns_of(flat: Mapping[Any, Any]) -> set[str]:
    """Return the parameters in the groups of a flat state dict; empty for any other dict."""
    groups = [str(key).partition(".") for key in flat]
    return {rest.rpartition(".")[0] for kind, _, rest in groups if kind == "param_groups"} - {""}


def _owner_of(key: str, fqns: Collection[str]) -> str | None:
    """Return the prefix of a key that is an FQN."""
    parts = key.split(".")
    prefixes = (".".join(parts[:number]) for number in range(1, len(parts)))
    return next((prefix for prefix in prefixes if prefix in fqns), None)
