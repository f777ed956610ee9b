"""Values of sharded and local state dicts, for torch.distributed.checkpoint (DCP).

A ``TensorShard`` has the shape and dtype of the unsharded tensor and the memory of this rank's
range of it, which DCP writes to a file and reads into in place (``core.layout.chunked_tensor``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties
from torch.distributed.checkpoint.planner import WriteItem

from fsdp_dynamo.core.layout.chunked_tensor import ChunkedTensor
from fsdp_dynamo.core.layout.chunks import Chunk, chunks_of
from fsdp_dynamo.core.rows import Rows
from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError, UnsupportedError
from fsdp_dynamo.state_dict.shard_holders import (
    LocalShard,
    ShardedInfo,
    ShardInfo,
    ShardPlacement,
)


class TensorShard(ChunkedTensor, torch.Tensor):
    """A contiguous range of a flattened tensor, with the unsharded tensor's shape.

    Args:
        local: the elements, 1-D and contiguous; shared, not copied.
        shape: of the tensor.
        begin: the first element's position in the flattened tensor.
        within: if the tensor is itself a chunk of a larger one (tensor parallelism): the larger
            one's shape, which the result then has, and the chunk's offsets in it.
        holders: of the other parts; ``None`` where they are not known.
        is_copy: whether another rank of tensor parallelism writes it.
    """

    local: torch.Tensor
    chunks: list[Chunk]
    holders: Rows | None

    @staticmethod
    def __new__(
        cls,
        local: torch.Tensor,
        shape: tuple[int, ...],
        begin: int,
        within: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        holders: Rows | None = None,
        is_copy: bool = False,
    ) -> TensorShard:
        outer_shape, at = within or (shape, (0,) * len(shape))
        shard: TensorShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, outer_shape, dtype=local.dtype, device=local.device
        )
        shard.local, shard.holders, shard.is_copy = local, holders, is_copy
        shard.chunks = [
            Chunk(tuple(a + b for a, b in zip(at, c.offsets, strict=True)), c.sizes, c.start)
            for c in chunks_of(shape, begin, begin + local.numel())
        ]
        return shard

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TensorShard({self.local.numel()} elements of {tuple(self.shape)}, {self.dtype})"

    def held_chunks(self) -> list[Chunk]:
        """This rank's chunks of the whole tensor."""
        return self.chunks

    def held_elements(self) -> torch.Tensor:
        """The memory of all of them, 1-D."""
        return self.local

    def like(self, local: torch.Tensor) -> TensorShard:
        """The same shard with other memory, dtype or device."""
        new: TensorShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            TensorShard, self.shape, dtype=local.dtype, device=local.device
        )
        new.local, new.chunks, new.holders = local, self.chunks, self.holders
        new.is_copy = self.is_copy
        return new

    # -- what scripts ask of a ShardedTensor or a DTensor ----------------------------------------

    def to_local(self) -> torch.Tensor:
        """This rank's rows, ``(rows, *shape[1:])``, often none; shared, not copied.

        1-D where they are no whole rows.
        """
        if len(self.chunks) == 1:
            return self.tensors()[0]
        return self.local if self.chunks else self.local.view(0, *self.shape[1:])

    def local_tensor(self) -> torch.Tensor:
        """This rank's only chunk, in its shape, as of a ShardedTensor.

        Raises:
            UnsupportedError: there are several, or none.
        """
        if len(self.chunks) != 1:
            raise UnsupportedError(
                expected="one chunk on this rank",
                got=str(len(self.chunks)),
                where="local_tensor()",
                fix="Use local_shards().",
            )
        return self.tensors()[0]

    def local_shards(self) -> list[LocalShard]:
        """This rank's chunks: at most ``2 * ndim - 1``, often none."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        infos = [self._info(chunk, rank) for chunk in self.chunks]
        return [LocalShard(*both) for both in zip(self.tensors(), infos, strict=True)]

    def metadata(self) -> ShardedInfo:
        """The chunks of all ranks; no communication.

        Raises:
            UnsupportedError: of a value from a file, or under tensor parallelism.
        """
        infos = [
            self._info(chunk, rank)
            for rank, begin, end in self._known_holders("metadata()").ranges()
            for chunk in chunks_of(self.shape, begin, end)
        ]
        return ShardedInfo(infos, self.shape, TensorProperties.create_from_tensor(self.local))

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, a plain one; all ranks must call it.

        Raises:
            UnsupportedError: of a value from a file, or under tensor parallelism.
        """
        return self._known_holders("full_tensor()").gather(self.local)

    def _info(self, chunk: Chunk, rank: int) -> ShardInfo:
        placement = ShardPlacement(rank, self.local.device)
        return ShardInfo(list(chunk.offsets), list(chunk.sizes), placement)

    def _known_holders(self, where: str) -> Rows:
        if self.holders is None:
            raise UnsupportedError(
                expected="a value of a model's or optimizer's state dict",
                got="one from a file, or one that tensor parallelism has split too",
                where=where,
                fix="Use StateDictType.FULL_STATE_DICT for whole tensors.",
            )
        return self.holders

    # -- supported operations --------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func in _LIKE:
            return args[0].like(func(args[0].local, *args[1:], **(kwargs or {})))
        if func is aten.new_empty.default and tuple(args[1]) == args[0].shape:
            return args[0].like(func(args[0].local, args[0].local.shape, **(kwargs or {})))
        if func is aten.copy_.default and all(isinstance(a, TensorShard) for a in args[:2]):
            require_same_shard(args[0], args[1], "copy_()")
            args[0].local.copy_(args[1].local)
            return args[0]
        raise FSDPTypeError(
            expected="detach(), clone(), to() or copy_()",
            got=str(func),
            where="a value of a sharded state dict",
            fix="Compute with its to_local() or full_tensor(), or use a full state dict.",
        )


class RankLocalTensor(torch.Tensor):
    """A tensor in a local state dict; other ranks have different tensors of the same name.

    torch.distributed.checkpoint takes tensors of one name to be the same on all ranks and would
    keep one rank's, so it is refused. Otherwise this is a plain tensor, and is pickled as one.
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
        expected="a sharded state dict for torch.distributed.checkpoint",
        got="a LOCAL_STATE_DICT, whose values of one name differ between ranks",
        where=where,
        fix="Use StateDictType.SHARDED_STATE_DICT, or torch.save() to one file per rank.",
    )


_LIKE: set[Callable[..., Any]] = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.ones_like.default,
}
"""Operators whose result is the same shard of another tensor."""


def require_same_shard(expected: torch.Tensor, got: TensorShard, where: str) -> None:
    """Raise unless two shards are the same chunks of tensors of the same shape."""
    if (
        not isinstance(expected, TensorShard)
        or expected.shape != got.shape
        or expected.chunks != got.chunks
    ):
        raise FSDPValueError(
            expected=f"this rank's shard, {expected!r}",
            got=repr(got),
            where=where,
            fix="Load with torch.distributed.checkpoint into model.state_dict(), which reads the "
            "elements that each rank needs.",
        )
