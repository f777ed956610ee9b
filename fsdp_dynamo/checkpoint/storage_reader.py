"""torch.distributed.checkpoint's reader, restricted so that no code from a file runs.

The index is a pickle, and so are entries that are not tensors. Unpickling can call any function
that the file names, so only the few classes of which an index consists are allowed, and other
entries are read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.serialization import _get_layout

from fsdp_dynamo.checkpoint.auxiliary_states import require_readable
from fsdp_dynamo.errors import CheckpointError

INDEX_FILE = ".metadata"
_ALLOWED_CLASSES: dict[tuple[str, str], Any] = {
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


_SINGLETONS: tuple[Any, ...] = (
    *_ALLOWED_CLASSES.values(),
    *index_classes._MEM_FORMAT_ENCODING,
    pathlib.PurePath,
)
"""What a file can refer to and this process keeps."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of indexes; any class that they do not need is refused."""

    def load(self) -> Any:
        """The index.

        Raises:
            CheckpointError: it refers to something else, or changes a class.
        """
        with _kept_as_they_are(_SINGLETONS):
            return super().load()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED_CLASSES:
            return _ALLOWED_CLASSES[module, name]
        value = getattr(torch, name, None) if module == "torch" else None
        if isinstance(value, (torch.dtype, torch.layout)):
            return value
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):
            return pathlib.PurePath
        raise _no_index(f"one that refers to '{module}.{name}'")


@contextmanager
def _kept_as_they_are(objects: Sequence[Any]) -> Iterator[None]:
    """Undo what a pickle sets on classes: attributes can be given to any object, classes too.

    The unpickler in Python could refuse it beforehand, but takes five times as long.

    Raises:
        CheckpointError: something was changed.
    """
    before = [(one, dict(vars(one))) for one in objects if hasattr(one, "__dict__")]
    try:
        yield
    finally:
        changed = [one for one, attributes in before if _restore(one, attributes)]
    if changed:
        raise _no_index(f"one that changes {changed[0]}")


def _restore(one: Any, attributes: Mapping[str, Any]) -> bool:
    now = dict(vars(one))
    for name in now.keys() - attributes.keys():
        delattr(one, name)
    replaced = [name for name, value in attributes.items() if now.get(name) is not value]
    for name in replaced:
        setattr(one, name, attributes[name])
    return bool(replaced) or now.keys() != attributes.keys()


def _no_index(got: str) -> CheckpointError:
    return CheckpointError(
        expected="an index of tensors",
        got=got,
        where=f"file '{INDEX_FILE}'",
        fix="No code was run. torch.distributed.checkpoint does not write such a file: do not load "
        "this checkpoint.",
    )


class Reader(FileSystemReader):
    """Reads a checkpoint's files without running code from them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (pathlib.Path(self.path) / INDEX_FILE).read_bytes()
        found: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Reads entries that are not tensors with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                expected="tensors, numbers, strings, lists and dicts",
                got=str(error).split("\n")[0],
                where=f"'{fqn}'",
                fix="No code was run. Load a checkpoint that fsdp_dynamo has written.",
            ) from error
        set_element(self.original_state_dict, self.mappings[fqn], plain)


class SavePlanner(DefaultSavePlanner):
    """Refuses values that ``LoadPlanner`` would not read, and tracks the entry being written."""

    current: str | None = None

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.current = write_item.index.fqn
        data: Any = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            require_readable(data.getvalue(), f"'{self.current}'")
        return data
