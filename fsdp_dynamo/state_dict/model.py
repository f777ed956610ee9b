"""Model state dicts through module hooks, with plain FQNs.

Saving: torch's code writes local parameters under wrapped names. The post-hook replaces them by
values of the chosen form under plain names; for full state dicts it gathers each flat parameter
once, in its original dtype. Loading: the pre-hook cuts this rank's part out of each value, without
communication, and torch's code copies it in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import is_tensor_like

from fsdp_dynamo.api import StateDictConfig, StateDictSettings, StateDictType
from fsdp_dynamo.comm.process_groups import Groups, is_first_of
from fsdp_dynamo.comm.watchdog import raise_if_failed
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.unit import Unit, UnitState
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, UnsupportedError
from fsdp_dynamo.module_tree import (
    COMPILED,
    join_fqn,
    plain_fqn,
    without_wrapper_names,
)
from fsdp_dynamo.state_dict.conversion import (
    as_value,
    extract_local,
    from_rank_local,
    gather_params,
    mark_rank_local,
)


def plain_names_after_save(state_dict: dict[str, Any], prefix: str, new_prefix: str) -> None:
    """Rename all keys below ``prefix`` to ``new_prefix`` and plain FQNs, keeping the order.

    When a module's hook runs, the entries of its children are at the end of the dict.
    """
    tail: list[str] = []
    for key in reversed(state_dict):
        if not key.startswith(prefix):
            break
        tail.append(key)
    for key in reversed(tail):
        state_dict[new_prefix + plain_fqn(key[len(prefix) :])] = state_dict.pop(key)


def save_unit(
    unit: Unit,
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    is_root: bool,
    buffer_dtypes: Mapping[str, torch.dtype],
) -> None:
    """Replace a unit's local parameters by values of the chosen form, under plain names.

    ``module`` is the saved module of the unit. For the root, names that ``torch.compile`` has
    inserted are removed from ``prefix`` too. Buffers get back their dtypes before mixed precision.

    Raises:
        DivergenceError: collectives were aborted, so a step may have used what they did not bring.
        FSDPStateError: called within a step.
    """
    raise_if_failed()
    if unit.machine.state is not UnitState.IDLE and not unit.is_summoned:
        raise FSDPStateError(
            f"unit '{unit.fqn}': expected state_dict() between two steps, got a call in state "
            f"{unit.machine.state.name}. Call it before the forward or after the backward."
        )
    base = _plain_prefix(prefix) if is_root else prefix
    plain_names_after_save(state_dict, prefix, base)
    for fqn, dtype in buffer_dtypes.items():
        if base + fqn in state_dict:
            state_dict[base + fqn] = state_dict[base + fqn].to(dtype)
    if unit.is_summoned:  # the parameters are unsharded already (perhaps only on rank 0)
        return
    settings = unit.state_dict_settings
    unit.check_late_parameters()
    unit.write_back()
    for flat in unit.flats:
        values = _values(flat, settings.state_dict_type)
        for original in flat.originals:
            value = _value_to_keep(next(values), flat, settings)
            for _, _, fqn in original.sites:
                name = unit.below(module, fqn)
                if name is not None and base + name in state_dict:
                    state_dict[base + name] = value


def _value_to_keep(value: torch.Tensor, flat: FlatParameter, settings: StateDictSettings) -> Any:
    config = settings.state_dict_config
    if _is_omitted(flat.groups, config):
        return None
    if config.offload_to_cpu:
        return value.to("cpu", copy=True)
    return value.clone() if settings.copies_model else value


def _is_omitted(groups: Groups, config: StateDictConfig) -> bool:
    first_only = getattr(config, "rank0_only", False)
    return first_only and not is_first_of(groups.all)


def finish_save(units: Sequence[Unit], state_dict: dict[str, Any], prefix: str) -> None:
    """Apply the settings to values that no unit holds (buffers, ignored parameters)."""
    root = units[0]
    if root.is_summoned:
        return
    config = root.state_dict_settings.state_dict_config
    left_out = _is_omitted(root.config.groups, config)
    if not (left_out or config.offload_to_cpu):
        return
    base = _plain_prefix(prefix)
    sites = [(unit, site) for unit in units for o in unit.originals() for *_, site in o.sites]
    held = {base + unit.paths.fqn_of(site) for unit, site in sites}
    for key in [key for key in state_dict if key.startswith(base)]:
        if left_out:
            del state_dict[key]
        elif key not in held and isinstance(state_dict[key], torch.Tensor):
            state_dict[key] = state_dict[key].to("cpu", copy=True)


def _values(flat: FlatParameter, form: StateDictType) -> Iterator[torch.Tensor]:
    if form is StateDictType.FULL_STATE_DICT:
        return gather_params(flat)
    if form is StateDictType.LOCAL_STATE_DICT:
        return (mark_rank_local(flat, original.part) for original in flat.originals)
    return (as_value(flat, i, original.part) for i, original in enumerate(flat.originals))


def _plain_prefix(prefix: str) -> str:
    name = plain_fqn(prefix.rstrip("."))
    return f"{name}." if name else ""


def load_unit(
    unit: Unit, module: nn.Module, state_dict: dict[str, Any], prefix: str
) -> dict[str, str]:
    """Replace values by this rank's part of them, for torch's code to load; return keys by FQN.

    Inside ``summon_full_params`` parameters take whole values.
    """
    is_local = unit.state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    keys = {plain_fqn(key[len(prefix) :]): key for key in state_dict if key.startswith(prefix)}
    _refuse_flat_parameters(keys.values())
    for flat in unit.flats:
        is_whole = flat.module_parameters.is_whole
        for index, original in enumerate(() if is_whole else flat.originals):
            for _, _, fqn in original.sites:
                name = unit.below(module, fqn)
                key = None if name is None else keys.get(name)
                if key is None:
                    continue
                value = state_dict[key]
                state_dict[key] = (
                    from_rank_local(flat, index, value)
                    if is_local
                    else extract_local(flat, index, value, plain_fqn(key))
                )
    return keys


def materialize(
    unit: Unit,
    module: nn.Module,
    modules: Iterable[tuple[str, nn.Module]],
    state_dict: dict[str, Any],
    keys: Mapping[str, str],
) -> None:
    """Materialize parameters and buffers on the meta device for which there are values.

    ``modules`` are those below ``module``, with FQNs; ``keys`` are the state dict's, by plain FQN.
    """
    given = {fqn for fqn, key in keys.items() if not getattr(state_dict[key], "is_meta", True)}
    unit.materialize(module, given)
    for prefix, holder in modules:
        for name, buffer in holder._buffers.items():
            if buffer is not None and buffer.is_meta and join_fqn(prefix, name) in given:
                device = unit.flats[0].device if unit.flats else None
                holder._buffers[name] = torch.empty_like(buffer, device=device or "cpu")


@torch.no_grad()
def assign_in_place(
    modules: Iterable[tuple[str, nn.Module]],
    state_dict: dict[str, Any],
    keys: Mapping[str, str],
    buffer_dtypes: Mapping[str, torch.dtype],
) -> None:
    """Copy values for ``assign=True``, and let torch's code assign parameters to themselves.

    Parameters must stay the same objects: they are views of the shard, and optimizers hold them.
    Values of another shape are left to torch's code, which reports them.

    Raises:
        FSDPValueError: a value has another dtype, or is on the meta device.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for fqn, tensor in _tensors_of(modules):
        key = keys.get(fqn)
        value: Any = None if key is None else state_dict[key]
        if key is None or not is_tensor_like(value) or value.shape != tensor.shape:
            continue
        value = torch.detach(value)  # also loads a value whose file is read lazily
        dtype = buffer_dtypes.get(fqn, tensor.dtype)
        if value.dtype != dtype or value.is_meta:
            raise FSDPValueError(
                f"key '{plain_fqn(key)}': expected a value of {dtype} for load_state_dict(..., "
                f"assign=True), got {value.dtype} on the {value.device} device. Leave assign out "
                "to cast values, or convert the model first (model.to(dtype)): its parameters take "
                "values, not dtypes."
            )
        if isinstance(tensor, nn.Parameter):
            copies.append((tensor, value))
            state_dict[key] = tensor
        else:
            state_dict[key] = value.to(tensor.device, tensor.dtype)
    for param, value in copies:
        param.copy_(value)


