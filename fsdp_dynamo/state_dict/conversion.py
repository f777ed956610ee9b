"""Conversion of parameters, and of equally large states, between local and unsharded tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import is_tensor_like
from torch.utils._pytree import tree_map_only

from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.shard_conversion import shard_of, unsharded_of
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.state_dict.rank_local import RankLocalTensor
from fsdp_dynamo.state_dict.torch_shards import whole_tensor


def gather_params(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Unsharded original parameters in their own dtype; gathered when the first one is taken.

    Every rank must take the first one. They share the memory of one unsharded flat parameter: copy
    those that must outlive it.
    """
    return _gathered(flat, flat.shard_on_device())


def gather_states(
    flat: FlatParameter, parts: Mapping[int, torch.Tensor]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Gather states as large as their original parameters, with one all-gather for each dtype.

    They share memory as those of ``gather_params`` do.

    Args:
        parts: by the parameter's number, this rank's part; ranks have the same numbers and dtypes.

    Yields:
        Number and unsharded state.
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
    """A tensor as large as this rank's part of a parameter, as a DTensor of the whole one.

    Memory is shared. Of a parameter without elements, a plain tensor.
    """
    if not flat.layout.slots[index].numel:
        return local_of(local).view(flat.layout.slots[index].shape)
    return flat.originals[index].placing.without_address(local_of(local))


def mark_rank_local(flat: FlatParameter, value: Any) -> Any:
    """Mark the tensors of a value as rank-local, if other ranks have different ones."""
    if not flat.is_sharded:
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(RankLocalTensor), value)


def from_rank_local(flat: FlatParameter, index: int, value: Any) -> Any:
    """A value that ``mark_rank_local`` marked; a DTensor where it is this rank's part of one."""
    value = tree_map_only(RankLocalTensor, lambda tensor: tensor.as_subclass(torch.Tensor), value)
    part, original = flat.shard_layout.ranges[index], flat.originals[index]
    is_part = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == part.shape
    return original.as_param(value) if is_part else value


def extract_local(flat: FlatParameter, index: int, value: torch.Tensor, key: str) -> torch.Tensor:
    """The DTensor of an unsharded tensor, without communication.

    Of a ShardedTensor, or a DTensor that is placed otherwise, too: all ranks gather it together.

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
            expected=f"a tensor of shape {wanted}",
            got=str(shape),
            where=f"key '{key}'",
            fix="Load a full state dict of the same model.",
        )
    # Loads the value of a file that is read as it is needed.
    return original.as_param(original.placing.part_of(torch.detach(value)))
