"""Whose optimizer state a plain ``optimizer.state_dict()`` is.

Such a dict holds one rank's parts under numbers. Loaded on another rank it fits wherever the parts
are equally large, so each of its parameter groups says whose parts they are. The entry goes where
torch carries settings of groups along: through ``torch.save``, ``load_state_dict`` and, once
loaded, into the optimizer's groups, where its next step reads it and takes it out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.errors import FSDPStateError

ORIGIN = "fsdp_dynamo_parts_of"
"""Key in a parameter group. Only ``optimizer.state_dict()`` has it, not what is saved by FQN."""

Place = tuple[FlatParameter, int]
"""A flat parameter, and the number of an original parameter in it."""

ADVICE = (
    "optimizer.state_dict() is of one rank's parts: save what FSDP.optim_state_dict(model, "
    "optimizer) gives, and load it through FSDP.optim_state_dict_to_load()."
)


def origin_of(places: Sequence[Place]) -> str:
    """A text that is equal where this rank holds equal parts of the parameters."""
    parts = [
        (f.shard_layout.ranges[i].param_start, f.shard_layout.ranges[i].numel) for f, i in places
    ]
    flat = places[0][0]
    digest = zlib.crc32(repr(parts).encode())
    return f"rank {flat.rank} of {flat.layout.world_size} ({digest:08x})"


def write_origins(
    optimizer: Optimizer, saved: Mapping[str, Any], places: Mapping[int, Place]
) -> None:
    """Write into ``saved``, a state dict of the optimizer, whose parts it holds.

    Args:
        places: of sharded parameters, by ``id``.
    """
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=False):
        sharded = _sharded_with_state(optimizer, group, places)
        if sharded:
            saved_group.setdefault(ORIGIN, origin_of(sharded))


def check_origins(optimizer: Optimizer, places: Mapping[int, Place], where: str) -> None:
    """Take what was loaded with a state dict out of the groups.

    Raises:
        FSDPStateError: it was the state of other parts than this rank's.
    """
    for group in optimizer.param_groups:
        saved = group.get(ORIGIN)
        sharded = [] if saved is None else _sharded_with_state(optimizer, group, places)
        if sharded and saved != origin_of(sharded):
            raise FSDPStateError(
                expected=f"state of this rank's parts, {origin_of(sharded)}",
                got=f"a state dict of {saved}",
                where=where,
                fix=ADVICE,
            )
        group.pop(ORIGIN, None)


def without_origin(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group for all ranks."""
    return {name: value for name, value in group.items() if name != ORIGIN}


def with_origins_of(optimizer: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Add to groups what the optimizer's own have: one by names wants the same entries in both."""
    for group, own in zip(groups, optimizer.state_dict()["param_groups"], strict=True):
        if ORIGIN in own:
            group[ORIGIN] = own[ORIGIN]


def _sharded_with_state(
    optimizer: Optimizer, group: Mapping[str, Any], places: Mapping[int, Place]
) -> list[Place]:
    """Places of a group's sharded parameters; none where no state is of single elements."""
    params = [param for param in group["params"] if id(param) in places]
    states = [optimizer.state[param] for param in params if param in optimizer.state]
    values = [value for state in states for value in state.values()]
    if not any(isinstance(value, torch.Tensor) and value.dim() for value in values):
        return []
    return [places[id(param)] for param in params]