def _tensors_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every parameter and buffer with its FQN, tied ones at every place."""
    for prefix, module in modules:
        for name, tensor in (
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ):
            yield join_fqn(prefix, name), tensor


def _refuse_flat_parameters(keys: Iterable[str]) -> None:
    """Raise for keys of flat parameters, which FSDP1's local state dicts contain."""
    for key in keys:
        if key.rpartition(".")[2] == "_flat_param":
            raise UnsupportedError(
                f"key '{key}': expected a state dict by parameter, got a LOCAL_STATE_DICT of "
                "FSDP1, whose values are its flat parameters. Load it with FSDP1 once and save a "
                "FULL_STATE_DICT or SHARDED_STATE_DICT, which load here."
            )


def drop_compiled_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    """Remove the name that ``torch.compile`` puts first from the keys below ``prefix``."""
    named = f"{prefix}{COMPILED}."
    for key in [key for key in state_dict if key.startswith(named)]:
        state_dict[prefix + key[len(named) :]] = state_dict.pop(key)


def plain_names_before_load(state_dict: dict[str, Any], prefix: str, inserted: str) -> None:
    """Insert ``inserted`` into the keys below ``prefix`` that lack it."""
    for key in [k for k in state_dict if k.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(f"{inserted}."):
            state_dict[f"{prefix}{inserted}.{rest}"] = state_dict.pop(key)


def plain_names_after_load(prefix: str, keys: Sequence[list[str]], messages: list[str]) -> None:
    """Rename keys below ``prefix`` in the report of ``load_state_dict``, in place.

    ``keys`` are the lists of missing and of unexpected keys, ``messages`` errors that name keys.
    """
    for names in keys:
        names[:] = [plain_fqn(name) if name.startswith(prefix) else name for name in names]
    for index, message in enumerate(messages):
        if f" {prefix}" in message or f'"{prefix}' in message:
            messages[index] = without_wrapper_names(message)
