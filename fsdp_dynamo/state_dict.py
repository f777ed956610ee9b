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

from fsdp_dynamo.build import plain_fqn
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
    unsharded = shard = flat.shard_on_device()
    if flat.is_sharded:
        unsharded = shard.new_empty(flat.layout.padded_numel)
        all_gather(unsharded, shard, flat.group)
    return [
        view.clone() if original.parallel is None else original.parallel.whole(view)
        for original, view in zip(flat.originals, flat.cut(unsharded), strict=True)
    ]


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
            explain(
                expected="state_dict() between two steps",
                got=f"a call in state {unit.machine.state.name}",
                where=f"unit '{unit.fqn}'",
                fix="Call it before the forward or after the backward.",
            )
        )
    base = _plain_prefix(prefix) if is_root else prefix
    plain_names_after_save(state_dict, prefix, base)
    for fqn, dtype in buffer_dtypes.items():
        if base + fqn in state_dict:
            state_dict[base + fqn] = state_dict[base + fqn].to(dtype)
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
    """Cut this rank's parts out of whole tensors."""
    if assign:
        raise UnsupportedError(
            explain(
                expected="load_state_dict(..., assign=False)",
                got="assign=True",
                where=f"unit '{unit.fqn}'",
                fix="Sharded parameters are loaded in place: leave assign out.",
            )
        )
    keys = {plain_fqn(key[len(prefix) :]): key for key in state_dict if key.startswith(prefix)}
    for flat in unit.flats:
        for index, original in enumerate(flat.originals):
            for _, _, fqn in original.sites:
                key = keys.get(fqn)
                if key is not None:
                    state_dict[key] = _local_part(flat, index, state_dict[key], key)


def _local_part(flat: FlatParameter, index: int, whole: torch.Tensor, key: str) -> torch.Tensor:
    part, parallel = flat.ranges[index], flat.originals[index].parallel
    expected = flat.layout.slots[index].shape if parallel is None else tuple(parallel.shape)
    shape = tuple(whole.shape) if isinstance(whole, torch.Tensor) else type(whole).__name__
    if shape != expected:
        raise FSDPValueError(
            explain(
                expected=f"a tensor of shape {expected}",
                got=str(shape),
                where=f"key '{key}'",
                fix="Load a full state dict of the same model.",
            )
        )
    if parallel is not None:
        whole = parallel.local(whole)
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
