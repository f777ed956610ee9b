"""What torch.distributed.checkpoint (DCP) asks of a tensor of which ranks hold parts.

Its protocol ``_Checkpointable``: chunks to write, chunks to read, and their memory, into which it
reads in place. No file has padding or other ranks' elements, and no tensor is ever gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fsdp_dynamo.core.layout.chunks import Chunk
from fsdp_dynamo.errors import FSDPValueError


class ChunkedTensor:
    """A tensor whose elements on this rank are chunks of the whole one; a base of its class.

    Attributes:
        is_copy: whether tensor parallelism keeps the whole tensor on several ranks, of which
            another one writes. They may hold other chunks of it, as their units have other sizes,
            so that torch's planner cannot see that they are the same.
    """

    shape: torch.Size
    is_copy: bool

    def held_chunks(self) -> Sequence[Chunk]:
        """This rank's chunks of the whole tensor."""
        raise NotImplementedError

    def held_elements(self) -> torch.Tensor:
        """The memory of all of them, 1-D."""
        raise NotImplementedError

    def tensors(self) -> list[torch.Tensor]:
        """The memory of each chunk, in its shape."""
        elements = self.held_elements()
        return [
            elements[chunk.start : chunk.start + chunk.numel].view(chunk.sizes)
            for chunk in self.held_chunks()
        ]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.is_copy:
            return []
        properties = TensorProperties.create_from_tensor(self.held_elements())
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
            ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            for chunk in self.held_chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for chunk, tensor in zip(self.held_chunks(), self.tensors(), strict=True):
            if index.offset == torch.Size(chunk.offsets):
                return tensor
        raise FSDPValueError(
            expected=f"the offset of one of {len(self.held_chunks())} chunks",
            got=str(index.offset),
            where=f"'{index.fqn}'",
            fix="Load into a state dict of the model as it is sharded now.",
        )
