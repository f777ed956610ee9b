"""Full state dicts through module hooks: plain FQNs, whole tensors.

Saving: the default code puts this rank's parts under wrapped names; the post-hook gathers each
flat parameter once, in its original dtype, and writes whole tensors under plain names.
Loading: the pre-hook cuts this rank's part out of each whole tensor, and the default code
copies it in place. Loading needs no communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.config import StateDictConfig, StateDictSettings, StateDictType
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.training_state import UnitState
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError
from fsdp_dynamo.module_tree import join_fqn, plain_fqn, without_wrapper_names
from fsdp_dynamo.state_dict.conversion import gather_originals, local_of, local_only, part_of


def plain_names_after_save(state_dict: dict[str, Any], prefix: str, new_prefix: str) -> None:
    """Rename everything below ``prefix`` to ``new_prefix`` and plain FQNs, keeping the order.

    What a module's children wrote is the end of the dict when its own hook runs.
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
    state_dict: dict[str, Any],
    prefix: str,
    is_root: bool,
    buffer_dtypes: Mapping[str, torch.dtype],
) -> None:
    """Replace this rank's parts by whole tensors, under plain names; buffers by those of the dtypes
    given, which they had before mixed precision.

    The root also takes out of ``prefix`` what ``torch.compile`` has put in.
    """
    if unit.machine.state is not UnitState.IDLE and not unit.is_summoned:
        raise FSDPStateError(
            expected="state_dict() between two steps",
            got=f"a call in state {unit.machine.state.name}",
            where=f"unit '{unit.fqn}'",
            fix="Call it before the forward or after the backward.",
        )
    base = _plain_prefix(prefix) if is_root else prefix
    plain_names_after_save(state_dict, prefix, base)
    for fqn, dtype in buffer_dtypes.items():
        if base + fqn in state_dict:
            state_dict[base + fqn] = state_dict[base + fqn].to(dtype)
    if unit.is_summoned:  # what the default code has written is whole (perhaps on rank 0 alone)
        return
    settings = unit.state_dict_settings
    unit.check_membership()
    unit.write_back()
    for flat in unit.flats:
        values = _VALUES[settings.state_dict_type](flat)
        for original in flat.originals:
            value = _kept(next(values), flat, settings)
            for _, _, fqn in original.sites:
                if base + fqn in state_dict:
                    state_dict[base + fqn] = value


def _kept(value: torch.Tensor, flat: FlatParameter, settings: StateDictSettings) -> Any:
    """A value as the settings want it; ``None`` where this rank is to have none."""
    config = settings.state_dict_config
    if _is_left_out(flat.groups, config):
        return None
    if config.offload_to_cpu:
        return value.to("cpu", copy=True)
    return value.clone() if settings.copies_model else value


def _is_left_out(groups: Groups, config: StateDictConfig) -> bool:
    first_only = getattr(config, "rank0_only", False)
    return first_only and any(group.rank() != 0 for group in groups.all)


def finish_save(units: Sequence[Unit], state_dict: dict[str, Any], prefix: str) -> None:
    """When all units have saved: what none holds (buffers, ignored parameters) goes their way."""
    root = units[0]
    if root.is_summoned:
        return
    config = root.state_dict_settings.state_dict_config
    left_out = _is_left_out(root.config.groups, config)
    if not (left_out or config.offload_to_cpu):
        return
    base = _plain_prefix(prefix)
    sites = [(unit, site) for unit in units for f in unit.flats for *_, site in f.sites()]
    held = {base + join_fqn(unit.fqn, site) for unit, site in sites}
    for key in [key for key in state_dict if key.startswith(base)]:
        if left_out:
            del state_dict[key]
        elif key not in held and isinstance(state_dict[key], torch.Tensor):
            state_dict[key] = state_dict[key].to("cpu", copy=True)


def _sharded(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """This rank's part of each original parameter; of those that are not sharded, the whole."""
    for index, original in enumerate(flat.originals):
        yield part_of(flat, index, original.param.detach())


def _local(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """The parameters as they are."""
    return (local_only(flat, original.param.detach()) for original in flat.originals)


_VALUES: dict[StateDictType, Callable[[FlatParameter], Iterator[torch.Tensor]]] = {
    StateDictType.FULL_STATE_DICT: gather_originals,
    StateDictType.SHARDED_STATE_DICT: _sharded,
    StateDictType.LOCAL_STATE_DICT: _local,
}


def _plain_prefix(prefix: str) -> str:
    """A prefix (empty or with a dot at its end) without the parts of wrappers."""
    name = plain_fqn(prefix.rstrip("."))
    return f"{name}." if name else ""


def load_unit(unit: Unit, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
    """Cut this rank's parts out of whole tensors, or take the parts that are there."""
    if assign:
        raise UnsupportedError(
            expected="load_state_dict(..., assign=False)",
            got="assign=True",
            where=f"unit '{unit.fqn}'",
            fix="Sharded parameters are loaded in place: leave assign out.",
        )
    is_local = unit.state_dict_settings.state_dict_type is StateDictType.LOCAL_STATE_DICT
    keys = {plain_fqn(key[len(prefix) :]): key for key in state_dict if key.startswith(prefix)}
    for flat in unit.flats:
        for index, original in enumerate(flat.originals):
            for _, _, fqn in original.sites:
                key = keys.get(fqn)
                if key is not None and not is_local:
                    state_dict[key] = local_of(flat, index, state_dict[key], plain_fqn(key))


def plain_names_before_load(state_dict: dict[str, Any], prefix: str, inserted: str) -> None:
    """Put ``inserted`` into the keys below ``prefix`` that lack it."""
    for key in [k for k in state_dict if k.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(f"{inserted}."):
            state_dict[f"{prefix}{inserted}.{rest}"] = state_dict.pop(key)


def plain_names_after_load(prefix: str, keys: Sequence[list[str]], messages: list[str]) -> None:
    """Rename what ``load_state_dict`` is about to report of keys below ``prefix``, in place.

    Args:
        prefix: of the module whose hook runs.
        keys: lists of missing and of unexpected keys.
        messages: sentences that name keys.
    """
    for names in keys:
        names[:] = [plain_fqn(name) if name.startswith(prefix) else name for name in names]
    for index, message in enumerate(messages):
        if f" {prefix}" in message or f'"{prefix}' in message:
            messages[index] = without_wrapper_names(message)
