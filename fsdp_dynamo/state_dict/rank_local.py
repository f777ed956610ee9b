"""Values of LOCAL_STATE_DICT, which torch.distributed.checkpoint must not take for whole ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from fsdp_dynamo.errors import UnsupportedError


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
