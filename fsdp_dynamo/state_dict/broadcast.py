"""Broadcast of nested states from the first rank, one tensor at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

from fsdp_dynamo.agreement.store import exchange_device
from fsdp_dynamo.comm.watchdog import watched

_USE = "loading what the first rank has"


def broadcast_from_first(value: Any, groups: Sequence[dist.ProcessGroup] | None = None) -> Any:
    """The first rank's value on every rank of some groups, with its tensors on the CPU.

    Args:
        value: nested dicts, lists and tuples of tensors and other values; ignored on other ranks.
        groups: a unit's shard group and the one of its replicas; by default, the default group.
    """
    if not dist.is_initialized():
        return value
    default = dist.group.WORLD
    assert default is not None
    for group in reversed(groups or [default]):  # across replicas, then inside each
        value = _from_first(value, group)
    return value


def _from_first(value: Any, group: dist.ProcessGroup) -> Any:
    first = dist.get_process_group_ranks(group)[0]
    is_first = dist.get_rank() == first
    leaves, spec = tree_flatten(value) if is_first else ([], None)
    shapes = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in leaves]
    skeleton: list[Any] = [(shapes, spec)]
    with watched(group, "broadcast", _USE):
        dist.broadcast_object_list(skeleton, src=first, group=group)
    shapes, spec = skeleton[0]
    received = []
    for position, one in enumerate(shapes):
        if isinstance(one, torch.Tensor):
            one = _broadcast(leaves[position] if is_first else None, one, first, group)
        received.append(one)
    return tree_unflatten(received, spec)


def _broadcast(
    own: torch.Tensor | None, like: torch.Tensor, first: int, group: dist.ProcessGroup
) -> torch.Tensor:
    device = exchange_device(group)
    if own is None:
        buffer = torch.empty(like.shape, dtype=like.dtype, device=device)
    else:
        buffer = own.detach().to(device).contiguous()
    with watched(group, "broadcast", _USE, buffer.numel()):
        dist.broadcast(buffer, src=first, group=group)
    return buffer.cpu()
