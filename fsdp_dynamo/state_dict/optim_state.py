"""Optimizer state dicts with the plain model's FQNs for keys.

An optimizer holds DTensors, by number. A state placed as its parameter is saved as the parameter
is: unsharded, as a DTensor, or as this rank's part. All other states (step counts, row sums of the
unsharded parameter) are saved unchanged, and are the same on all ranks.
"""

from __future__ import annotations

import copy
import json
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from fsdp_dynamo.api import StateDictSettings, StateDictType
from fsdp_dynamo.comm.process_groups import is_first_of
from fsdp_dynamo.core.dtensors import local_of, mark_copy
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.optimizers import SCALAR_STATES
from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.state_dict.conversion import (
    as_value,
    extract_local,
    from_rank_local,
    gather_states,
    mark_rank_local,
    whole_tensor,
)

Compare = Callable[[Sequence[dist.ProcessGroup], str], None]
"""Function that raises if ranks of one of the groups have different texts."""

_WHERE = "optimizer state dict"
STATES_NAME = "optimizer states"
SAME_STATES_FIX = (
    "A state must be a DTensor that is placed as its parameter, or the same on all ranks; "
    "save others in a LOCAL_STATE_DICT, which only the same sharding can load."
)


@dataclass(frozen=True, eq=False)
class ParamPlace:
    """Place of an optimizer's parameter; ``flat`` holds it, ``None`` if no unit does."""

    fqn: str
    param: nn.Parameter
    flat: FlatParameter | None = None
    index: int = 0


@dataclass(frozen=True)
class NamedParams:
    """All parameters of a model, and its flat parameters in order."""

    places: Mapping[nn.Parameter, ParamPlace]
    flats: Sequence[FlatParameter]

    def of(self, optim: torch.optim.Optimizer) -> Iterator[tuple[int, int, ParamPlace]]:
        """Yield group number, overall number and place of each optimizer parameter."""
        number = 0
        for group_number, group in enumerate(optim.param_groups):
            for param in group["params"]:
                if param not in self.places:
                    raise FSDPValueError(
                        f"{_WHERE}: expected an optimizer of this model's parameters, got "
                        f"parameter {number}, which the model does not have. Pass the model whose "
                        "parameters() the optimizer was given."
                    )
                yield group_number, number, self.places[param]
                number += 1


def named_places(model: nn.Module, units: Sequence[Unit]) -> NamedParams:
    """Find every parameter under its first plain FQN; raise if an unknown unit holds one."""
    for unit in units:
        unit.write_back()
    flats = [flat for unit in units for flat in unit.flats]
    held = {o.param: (flat, i) for flat in flats for i, o in enumerate(flat.originals)}
    places: dict[nn.Parameter, ParamPlace] = {}
    for name, param in model.named_parameters():
        if param not in held and owner_of(param) is not None:
            raise FSDPValueError(
                f"parameter '{plain_fqn(name)}': expected a model with all units that hold its "
                "parameters, got a submodule whose parameter is held by a unit above it. Pass the "
                "whole wrapped model."
            )
        places[param] = ParamPlace(plain_fqn(name), param, *held.get(param, ()))
    return NamedParams(places, flats)


# -- saving --------------------------------------------------------------------------------------


def _compare_ranks(groups: Sequence[dist.ProcessGroup], text: str) -> None:
    for group in groups:
        require_same(group, STATES_NAME, text, fix=SAME_STATES_FIX)


def save(
    named: NamedParams,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any],
    settings: StateDictSettings,
    compare: Compare = _compare_ranks,
) -> dict[str, Any]:
    """Convert ``given``, an ``optim.state_dict()``, to FQNs and the form of the settings.

    ``compare`` compares units' states that must be equal on all ranks.
    """
    places = list(named.of(optim))
    states = {place: _state_of(given, number, place) for _, number, place in places}
    form = settings.state_dict_type
    if form is not StateDictType.LOCAL_STATE_DICT:
        for groups, shared in _states_by_groups(named, states).items():
            compare(groups, _comparison_text(shared))
    if form is StateDictType.FULL_STATE_DICT:
        result = _full_state(named, states, settings)
        if result is None:
            return {}
    else:
        result = _states_by_rank(states, settings)
    result.update(_states_of_no_parameter(given, places, settings))
    if "param_groups" not in given:
        return {"state": result}
    return {"state": result, "param_groups": _groups_to_save(places, given, settings)}


