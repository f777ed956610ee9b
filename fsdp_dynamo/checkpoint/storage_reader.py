"""torch.distributed.checkpoint's reader, which runs no code that a file names.

Its index is a pickle, and entries that are no tensors are, too. Unpickling calls whatever the file
asks for, so only the few classes that an index consists of are let in, and other entries are read
with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.serialization import _get_layout

from fsdp_dynamo.checkpoint.other_states import require_readable
from fsdp_dynamo.errors import CheckpointError

INDEX = ".metadata"
_HARMLESS: dict[tuple[str, str], Any] = {
    (one.__module__, one.__qualname__): one
    for one in (
        *(
            getattr(index_classes, name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _StorageInfo,
        _get_layout,
        OrderedDict,
        torch.Size,
    )
}


class _IndexUnpickler(pickle.Unpickler):
    """Reads an index, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePath
        raise CheckpointError(
            expected="an index of tensors",
            got=f"one that asks for '{module}.{name}'",
            where=f"file '{INDEX}'",
            fix="Nothing was run. torch.distributed.checkpoint does not write such a file: do "
            "not load this checkpoint.",
        )


class Reader(FileSystemReader):
    """Reads a checkpoint's files without running code from them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (pathlib.Path(self.path) / INDEX).read_bytes()
        found: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Reads entries that are no tensors with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                expected="tensors, numbers, texts, lists and dicts",
                got=str(error).split("\n")[0],
                where=f"'{fqn}'",
                fix="Nothing was run. Load a checkpoint that fsdp_dynamo has written.",
            ) from error
        set_element(self.original_state_dict, self.mappings[fqn], plain)


class SavePlanner(DefaultSavePlanner):
    """Refuses what ``LoadPlanner`` would not read; knows which entry is being written."""

    current: str | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.current = write_item.index.fqn
        data: Any = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            require_readable(data.getvalue(), f"'{self.current}'")
        return data
