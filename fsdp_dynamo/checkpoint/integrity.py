"""Comparison of a checkpoint's files with its manifest; errors name the affected tensors."""

from __future__ import annotations

import io
import stat
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fsdp_dynamo.checkpoint.directory import SHARED_FILE, rank_file
from fsdp_dynamo.checkpoint.manifest import FileChecksum, Manifest, checksum_of
from fsdp_dynamo.checkpoint.storage_reader import INDEX_FILE, Reader
from fsdp_dynamo.checkpoint.throttle import Throttle
from fsdp_dynamo.errors import CheckpointError

_MAX_SHOWN = 3


def require_complete_files(folder: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Compare sizes of files with the manifest, without reading the files.

    Each rank looks at what the first rank has written, and at some ranks' files: mostly not at its
    own, so that ranks that do not see the same storage find out. If each looked at all files, the
    storage would be asked for as many as the square of the number of ranks.

    Args:
        share: number of this rank, which looks at every ``shares``-th of the ranks' files.
        shares: number of ranks.

    Raises:
        CheckpointError: a file is missing, has another size, or is no file of this folder.
    """
    common = [INDEX_FILE, SHARED_FILE]
    for name in (*common, *map(rank_file, range(manifest.world_size))):
        if name not in manifest.files:
            raise _damage_error(folder / name, "a file that the manifest lists", "none", ())
    of_ranks = sorted(name for name in manifest.files if name not in common)
    for name in (*common, *of_ranks[(share + 1) % shares :: shares]):
        expected, size = manifest.files[name], _size(folder / name)
        if size != expected.size:
            got = "no such file" if size is None else f"{size} bytes"
            affected = _entries_beyond(_index(folder, manifest), name, size or 0)
            raise _damage_error(folder / name, f"a file of {expected.size} bytes", got, affected)


def require_checksums(folder: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Compare the checksums of every ``shares``-th file with the manifest.

    Raises:
        CheckpointError: the content of a file has changed.
    """
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in names[share::shares]:
        expected, found = manifest.files[name], checksum_of(folder / name)
        if found != expected:
            affected = _changed_entries(folder, name, _index(folder, manifest))
            got = f"checksum {found.crc32:08x}"
            raise _damage_error(folder / name, f"checksum {expected.crc32:08x}", got, affected)


def require_readback(path: Path, written: FileChecksum, throttle: Throttle) -> None:
    """Read a file back and compare it with what was written.

    Raises:
        CheckpointError: the content differs.
    """
    found = checksum_of(path, throttle)
    if found != written:
        raise CheckpointError(
            expected=f"{written.size} bytes with checksum {written.crc32:08x}, as written",
            got=f"{found.size} bytes with checksum {found.crc32:08x}",
            where=f"file '{path}'",
            fix="The storage does not return the bytes it was given: check it, save elsewhere.",
        )


def _size(path: Path) -> int | None:
    """Of a file.

    Raises:
        CheckpointError: a folder, a device, or a link to another folder.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    is_here = path.resolve().parent == path.parent.resolve()
    if not is_here or not stat.S_ISREG(found.st_mode):
        got = "another kind of file" if is_here else f"a link to '{path.resolve()}'"
        raise _damage_error(path, "a file in this folder", got, ())
    return found.st_size


def _index(folder: Path, manifest: Manifest) -> Metadata | None:
    """The index of all tensors; ``None`` if it is itself missing or damaged."""
    path = folder / INDEX_FILE
    if not path.exists() or checksum_of(path) != manifest.files[INDEX_FILE]:
        return None
    return Reader(folder).read_metadata()


def _entries(index: Metadata | None, name: str) -> Iterator[tuple[str, Any]]:
    """FQN and location of each entry of a file."""
    for key, location in (index.storage_data if index is not None else {}).items():
        if location.relative_path == name:
            yield key.fqn, location


def _entries_beyond(index: Metadata | None, name: str, size: int) -> list[str]:
    """Entries of a file that do not lie within its first ``size`` bytes."""
    return [fqn for fqn, where in _entries(index, name) if where.offset + where.length > size]


def _changed_entries(folder: Path, name: str, index: Metadata | None) -> list[str]:
    """Entries of a file that have changed; each is a zip file with checksums of its own.

    All entries, if the change lies between them.
    """
    entries = list(_entries(index, name))
    with (folder / name).open("rb") as file:
        found = [fqn for fqn, location in entries if not _passes_crc(file, location)]
    return found or [fqn for fqn, _ in entries]


def _passes_crc(file: io.BufferedReader, location: Any) -> bool:
    file.seek(location.offset)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(location.length))) as entry:
            return entry.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError):
        return False


def _damage_error(path: Path, expected: str, got: str, affected: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        expected=expected,
        got=got,
        where=f"file '{path}', {_description(path, affected)}",
        fix="Nothing was loaded. Load an older step, or restore the file from a copy.",
    )


def _description(path: Path, affected: Sequence[str]) -> str:
    names = list(dict.fromkeys(affected))
    if names:
        listed = ", ".join(f"'{name}'" for name in names[:_MAX_SHOWN])
        num_more = len(names) - _MAX_SHOWN
        return f"containing {listed}" + (f" and {num_more} more" if num_more > 0 else "")
    kinds = {INDEX_FILE: "the index of all tensors", SHARED_FILE: "states shared by all ranks"}
    return kinds.get(path.name, "states of one rank")
