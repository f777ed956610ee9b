"""What is wrong with a checkpoint's files, and which tensors that concerns."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fsdp_dynamo.checkpoint.directory import SHARED
from fsdp_dynamo.checkpoint.manifest import Manifest, Sum, sum_of
from fsdp_dynamo.checkpoint.storage_reader import INDEX, Reader
from fsdp_dynamo.checkpoint.throttle import Pace
from fsdp_dynamo.errors import CheckpointError

_SHOWN = 3


def require_present(folder: Path, manifest: Manifest) -> None:
    """Compare the sizes of all files with the manifest; reads none of them.

    Raises:
        CheckpointError: a file is missing or of another size.
    """
    sizes = {name: _size(folder / name) for name in manifest.files}
    wrong = [name for name, kept in manifest.files.items() if sizes[name] != kept.size]
    for name in wrong:
        kept, size = manifest.files[name], sizes[name]
        got = "no such file" if size is None else f"{size} bytes"
        concerned = _beyond(_index(folder, manifest), name, size or 0)
        raise _damaged(folder / name, f"a file of {kept.size} bytes", got, concerned)


def require_intact(folder: Path, manifest: Manifest, share: int, shares: int) -> None:
    """Compare the checksums of every ``shares``-th file with the manifest.

    Raises:
        CheckpointError: a file has changed.
    """
    names = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    for name in names[share::shares]:
        kept, found = manifest.files[name], sum_of(folder / name)
        if found != kept:
            concerned = _changed(folder, name, _index(folder, manifest))
            got = f"checksum {found.crc32:08x}"
            raise _damaged(folder / name, f"checksum {kept.crc32:08x}", got, concerned)


def require_written(path: Path, meant: Sum, pace: Pace) -> None:
    """Read a file back.

    Raises:
        CheckpointError: it is not what was written.
    """
    found = sum_of(path, pace)
    if found != meant:
        raise CheckpointError(
            expected=f"{meant.size} bytes with checksum {meant.crc32:08x}, as written",
            got=f"{found.size} bytes with checksum {found.crc32:08x}",
            where=f"file '{path}'",
            fix="The storage returns other bytes than it was given: check it, save elsewhere.",
        )


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _index(folder: Path, manifest: Manifest) -> Metadata | None:
    """The index of all tensors; ``None``: it is missing or damaged itself, and not to be read."""
    path = folder / INDEX
    if not path.exists() or sum_of(path) != manifest.files[INDEX]:
        return None
    return Reader(folder).read_metadata()


def _entries(index: Metadata | None, name: str) -> Iterator[tuple[str, Any]]:
    """FQNs and places of what a file holds."""
    for key, place in (index.storage_data if index is not None else {}).items():
        if place.relative_path == name:
            yield key.fqn, place


def _beyond(index: Metadata | None, name: str, size: int) -> list[str]:
    """What of a file is not in its first ``size`` bytes."""
    return [fqn for fqn, place in _entries(index, name) if place.offset + place.length > size]


def _changed(folder: Path, name: str, index: Metadata | None) -> list[str]:
    """What of a file has changed: every entry is a zip file with checksums of its own.

    Everything in the file, if it is between them.
    """
    entries = list(_entries(index, name))
    with (folder / name).open("rb") as file:
        found = [fqn for fqn, place in entries if not _is_whole(file, place)]
    return found or [fqn for fqn, _ in entries]


def _is_whole(file: io.BufferedReader, place: Any) -> bool:
    file.seek(place.offset)
    try:
        with zipfile.ZipFile(io.BytesIO(file.read(place.length))) as entry:
            return entry.testzip() is None
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, ValueError):
        return False


def _damaged(path: Path, expected: str, got: str, concerned: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        expected=expected,
        got=got,
        where=f"file '{path}', {_holding(path, concerned)}",
        fix="Nothing was loaded. Load an older step, or restore the file from a copy.",
    )


def _holding(path: Path, concerned: Sequence[str]) -> str:
    names = list(dict.fromkeys(concerned))
    if names:
        listed = ", ".join(f"'{name}'" for name in names[:_SHOWN])
        return f"in it {listed}" + (f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN))
    kinds: Mapping[str, str] = {
        INDEX: "the index of all tensors",
        SHARED: "states that all ranks have in common",
    }
    return kinds.get(path.name, "states of one rank")
