"""Full state dicts through module hooks: plain FQNs, whole tensors.

Saving: the default code puts this rank's parts under wrapped names; the post-hook gathers each
flat parameter once, in its original dtype, and writes whole tensors under plain names.
Loading: the pre-hook cuts this rank's part out of each whole tensor, and the default code
copies it in place. Loading needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fsdp_dynamo.build import WRAPPED, plain_fqn
from fsdp_dynamo.collectives import all_gather
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, UnsupportedError, explain
from fsdp_dynamo.flat_parameter import FlatParameter
from fsdp_dynamo.training_state import UnitState
from fsdp_dynamo.unit import Unit


@torch.no_grad()
def gather_originals(flat: FlatParameter) -> list[torch.Tensor]:
    """Whole original parameters in their own dtype: every rank must call it.

    At most this one flat parameter is unsharded at a time.
    """
    shard = flat.sharded.detach()
    if not flat.is_sharded:
        return [view.clone() for view in flat.cut(shard)]
    unsharded = shard.new_empty(flat.layout.padded_numel)
    all_gather(unsharded, shard, flat.group)
    return [view.clone() for view in flat.cut(unsharded)]


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


def save_unit(unit: Unit, state_dict: dict[str, Any], prefix: str, is_root: bool) -> None:
    """Replace this rank's parts by whole tensors, under plain names.

    The root also takes out of ``prefix`` what ``torch.compile`` has put in.
    """
    if unit.machine.state is not UnitState.IDLE and not unit.is_summoned:
        raise FSDPStateError(
            explain(
                expected="state_dict() between two steps",
                got=f"a call in state {unit.machine.state.name}",
                where=f"unit '{unit.fqn}'",
                fix="Call it before the forward or after the backward.",
            )
        )
    base = _plain_prefix(prefix) if is_root else prefix
    plain_names_after_save(state_dict, prefix, base)
    if unit.is_summoned:  # what the default code has written is whole (perhaps on rank 0 alone)
        return
    for flat in unit.flats:
        for original, whole in zip(flat.originals, gather_originals(flat), strict=True):
            for _, _, fqn in original.sites:
                if base + fqn in state_dict:
                    state_dict[base + fqn] = whole


def _plain_prefix(prefix: str) -> str:
    """A prefix (empty or with a dot at its end) without the parts of wrappers."""
    name = plain_fqn(prefix.rstrip("."))
    return f"{name}." if name else ""


def load_unit(unit: Unit, state_dict: dict[str, Any], prefix: str, assign: bool) -> None:
    """Cut this rank's parts out of whole tensors, and put the wrapper's name into the keys."""
    if assign:
        raise UnsupportedError(
            explain(
                expected="load_state_dict(..., assign=False)",
                got="assign=True",
                where=f"unit '{unit.fqn}'",
                fix="Sharded parameters are loaded in place: leave assign out.",
            )
        )
    for flat in unit.flats:
        for index, original in enumerate(flat.originals):
            for _, _, fqn in original.sites:
                key = prefix + fqn
                if key in state_dict:
                    state_dict[key] = _local_part(flat, index, state_dict[key], key)
    plain_names_before_load(state_dict, prefix, WRAPPED)


def _local_part(flat: FlatParameter, index: int, whole: torch.Tensor, key: str) -> torch.Tensor:
    slot, part = flat.layout.slots[index], flat.ranges[index]
    shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
    if shape != slot.shape:
        raise FSDPValueError(
            explain(
                expected=f"a tensor of shape {slot.shape}",
                got=str(shape),
                where=f"key '{key}'",
                fix="Load a full state dict of the same model.",
            )
        )
    if not flat.is_sharded:
        return whole
    flattened = whole.detach().reshape(-1)
    return flattened[part.param_start : part.param_start + part.numel]


def plain_names_before_load(state_dict: dict[str, Any], prefix: str, inserted: str) -> None:
    """Put ``inserted`` into the keys below ``prefix`` that lack it."""
    for key in [k for k in state_dict if k.startswith(prefix)]:
        rest = key[len(prefix) :]
        if not rest.startswith(f"{inserted}."):
            state_dict[f"{prefix}{inserted}.{rest}"] = state_dict.pop(key)


def restore_buffer_dtypes(
    state_dict: dict[str, Any], prefix: str, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Cast buffers back to the dtypes they had before mixed precision, for a checkpoint."""
    for fqn, dtype in dtypes.items():
        key = _plain_prefix(prefix) + plain_fqn(fqn)
        if key in state_dict:
            state_dict[key] = state_dict[key].to(dtype)