def _state_of(given: Mapping[str, Any], number: int, place: ParamPlace) -> Mapping[str, Any]:
    states = given["state"]
    found: Mapping[str, Any] = states[number] if number in states else states.get(place.fqn, {})
    return found


def _groups_to_save(
    places: Sequence[tuple[int, int, ParamPlace]],
    given: Mapping[str, Any],
    settings: StateDictSettings,
) -> list[dict[str, Any]]:
    groups = [{**group, "params": []} for group in given["param_groups"]]
    if settings.copies_optim:  # including learning rates, which may be tensors
        groups = [copied(group) for group in groups]
    for group_number, _, place in places:
        groups[group_number]["params"].append(place.fqn)
    return groups


def _states_by_rank(
    states: Mapping[ParamPlace, Mapping[str, Any]], settings: StateDictSettings
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    to_cpu = settings.optim_state_dict_config.offload_to_cpu
    for place, state in states.items():
        if state:
            form = settings.state_dict_type
            one = {name: _value_to_save(place, value, form) for name, value in state.items()}
            result[place.fqn] = copied(one, to_cpu) if settings.copies_optim else one
    return result


def _states_of_no_parameter(
    given: Mapping[str, Any],
    places: Sequence[tuple[int, int, ParamPlace]],
    settings: StateDictSettings,
) -> dict[Any, Any]:
    """Return entries that users have added beside those of parameters, unchanged."""
    known = {key for _, number, place in places for key in (number, place.fqn)}
    others = {key: value for key, value in given["state"].items() if key not in known}
    if others:
        warnings.warn(f"{_WHERE}: no parameter has {sorted(others, key=str)}", stacklevel=4)
    to_cpu = settings.optim_state_dict_config.offload_to_cpu
    return copied(others, to_cpu) if settings.copies_optim else others  # type: ignore[no-any-return]


def save_several(
    named: NamedParams,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: StateDictSettings,
    compare: Compare = _compare_ranks,
) -> dict[str, Any]:
    """Save several optimizers in one state dict; raise if two have the same parameter."""
    fqns = [place.fqn for optim in optimizers for _, _, place in named.of(optim)]
    twice = sorted(fqn for fqn, count in Counter(fqns).items() if count > 1)
    if twice:
        raise FSDPValueError(
            f"{_WHERE}: expected each parameter in one optimizer, got '{twice[0]}' in two. Leave "
            "the parameter out of one of them, or save only one."
        )
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optim in optimizers:
        one = save(named, optim, optim.state_dict(), settings, compare)
        result["state"].update(one.get("state", {}))  # missing if only rank 0 has it
        result["param_groups"].extend(one.get("param_groups", []))
    return result


def _is_like_param(place: ParamPlace, value: object) -> bool:
    if place.flat is None:
        return isinstance(value, torch.Tensor) and value.shape == place.param.shape
    placing = place.flat.originals[place.index].placing
    return isinstance(value, DTensor) and placing.holds(value)


def _value_to_save(place: ParamPlace, value: Any, form: StateDictType) -> Any:
    if place.flat is None:
        return value
    if form is StateDictType.LOCAL_STATE_DICT:
        return mark_rank_local(place.flat, tree_map(local_of, value))
    return as_value(place.flat, place.index, value) if _is_like_param(place, value) else value


def copied(value: Any, to_cpu: bool = False, *, is_deep: bool = False) -> Any:
    """Copy a nested value's tensors; with ``is_deep``, its other values too."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            own = leaf.detach().to("cpu" if to_cpu else leaf.device, copy=True)
            return mark_copy(own, leaf)
        return copy.deepcopy(leaf) if is_deep else leaf

    return tree_map(copy_leaf, value)


def _full_state(
    named: NamedParams,
    states: Mapping[ParamPlace, Mapping[str, Any]],
    settings: StateDictSettings,
) -> dict[str, Any] | None:
    """Gather unsharded states, one flat parameter, name and dtype at a time.

    Returns ``None`` on ranks that are to have no states.
    """
    config = settings.optim_state_dict_config
    to_cpu = config.offload_to_cpu
    by_index = {(p.flat, p.index): p for p in states if p.flat is not None}
    result: dict[str, dict[str, Any]] = {place.fqn: {} for place, state in states.items() if state}
    first = is_first_of(group for flat in named.flats[:1] for group in flat.groups.all)
    wanted = first or not getattr(config, "rank0_only", False)
    for flat in named.flats:
        members = [by_index.get((flat, i)) for i in range(len(flat.originals))]
        names = dict.fromkeys(n for m in members if m for n in states[m])
        for name in names:
            having = {i: m for i, m in enumerate(members) if m is not None and name in states[m]}
            values = {number: states[m][name] for number, m in having.items()}
            parts = {n: v for n, v in values.items() if _is_like_param(having[n], v)}
            # A comprehension: a loop variable would keep this buffer while the next is gathered.
            whole = {n: copied(v, to_cpu) for n, v in gather_states(flat, parts) if wanted}
            for number, value in values.items() if wanted else ():
                kept = whole[number] if number in whole else copied(value, to_cpu)
                result[having[number].fqn][name] = kept
    for place, state in states.items():
        if place.flat is None and state and wanted:
            result[place.fqn] = copied(dict(state), to_cpu)
    return result if wanted else None


def _states_by_groups(
    named: NamedParams, states: Mapping[ParamPlace, Mapping[str, Any]]
) -> dict[tuple[dist.ProcessGroup, ...], dict[ParamPlace, Mapping[str, Any]]]:
    """Group the states of units by the groups that share them, in an order equal on all ranks."""
    result: dict[Any, dict[ParamPlace, Mapping[str, Any]]] = {
        flat.groups.all: {} for flat in named.flats
    }
    for place, state in states.items():
        if place.flat is not None:
            result[place.flat.groups.all][place] = state
    return result


def _comparison_text(states: Mapping[ParamPlace, Mapping[str, Any]]) -> str:
    """Canonical JSON text that must be equal on all ranks.

    It contains the names of all states, the dtypes of this rank's parts, and fingerprints of all
    other states: another sharding can use these only if they are the same on all ranks.
    """
    numbers = _scalar_values(v for state in states.values() for v in state.values())

    def comparable(place: ParamPlace, value: Any) -> Any:
        is_part = _is_like_param(place, value)
        return f"part of {value.dtype}" if is_part else _fingerprint(value, numbers)

    compared = {
        p.fqn: {name: comparable(p, value) for name, value in s.items()} for p, s in states.items()
    }
    return json.dumps(compared, sort_keys=True)


def _scalar_values(values: Iterable[Any]) -> dict[int, float]:
    """Read all one-element tensors with one copy per device; keyed by ``id``."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, DTensor):
            continue  # a parameter of one element
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            by_device.setdefault(value.device, []).append(value)
    result: dict[int, float] = {}
    for tensors in by_device.values():
        stacked = torch.stack([t.detach().reshape(()).to(torch.float64) for t in tensors])
        result.update(zip(map(id, tensors), stacked.tolist(), strict=True))
    return result


def _fingerprint(value: Any, numbers: Mapping[int, float]) -> Any:
    if isinstance(value, DTensor):
        raise UnsupportedError(
            f"{_WHERE}: expected states that are placed as the parameter, or plain tensors, got a "
            f"DTensor of shape {tuple(value.shape)}, {value.placements}. Save "
            "optimizer.state_dict() of each rank, for as many ranks; or let the optimizer keep "
            "full_tensor() of such a state."
        )
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return numbers[id(value)] if id(value) in numbers else float(value)
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{tuple(value.shape)} {zlib.crc32(content.numpy().tobytes()):08x}"
    if isinstance(value, Mapping):
        return {str(key): _fingerprint(one, numbers) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_fingerprint(one, numbers) for one in value]
    return repr(value)


# -- loading -------------------------------------------------------------------------------------


def load(
    named: NamedParams,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any],
    settings: StateDictSettings,
    is_named: bool = False,
    *,
    allows_missing: bool = False,
) -> dict[str, Any]:
    """Convert a state dict under FQNs to the argument of ``optim.load_state_dict``.

    ``is_named`` keeps FQNs instead of numbers. ``allows_missing`` accepts parameters that are in no
    saved group.
    """
    if "state" not in given:
        raise _mismatch_error("a state dict with 'state'", f"{sorted(map(str, given))}")
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    places = list(named.of(optim))
    keys = {place.fqn: place.fqn if is_named else number for _, number, place in places}
    others = {key: value for key, value in given["state"].items() if key not in keys}
    unknown = [key for key, value in others.items() if isinstance(value, Mapping)]
    if unknown:
        raise _mismatch_error("FQNs of this optimizer's parameters", f"'{unknown[0]}'")
    state: dict[Any, Any] = {
        keys[place.fqn]: {
            name: copied(from_rank_local(place.flat, place.index, value))
            if is_local and place.flat is not None
            else _loaded(place, name, value, optim.state.get(place.param, {}), settings)
            for name, value in given["state"][place.fqn].items()
        }
        # Sorted: ranks may gather values, so all need one order.
        for place in sorted((place for _, _, place in places), key=lambda place: place.fqn)
        if place.fqn in given["state"]
    }
    result: dict[str, Any] = {"state": {**state, **copied(others)}}
    if "param_groups" in given:
        saved = given["param_groups"]
        result["param_groups"] = _groups(places, keys, optim, saved, allows_missing)
    return result


