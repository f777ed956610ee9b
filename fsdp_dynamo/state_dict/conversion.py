"""Between a rank's part of a tensor and the whole: parameters, and states as large as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.shard_conversion import shard_of, unsharded_of
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.state_dict.tensor_part import LocalTensor, TensorPart, require_same_part


def gather_originals(flat: FlatParameter) -> Iterator[torch.Tensor]:
    """Whole original parameters in their own dtype: every rank must call it, and take the first.

    They share the memory of one unsharded flat parameter: copy what is to stay.
    """
    return _gathered(flat, flat.shard_on_device())


def gather_like(
    flat: FlatParameter, locals_: Sequence[torch.Tensor | None]
) -> Iterator[torch.Tensor | None]:
    """The same of tensors of one dtype, each as large as this rank's part of an original parameter.

    Where one is ``None`` it is so on every rank.
    """
    shard = shard_of(flat, locals_)
    for value, local in zip(_gathered(flat, shard), locals_, strict=True):
        yield value if local is not None else None


def _gathered(flat: FlatParameter, shard: torch.Tensor) -> Iterator[torch.Tensor]:
    with torch.no_grad():
        views = flat.cut(unsharded_of(flat, shard.detach()))
        for original, view in zip(flat.originals, views, strict=True):
            yield view if original.parallel is None else original.parallel.whole(view)


def part_of(flat: FlatParameter, index: int, local: torch.Tensor) -> torch.Tensor:
    """A tensor as large as this rank's part of an original parameter, as a part of the whole.

    Memory is shared. Where nothing is sharded it is the whole, a plain tensor.
    """
    part, slot = flat.ranges[index], flat.layout.slots[index]
    parallel = flat.originals[index].parallel
    if parallel is not None:
        within = (tuple(parallel.shape), parallel.offsets(slot.shape))
        return TensorPart(local.view(-1), slot.shape, part.param_start, within)
    if flat.is_sharded and slot.numel:
        return TensorPart(local, slot.shape, part.param_start)
    return local.view(slot.shape)


def local_only(flat: FlatParameter, value: Any) -> Any:
    """The tensors of a value of one rank, marked as such where other ranks have others."""
    if not flat.is_sharded:
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.as_subclass(LocalTensor), value)


def plain_local(value: Any) -> Any:
    """What ``local_only`` marked, as plain tensors."""
    return tree_map_only(LocalTensor, lambda tensor: tensor.as_subclass(torch.Tensor), value)


def whole_shape(flat: FlatParameter, index: int) -> tuple[int, ...]:
    """The shape of an original parameter in the plain model."""
    parallel = flat.originals[index].parallel
    return flat.layout.slots[index].shape if parallel is None else tuple(parallel.shape)


def local_of(flat: FlatParameter, index: int, value: torch.Tensor, key: str) -> torch.Tensor:
    """This rank's part of a whole tensor, or of what ``part_of`` gave; no communication.

    Raises:
        FSDPValueError: another shape, or another part, naming ``key``.
    """
    part, original = flat.ranges[index], flat.originals[index]
    if isinstance(value, TensorPart):
        own = part_of(flat, index, original.param.detach())
        require_same_part(own, value, f"key '{key}'")
        return value.local.view(original.param.shape)
    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if shape != whole_shape(flat, index):
        raise FSDPValueError(
            expected=f"a tensor of shape {whole_shape(flat, index)}",
            got=str(shape),
            where=f"key '{key}'",
            fix="Load a full state dict of the same model.",
        )
    if original.parallel is not None:
        value = original.parallel.local(value)
    if not flat.is_sharded:
        return value
    flattened = value.detach().reshape(-1)
    return flattened[part.param_start : part.param_start + part.numel]
