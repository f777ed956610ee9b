"""Optimizer state dicts with the plain model's FQNs for keys.

An optimizer holds this rank's 1-D parts, by number. In a state dict a state as large as its
parameter is what the parameter would be: the whole tensor, or this rank's part of it. Others (step
counts, sums over rows of the whole parameter) stay as they are; they are the same on all ranks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from fsdp_dynamo.agreement.comparison import require_same
from fsdp_dynamo.config import StateDictSettings, StateDictType
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.state_dict.conversion import (
    gather_like,
    local_of,
    local_only,
    part_of,
    plain_local,
    whole_shape,
)
from fsdp_dynamo.state_dict.tensor_part import TensorPart

Agree = Callable[[Sequence[dist.ProcessGroup], str], None]

_WHERE = "optimizer state dict"
STATES = "optimizer states"
ALIKE = (
    "A state must be as large as this rank's part of its parameter, or the same on all ranks; "
    "any other goes into a LOCAL_STATE_DICT, which the same sharding loads."
)
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States of torch's optimizers that are numbers: of a parameter of one element nothing but the name
tells them from a state that is as large."""


@dataclass(frozen=True, eq=False)
class Place:
    """Where a parameter of the optimizer is in the model.

    Attributes:
        fqn: its plain FQN.
        param: the parameter.
        flat: the flat parameter that holds it; ``None``: no unit does.
        index: its position in there.
    """

    fqn: str
    param: nn.Parameter
    flat: FlatParameter | None = None
    index: int = 0


@dataclass(frozen=True)
class Named:
    """All parameters of a model: by object, and the flat parameters in order."""

    places: Mapping[nn.Parameter, Place]
    flats: Sequence[FlatParameter]

    def of(self, optim: torch.optim.Optimizer) -> Iterator[tuple[int, int, Place]]:
        """Group number, number among all parameters, and place of each one of the optimizer."""
        number = 0
        for group_number, group in enumerate(optim.param_groups):
            for param in group["params"]:
                if param not in self.places:
                    raise FSDPValueError(
                        expected="an optimizer of this model's parameters",
                        got=f"parameter {number}, which is none of them",
                        where=_WHERE,
                        fix="Pass the model whose parameters() the optimizer was given.",
                    )
                yield group_number, number, self.places[param]
                number += 1


def named_places(model: nn.Module, units: Sequence[Unit]) -> Named:
    """Find every parameter of a model under its plain FQN, tied ones under their first.

    Raises:
        FSDPValueError: a parameter is held by a unit that is not among ``units``.
    """
    for unit in units:
        unit.write_back()
    flats = [flat for unit in units for flat in unit.flats]
    held = {o.param: (flat, i) for flat in flats for i, o in enumerate(flat.originals)}
    places: dict[nn.Parameter, Place] = {}
    for name, param in model.named_parameters():
        if param not in held and owner_of(param) is not None:
            raise FSDPValueError(
                expected="a model with all units that hold its parameters",
                got="a part of one, whose parameter is held by a unit above it",
                where=f"parameter '{plain_fqn(name)}'",
                fix="Pass the whole wrapped model.",
            )
        places[param] = Place(plain_fqn(name), param, *held.get(param, ()))
    return Named(places, flats)


# -- saving --------------------------------------------------------------------------------------


def save(
    named: Named,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any],
    settings: StateDictSettings,
    agree: Agree | None = None,
) -> dict[str, Any]:
    """``given``, an ``optim.state_dict()``, under FQNs in the form of the settings.

    Args:
        agree: raises where ranks of the groups do not give the same text; by default they compare
            through their store.
    """
    agree = agree or _through_the_store
    places = list(named.of(optim))
    states = {place: given["state"].get(number, {}) for _, number, place in places}
    copies = settings.copies_optim
    to_cpu = settings.optim_state_dict_config.offload_to_cpu
    groups = [{**group, "params": []} for group in given["param_groups"]]
    if copies:  # a learning rate may be a tensor
        groups = [_copied(group) for group in groups]
    for group_number, _, place in places:
        groups[group_number]["params"].append(place.fqn)
    form = settings.state_dict_type
    if form is not StateDictType.LOCAL_STATE_DICT and named.flats:
        agree(named.flats[0].groups.all, _told_of(states))
    if form is StateDictType.FULL_STATE_DICT:
        return _full(named, states, groups, settings)
    result: dict[str, Any] = {}
    for place, state in states.items():
        if not state:
            continue
        one = {name: _part(place, value, form) for name, value in state.items()}
        result[place.fqn] = _copied(one, to_cpu) if copies else one
    return {"state": result, "param_groups": groups}