def _loaded(
    place: ParamPlace, name: str, value: Any, own: Mapping[str, Any], settings: StateDictSettings
) -> Any:
    copies = settings.copies_optim
    value = value if isinstance(value, DTensor) else whole_tensor(value)
    if place.flat is not None and isinstance(value, torch.Tensor):
        is_part = _is_like_param(place, own.get(name)) and value.numel() > 1
        if is_part or _is_like_whole(place, name, tuple(value.shape)):
            placing = place.flat.originals[place.index].placing
            # The part may be a view: without a copy it would keep the whole tensor alive.
            copies = copies or not (isinstance(value, DTensor) and placing.holds(value))
            part = extract_local(place.flat, place.index, value, f"{place.fqn}.{name}")
            return copied(part) if copies else part
    value = whole_tensor(value)
    return copied(value) if copies else value


def _is_like_whole(place: ParamPlace, name: str, shape: tuple[int, ...]) -> bool:
    if place.flat is None or shape != place.flat.originals[place.index].placing.shape:
        return False
    return math.prod(shape) > 1 or name not in SCALAR_STATES


def empty_like_saved(
    place: ParamPlace, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Allocate a saved state, or this rank's part if it has the shape of its parameter."""
    if place.flat is None or not _is_like_whole(place, name, shape):
        return torch.empty(shape, dtype=dtype)
    local = torch.empty_like(place.param, dtype=dtype, requires_grad=False)
    return as_value(place.flat, place.index, local.detach())


def _groups(
    places: Sequence[tuple[int, int, ParamPlace]],
    keys: Mapping[str, str | int],
    optim: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, Any]],
    allows_missing: bool,
) -> list[dict[str, Any]]:
    fqns: list[list[str]] = [[] for _ in optim.param_groups]
    for group_number, _, place in places:
        fqns[group_number].append(place.fqn)
    settings = [_settings(group) for group in saved]
    are_saved = {fqn for group in saved for fqn in group["params"]}
    looked_up = [[f for f in own if f in are_saved or not allows_missing] for own in fqns]
    sources = _sources(looked_up, saved, settings)
    result: list[dict[str, Any]] = []
    for own, group, source in zip(fqns, optim.param_groups, sources, strict=True):
        chosen = _settings(group) if source is None else settings[source]
        names = {"param_names": group["param_names"]} if "param_names" in group else {}
        result.append({**chosen, **names, "params": [keys[fqn] for fqn in own]})
    return result


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters and their names, which are the optimizer's own."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _sources(
    fqns: Sequence[Sequence[str]],
    saved: Sequence[Mapping[str, Any]],
    settings: Sequence[Mapping[str, Any]],
) -> list[int | None]:
    """Return, for each of the optimizer's groups, the number of the saved group with its settings.

    It is the saved group that contains its parameters; ``None`` for a group without parameters,
    which keeps its own settings. ``saved`` may contain groups of other optimizers.

    Raises:
        FSDPValueError: a parameter is in no saved group, or settings do not belong to one group.
    """
    holder = {fqn: i for i, group in enumerate(saved) for fqn in group["params"]}
    for fqn in (fqn for own in fqns for fqn in own if fqn not in holder):
        raise _mismatch_error(f"a saved group with parameter '{fqn}'", "none")
    sources = [holder[own[0]] if own else None for own in fqns]
    for fqn, source in ((fqn, s) for own, s in zip(fqns, sources, strict=True) for fqn in own):
        if source is not None and settings[holder[fqn]] != settings[source]:
            raise _mismatch_error(
                "one saved group (or groups of equal settings) for each of the optimizer's",
                f"other settings for '{fqn}' than for its group's first parameter",
            )
    return sources


def _mismatch_error(expected: str, got: str) -> FSDPValueError:
    return FSDPValueError(
        f"{_WHERE}: expected {expected}, got {got}. Load a result of FSDP.optim_state_dict() for "
        "the same model and optimizer."
    )
