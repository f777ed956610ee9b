"""What a rank holds of a tensor, in a state dict: for torch.distributed.checkpoint.

A part looks like the whole tensor (shape, dtype) and has the memory of this rank's range of it.
DCP asks it for boxes (``state_dict.chunks``), writes their memory to a file, and reads into it in
place. Neither padding nor other ranks' elements are in a file, and no tensor is ever gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError, UnsupportedError
from fsdp_dynamo.state_dict.chunks import Box, boxes_of


class TensorPart(torch.Tensor):
    """A contiguous range of a flattened tensor, as large to look at as the whole.

    Args:
        local: the elements, 1-D and contiguous; shared, not copied.
        shape: of the tensor.
        begin: the first element's position in the flattened tensor.
        within: the shape of the whole and where the tensor begins in it, if it is itself a box of
            another (tensor parallelism); the part then looks as large as that.
    """

    local: torch.Tensor
    boxes: list[Box]

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        shape: tuple[int, ...],
        begin: int,
        within: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
    ) -> TensorPart:
        whole, at = within or (shape, (0,) * len(shape))
        part: TensorPart = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, whole, dtype=local.dtype, device=local.device
        )
        part.local = local
        part.boxes = [
            Box(tuple(a + b for a, b in zip(at, box.offsets, strict=True)), box.sizes, box.start)
            for box in boxes_of(shape, begin, begin + local.numel())
        ]
        return part

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorPart({self.local.numel()} elements of {tuple(self.shape)}, {self.dtype})"

    def tensors(self) -> list[torch.Tensor]:
        """The memory of each box, in its shape."""
        return [self.local[b.start : b.start + b.numel].view(b.sizes) for b in self.boxes]

    def like(self, local: torch.Tensor) -> TensorPart:
        """The same part with other memory, dtype or device."""
        new: TensorPart = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            TensorPart, self.shape, dtype=local.dtype, device=local.device
        )
        new.local, new.boxes = local, self.boxes
        return new

    # -- what torch.distributed.checkpoint asks (its protocol ``_Checkpointable``) -----------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box, tensor in zip(self.boxes, self.tensors(), strict=True):
            if index.offset == torch.Size(box.offsets):
                return tensor
        raise FSDPValueError(
            expected=f"the offset of one of {len(self.boxes)} boxes",
            got=str(index.offset),
            where=f"'{index.fqn}'",
            fix="Load into a state dict of the model as it is sharded now.",
        )

    # -- the few operations that make sense of a part ---------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in _ELEMENTWISE:
            return args[0].like(func(args[0].local, *args[1:], **(kwargs or {})))
        if func is aten.new_empty.default and tuple(args[1]) == args[0].shape:
            return args[0].like(func(args[0].local, args[0].local.shape, **(kwargs or {})))
        if func is aten.copy_.default and all(isinstance(a, TensorPart) for a in args[:2]):
            require_same_part(args[0], args[1], "copy_()")
            args[0].local.copy_(args[1].local)
            return args[0]
        raise FSDPTypeError(
            expected="detach, clone, to or copy_ of a part",
            got=str(func),
            where="a value of a sharded state dict",
            fix="Save it with torch.distributed.checkpoint, or use a full state dict.",
        )


class LocalTensor(torch.Tensor):
    """A tensor of one rank in a local state dict: other ranks have others of the same name.

    torch.distributed.checkpoint takes what has one name for the same on all ranks, and would keep
    one rank's; it is refused. In all else this is a plain tensor, and pickled as one.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        raise _local(f"'{fqn}'")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        raise _local("a value of a local state dict")


def _local(where: str) -> UnsupportedError:
    return UnsupportedError(
        expected="parts of tensors, for torch.distributed.checkpoint",
        got="elements of one rank, of StateDictType.LOCAL_STATE_DICT: names do not say whose",
        where=where,
        fix="Use StateDictType.SHARDED_STATE_DICT, or torch.save() to one file a rank.",
    )


_ELEMENTWISE: set[Callable[..., Any]] = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


def require_same_part(expected: torch.Tensor, got: TensorPart, where: str) -> None:
    """Raise unless two parts are the same boxes of tensors of one shape."""
    if (
        not isinstance(expected, TensorPart)
        or expected.shape != got.shape
        or expected.boxes != got.boxes
    ):
        raise FSDPValueError(
            expected=f"this rank's part, {expected!r}",
            got=repr(got),
            where=where,
            fix="Load with torch.distributed.checkpoint into model.state_dict(), which finds "
            "what each rank needs.",
        )
