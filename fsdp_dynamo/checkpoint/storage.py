"""Files of torch.distributed.checkpoint: safe reading, checksums, and checks of integrity."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import stat
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index_classes
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.serialization import _get_layout

from fsdp_dynamo.checkpoint.manifest import (
    SHARED_FILE,
    FileChecksum,
    Manifest,
    checksum_of,
    rank_file,
)
from fsdp_dynamo.checkpoint.states import require_readable
from fsdp_dynamo.errors import CheckpointError, FSDPError, first_line

# -- reading ---------------------------------------------------------------------------------------
# torch.distributed.checkpoint's reader, restricted so that no code from a file runs.
#
# The index is a pickle, and so are entries that are not tensors. Unpickling can call any function
# that the file names. So an index may refer only to the few classes it consists of, and entries are
# read with ``weights_only=True``.


INDEX_FILE = ".metadata"
_ALLOWED_CLASSES: dict[tuple[str, str], Any] = {
    (one.__module__, one.__qualname__): one
    for one in (
        index_classes.BytesStorageMetadata,
        index_classes.ChunkStorageMetadata,
        index_classes.Metadata,
        index_classes.MetadataIndex,
        index_classes.StorageMeta,
        index_classes.TensorProperties,
        index_classes.TensorStorageMetadata,
        index_classes._MEM_FORMAT_ENCODING,
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
"""Objects of this process that a file may refer to, and could set attributes of."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickler of indexes, which refuses every class that an index does not need."""

    def load(self) -> Any:
        """Return the index; raise if the file refers to another class, or changes a class."""
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
    """Undo changes that a pickle makes to the attributes of objects, and raise if there were any.

    The BUILD opcode sets attributes of any object, also of classes. Python's own unpickler could
    refuse that beforehand, but it takes five times as long as the one in C.
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
        f"file '{INDEX_FILE}': expected an index of tensors, got {got}. No code was run. "
        "torch.distributed.checkpoint does not write such a file: do not load this checkpoint."
    )


class Reader(FileSystemReader):
    """Reader of a checkpoint's files that does not run code from them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        content = (pathlib.Path(self.path) / INDEX_FILE).read_bytes()
        found: Metadata = _IndexUnpickler(io.BytesIO(content)).load()
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class LoadPlanner(DefaultLoadPlanner):
    """Planner that reads entries other than tensors with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        fqn = read_item.dest_index.fqn
        try:
            plain = torch.load(value, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"'{fqn}': expected tensors, numbers, strings, lists and dicts, got "
                f"{first_line(error)}. No code was run. Load a checkpoint that fsdp_dynamo "
                "has written."
            ) from error
        set_element(self.original_state_dict, self.mappings[fqn], plain)


class SavePlanner(DefaultSavePlanner):
    """Planner that refuses values that ``LoadPlanner`` would not read."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        data: Any = super().resolve_data(write_item)
        if write_item.type is WriteItemType.BYTE_IO:
            require_readable(data.getvalue(), f"'{write_item.index.fqn}'")
        return data


# -- storage writer --------------------------------------------------------------------------------
# torch.distributed.checkpoint's writer, with checksums, and file names in errors.


class _ChecksummingFile:
    """File with a running checksum of the bytes written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size = self.crc32 = 0
        self.flush, self.close = stream.flush, stream.close

    def fileno(self) -> int:
        """Flush first: torch calls fsync on the result while bytes are still in our buffer."""
        self._stream.flush()
        number: int = self._stream.fileno()
        return number

    def write(self, content: Any) -> int:
        """Write, and update the checksum."""
        view = memoryview(content).cast("B")
        self._stream.write(view)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes so far; files are written sequentially."""
        return self.size


