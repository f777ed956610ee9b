"""Conversion of parameters and parameter-like states between local and unsharded tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from fsdp_dynamo.comm.process_groups import exchange_device
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.core.dtensors import local_of, whole_of
from fsdp_dynamo.core.flat_parameter import FlatParameter, shard_of, unsharded_of
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError


def gather_params(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Yield unsharded original parameters in their own dtype; the first ``next`` gathers.

    Every rank must take the first one. All share the memory of one unsharded buffer: copy those
    that must outlive it.
    """
    return _gathered(flat, flat.shard_on_device())


def gather_states(
    flat: FlatParameter, parts: Mapping[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Gather states of their parameters' shapes, with one all-gather per dtype.

    ``parts`` are this rank's parts by parameter index; ranks have the same indices and dtypes.
    Yields index and unsharded state, which share memory as in ``gather_params``.
    """
    for dtype in dict.fromkeys(part.dtype for part in parts.values()):
        own = {number: part for number, part in parts.items() if part.dtype == dtype}
        locals_ = [local_of(own[i]) if i in own else None for i in range(len(flat.originals))]
        whole = enumerate(_gathered(flat, shard_of(flat, locals_)))
        yield from ((number, value) for number, value in whole if number in own)


def _gathered(flat: FlatParameter, shard: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        views = flat.layout.split(unsharded_of(flat, shard.detach()))
        for original, view in zip(flat.originals, views, strict=True):
            yield view if original.parallel is None else original.parallel.whole(view)


def as_value(flat: FlatParameter, index: int, local: torch.Tensor) -> torch.Tensor:
    """Wrap this rank's part in a DTensor, without a copy; an empty parameter gives a tensor."""
    if not flat.layout.slots[index].numel:
        return local_of(local).view(flat.layout.slots[index].shape)
    return flat.originals[index].placing.for_state_dict(local_of(local))


def mark_rank_local(flat: FlatParameter, value: Any) -> Any:
    """Mark the tensors of a value as rank-local, unless all ranks have the same."""
    if not flat.is_sharded:
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(RankLocalTensor), value)


def from_rank_local(flat: FlatParameter, index: int, value: Any) -> Any:
    """Remove the marks of ``mark_rank_local``; make a DTensor of this rank's part of one."""
    value = tree_map_only(RankLocalTensor, lambda tensor: tensor.as_subclass(torch.Tensor), value)
    part, original = flat.shard_layout.ranges[index], flat.originals[index]
    is_part = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == part.shape
    return original.as_param(value) if is_part else value


def extract_local(flat: FlatParameter, index: int, value: torch.Tensor, key: str) -> torch.Tensor:
    """Return the DTensor for an unsharded tensor, without communication.

    ShardedTensors and DTensors of other placements are accepted; all ranks gather these together.

    Raises:
        FSDPValueError: the shape is a different one; names ``key``.
    """
    original = flat.originals[index]
    wanted = tuple(original.placing.shape)
    if not isinstance(value, DTensor):
        value = whole_tensor(value)
    shape = tuple(value.shape) if is_tensor_like(value) else type(value).__name__
    if shape != wanted:
        raise FSDPValueError(
            f"key '{key}': expected a tensor of shape {wanted}, got {shape}. Load a full state "
            "dict of the same model."
        )
    # detach() also loads a value whose file is read lazily.
    return original.as_param(original.placing.part_of(torch.detach(value)))


# -- rank local ------------------------------------------------------------------------------------


class RankLocalTensor(torch.Tensor):
    """Tensor in a local state dict; other ranks have different tensors of the same name.

    torch.distributed.checkpoint takes tensors of one name for replicas and would keep one rank's,
    so this class refuses to be saved by it. Otherwise it is a plain tensor, and is pickled as one.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankLocalTensor:
        copied: RankLocalTensor = self.detach().clone()  # type: ignore[assignment]
        memo[id(self)] = copied
        return copied

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise _local(f"'{fqn}'")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise _local("a value of a local state dict")


def _local(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: expected a sharded state dict for torch.distributed.checkpoint, got a "
        "LOCAL_STATE_DICT, whose values of one name differ between ranks. Use "
        "StateDictType.SHARDED_STATE_DICT, or torch.save() to one file per rank."
    )


# -- torch shards ----------------------------------------------------------------------------------
# ShardedTensor and DTensor values come from state dicts of FSDP1 and FSDP2, and from
# ``torch.distributed.checkpoint.optimizer``. Their placements may differ from ours, so they are
# gathered one at a time while they are loaded.


def whole_tensor(value: Any) -> Any:
    """Gather the whole of a ShardedTensor or DTensor, on all its ranks; return other values."""
    if isinstance(value, DTensor):
        return whole_of(value)
    return _gathered_shards(value) if isinstance(value, ShardedTensor) else value


def _gathered_shards(value: ShardedTensor) -> torch.Tensor:
    """Gather all shards into one tensor, on the device where their group communicates."""
    group = value._process_group
    by_rank: dict[int, list[ShardMetadata]] = {}
    for shard in value.metadata().shards_metadata:
        placement: Any = shard.placement
        by_rank.setdefault(placement.rank(), []).append(shard)
    longest = max(sum(math.prod(s.shard_sizes) for s in held) for held in by_rank.values())
    device = exchange_device(group, value.device)
    sent = torch.zeros(max(1, longest), dtype=value.dtype, device=device)
    own = {tuple(one.metadata.shard_offsets): one.tensor for one in value.local_shards()}
    for place, shard in _places(sent, by_rank.get(dist.get_rank(), [])):
        place.copy_(own[tuple(shard.shard_offsets)])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    with watched(group, "all_gather", "a ShardedTensor", value.size().numel()):
        dist.all_gather([one.view(torch.uint8) for one in received], sent.view(torch.uint8), group)
    whole = torch.empty(value.size(), dtype=value.dtype, device=device)
    for rank, buffer in zip(dist.get_process_group_ranks(group), received, strict=True):
        for place, shard in _places(buffer, by_rank.get(rank, [])):
            pairs = zip(shard.shard_offsets, shard.shard_sizes, strict=True)
            whole[tuple(slice(begin, begin + size) for begin, size in pairs)] = place
    return whole


def _places(
    buffer: torch.Tensor, shards: Sequence[ShardMetadata]
) -> Iterator[tuple[torch.Tensor, ShardMetadata]]:
    """Yield views of a 1-D buffer that contains the shards one after the other."""
    begin = 0
    for shard in shards:
        end = begin + math.prod(shard.shard_sizes)
        yield buffer[begin:end].view(shard.shard_sizes), shard
        begin = end


# -- broadcast -------------------------------------------------------------------------------------


_USE = "loading what the first rank has"


def broadcast_from_first(value: Any, groups: Sequence[dist.ProcessGroup] | None = None) -> Any:
    """Broadcast a nested value from the first rank of the groups; its tensors arrive on the CPU.

    Args:
        value: nested dicts, lists and tuples of tensors and other values; ignored on other ranks.
        groups: a unit's shard group and that of its replicas; default: the default group.
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