def save_several(
    named: Named,
    optimizers: Sequence[torch.optim.Optimizer],
    settings: StateDictSettings,
    agree: Agree | None = None,
) -> dict[str, Any]:
    """States of several optimizers in one state dict, as ``save`` gives them.

    Raises:
        FSDPValueError: two optimizers have the same parameter.
    """
    fqns = [place.fqn for optim in optimizers for _, _, place in named.of(optim)]
    twice = sorted(fqn for fqn, count in Counter(fqns).items() if count > 1)
    if twice:
        raise FSDPValueError(
            expected="each parameter in one optimizer",
            got=f"'{twice[0]}' in two",
            where=_WHERE,
            fix="Leave the parameter out of one of them, or save only one.",
        )
    result: dict[str, Any] = {"state": {}, "param_groups": []}
    for optim in optimizers:
        one = save(named, optim, optim.state_dict(), settings, agree)
        result["state"].update(one.get("state", {}))  # nothing where rank 0 alone has it
        result["param_groups"].extend(one.get("param_groups", []))
    return result


def _is_like_param(place: Place, value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == place.param.shape


def _part(place: Place, value: Any, form: StateDictType) -> Any:
    if place.flat is None:
        return value
    if form is StateDictType.LOCAL_STATE_DICT:
        return local_only(place.flat, value)
    return part_of(place.flat, place.index, value) if _is_like_param(place, value) else value


def _copied(value: Any, to_cpu: bool = False) -> Any:
    """The same with copies of all tensors in it."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu" if to_cpu else tensor.device, copy=True)

    return tree_map_only(torch.Tensor, copy, value)


def _full(
    named: Named,
    states: Mapping[Place, Mapping[str, Any]],
    groups: list[dict[str, Any]],
    settings: StateDictSettings,
) -> dict[str, Any]:
    """Whole states; one flat parameter's of one kind are gathered at a time."""
    config = settings.optim_state_dict_config
    by_index = {(p.flat, p.index): p for p in states if p.flat is not None}
    result: dict[str, dict[str, Any]] = {place.fqn: {} for place, state in states.items() if state}
    first = all(g.rank() == 0 for flat in named.flats[:1] for g in flat.groups.all)
    wanted = first or not getattr(config, "rank0_only", False)
    for flat in named.flats:
        members = [by_index.get((flat, i)) for i in range(len(flat.originals))]
        names = dict.fromkeys(n for m in members if m for n in states[m])
        for name in names:
            having = [m if m is not None and name in states[m] else None for m in members]
            values = [None if m is None else states[m][name] for m in having]
            for fqn, kept in _gathered(flat, having, values, wanted, config.offload_to_cpu):
                result[fqn][name] = kept
    for place, state in states.items():
        if place.flat is None and state and wanted:
            result[place.fqn] = _copied(dict(state), config.offload_to_cpu)
    return {"state": result, "param_groups": groups} if wanted else {}


def _gathered(
    flat: FlatParameter,
    members: Sequence[Place | None],
    values: Sequence[Any],
    wanted: bool,
    to_cpu: bool,
) -> Iterator[tuple[str, Any]]:
    """FQNs and whole states of one kind, as copies, where they are wanted.

    Args:
        members: of each original parameter, its place if it has such a state.
    """
    pairs = zip(members, values, strict=True)
    own = [v if m is not None and _is_like_param(m, v) else None for m, v in pairs]
    whole = gather_like(flat, own) if any(v is not None for v in own) else iter(own)
    for member, value, gathered in zip(members, values, whole, strict=True):
        if member is None or not wanted:
            continue
        yield member.fqn, _copied(value if gathered is None else gathered, to_cpu)


def _through_the_store(groups: Sequence[dist.ProcessGroup], text: str) -> None:
    for group in groups:
        require_same(group, STATES, text, fix=ALIKE)


def _told_of(states: Mapping[Place, Mapping[str, Any]]) -> str:
    """What all ranks must have in common: which states there are, and the content of those that are
    not as large as this rank's part of their parameter. Those mean something to another sharding
    only if they are the same everywhere."""
    numbers = _read_numbers(v for state in states.values() for v in state.values())
    return json.dumps(
        {p.fqn: {n: _told(p, s[n], numbers) for n in sorted(s)} for p, s in states.items()}
    )


def _read_numbers(values: Iterable[Any]) -> dict[int, float]:
    """Values of all tensors of one element, by ``id``: one copy from each device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for value in values:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            by_device.setdefault(value.device, []).append(value)
    result: dict[int, float] = {}
    for tensors in by_device.values():
        stacked = torch.stack([t.detach().reshape(()).to(torch.float64) for t in tensors])
        result.update(zip(map(id, tensors), stacked.tolist(), strict=True))
    return result


def _told(place: Place, value: Any, numbers: Mapping[int, float]) -> Any:
    """What other ranks are told of a state."""
    return "part" if _is_like_param(place, value) else _content(value, numbers)


def _content(value: Any, numbers: Mapping[int, float]) -> Any:
    """Text, or lists and dicts of it, which is another one for another value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return numbers[id(value)] if id(value) in numbers else float(value)
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{tuple(value.shape)} {zlib.crc32(content.numpy().tobytes()):08x}"
    if isinstance(value, Mapping):
        return {str(key): _content(one, numbers) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_content(one, numbers) for one in value]
    return repr(value)


# -- loading -------------------------------------------------------------------------------------


def load(
    named: Named,
    optim: torch.optim.Optimizer,
    given: Mapping[str, Any],
    settings: StateDictSettings,
) -> dict[str, Any]:
    """A state dict under FQNs as ``optim.load_state_dict`` takes it: numbers, this rank's parts."""
    is_local = settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    places = list(named.of(optim))
    known = {place.fqn for _, _, place in places}
    unknown = sorted(set(given["state"]) - known)
    if unknown:
        raise _wrong("FQNs of this optimizer's parameters", f"'{unknown[0]}'")
    state = {
        number: {
            name: _copied(plain_local(value))
            if is_local
            else _loaded(place, name, value, optim.state.get(place.param, {}), settings)
            for name, value in given["state"][place.fqn].items()
        }
        for _, number, place in places
        if place.fqn in given["state"]
    }
    return {"state": state, "param_groups": _groups(places, optim, given["param_groups"])}


def _loaded(
    place: Place, name: str, value: Any, own: Mapping[str, Any], settings: StateDictSettings
) -> Any:
    copies = settings.copies_optim
    if place.flat is not None and isinstance(value, torch.Tensor):
        is_part = _is_like_param(place, own.get(name)) and value.numel() > 1
        if is_part or _is_like_whole(place, name, tuple(value.shape)):
            copies = copies or not isinstance(value, TensorPart)  # the whole may go
            value = local_of(place.flat, place.index, value, f"{place.fqn}.{name}")
    return _copied(value) if copies else value


def _is_like_whole(place: Place, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a saved state is as large as its whole parameter."""
    if place.flat is None or shape != whole_shape(place.flat, place.index):
        return False
    return math.prod(shape) > 1 or name not in _NUMBERS


def empty_like_saved(
    place: Place, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Memory for a saved state: this rank's part of it if it is as large as its parameter.

    Args:
        place: of the parameter.
        name: of the state.
        shape, dtype: of the saved one, as a whole.
    """
    if place.flat is None or not _is_like_whole(place, name, shape):
        return torch.empty(shape, dtype=dtype)
    local = torch.empty_like(place.param, dtype=dtype, requires_grad=False)
    return part_of(place.flat, place.index, local.detach())


def _groups(
    places: Sequence[tuple[int, int, Place]],
    optim: torch.optim.Optimizer,
    saved: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The optimizer's groups with the saved settings of the group that held their parameters."""
    holder = {fqn: i for i, group in enumerate(saved) for fqn in group["params"]}
    result: list[dict[str, Any]] = []
    for group_number in range(len(optim.param_groups)):
        own = [(number, place.fqn) for g, number, place in places if g == group_number]
        sources = {holder.get(fqn) for _, fqn in own}
        settings = [
            {k: v for k, v in saved[i].items() if k != "params"} for i in sources if i is not None
        ]
        if None in sources or any(one != settings[0] for one in settings):
            names = [fqn for _, fqn in own]
            raise _wrong(
                "one saved group (or groups of equal settings) for each of the optimizer's",
                f"{len(settings)} for the group of '{names[0]}'",
            )
        own_settings = {k: v for k, v in optim.param_groups[group_number].items() if k != "params"}
        chosen = settings[0] if settings else own_settings  # of a group without parameters
        result.append({**chosen, "params": [number for number, _ in own]})
    return result


def _wrong(expected: str, got: str) -> FSDPValueError:
    return FSDPValueError(
        expected=expected,
        got=got,
        where=_WHERE,
        fix="Load what FSDP.optim_state_dict() gave of the same model and optimizer.",
    )