class _ChecksummingFileSystem(FileSystem):
    """File system that collects the checksums of the files it writes."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}
        self.current: Path | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        self.current = Path(path)
        with super().create_stream(path, mode) as stream:
            file = _ChecksummingFile(stream)
            yield file
        self.checksums[self.current.name] = FileChecksum(file.size, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        if Path(path).name in self.checksums:
            self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class Writer(FileSystemWriter):
    """Writer of this rank's files, which collects their checksums."""

    def __init__(self, path: Path) -> None:
        # Copying ahead would use this thread's current device, which is 0 on a new thread.
        super().__init__(path, per_thread_copy_ahead=0)
        self.fs: _ChecksummingFileSystem = _ChecksummingFileSystem()

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Checksums of the files that this rank has written, by name."""
        return self.fs.checksums

    def write_data(self, plan: Any, planner: Any) -> Any:
        with self._path_in_errors():
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        with self._path_in_errors():
            super().finish(metadata, results)

    def write_bytes(self, name: str, content: bytes) -> None:
        """Write a file that is not one of torch's, and flush it to disk."""
        path = Path(self.path) / name
        with self._path_in_errors(), self.fs.create_stream(path, "wb") as stream:
            stream.write(content)
            os.fsync(stream.fileno())

    @contextmanager
    def _path_in_errors(self) -> Iterator[None]:
        try:
            yield
        except FSDPError:
            raise
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"file '{self.fs.current or self.path}': expected to write the whole file, "
                f"got {first_line(error)}. Older checkpoints are unchanged. Make room, or "
                "save elsewhere."
            ) from error


# -- integrity -------------------------------------------------------------------------------------
# A checkpoint's files are compared with its manifest.


def require_complete_files(folder: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Compare the sizes of files with the manifest, without reading the files.

    Rank ``share`` of ``shares`` checks the common files and every ``shares``-th of the rest, but
    mostly not its own: so ranks on different storage find out. If each rank checked all files,
    the storage would get N**2 requests.
    """
    common = [INDEX_FILE, SHARED_FILE]
    for name in (*common, *map(rank_file, range(manifest.world_size))):
        if name not in manifest.files:
            raise _damage_error(folder / name, "an entry in the manifest", "none")
    of_ranks = sorted(name for name in manifest.files if name not in common)
    for name in (*common, *of_ranks[(share + 1) % shares :: shares]):
        expected, size = manifest.files[name], _size(folder / name)
        if size != expected.size:
            got = "no such file" if size is None else f"{size} bytes"
            raise _damage_error(folder / name, f"a file of {expected.size} bytes", got)


def require_checksums(folder: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Read every ``shares``-th file, the largest first, and compare checksums with the manifest."""
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in names[share::shares]:
        expected, found = manifest.files[name], checksum_of(folder / name)
        if found != expected:
            got = f"checksum {found.crc32:08x}"
            raise _damage_error(folder / name, f"checksum {expected.crc32:08x}", got)


def require_readback(path: Path, written: FileChecksum) -> None:
    """Read a file back; raise ``CheckpointError`` if it is not what was written."""
    found = checksum_of(path)
    if found != written:
        raise CheckpointError(
            f"file '{path}': expected {written.size} bytes with checksum {written.crc32:08x}, as "
            f"written, got {found.size} bytes with checksum {found.crc32:08x}. The storage does "
            "not return the bytes it was given: check it, save elsewhere."
        )


def _size(path: Path) -> int | None:
    """Return the size of a file, ``None`` if it is missing; raise for devices and foreign links."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    is_here = path.resolve().parent == path.parent.resolve()
    if not is_here or not stat.S_ISREG(found.st_mode):
        got = "another kind of file" if is_here else f"a link to '{path.resolve()}'"
        raise _damage_error(path, "a file in this folder", got)
    return found.st_size


def _damage_error(path: Path, expected: str, got: str) -> CheckpointError:
    kinds = {INDEX_FILE: "the index of all tensors", SHARED_FILE: "states shared by all ranks"}
    kind = "tensors of one rank" if path.suffix == ".distcp" else "states of one rank"
    return CheckpointError(
        f"file '{path}', {kinds.get(path.name, kind)}: expected {expected}, got {got}. Nothing was "
        "loaded. Load an older step, or restore the file from a copy."
    )
