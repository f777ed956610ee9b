"""A checkpoint's manifest: sizes and checksums of its files, and the states that it contains.

The manifest is written last, and is read and checked first. Checksums are CRC-32: they detect
corruption by disks and networks, not deliberate tampering.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_dynamo.checkpoint.directory import MANIFEST
from fsdp_dynamo.errors import CheckpointError

FORMAT = 1
_FIELDS = {"step": int, "world_size": int, "shared": list, "per_rank": list, "files": dict}


@dataclass(frozen=True)
class FileChecksum:
    """A file's size in bytes and its CRC-32."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        step: of the training run.
        world_size: number of ranks that wrote it.
        shared: names of the states shared by all ranks.
        per_rank: names of the states of single ranks.
        files: all files except the manifest, by name.
        format: version of the layout.
    """

    step: int
    world_size: int
    shared: tuple[str, ...]
    per_rank: tuple[str, ...]
    files: Mapping[str, FileChecksum]
    format: int = FORMAT


def checksum_of(path: Path, throttle: Throttle | None = None) -> FileChecksum:
    """Checksum of a file, which is read as a whole."""
    size = crc = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            crc = zlib.crc32(buffer[:count], crc)
            size += count
            if throttle is not None:
                throttle.pause()
    return FileChecksum(size, crc)


def write(manifest: Manifest, folder: Path) -> None:
    """Write a manifest with a checksum of its own."""
    content = _canonical(asdict(manifest))
    text = f'{{"crc32": {zlib.crc32(content.encode())},\n"content": {content}}}\n'
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: it is missing, damaged, of a newer format, lacks a field, or lists files
            elsewhere. Unknown fields are ignored.
    """
    path = folder / MANIFEST
    if path.exists() and not path.is_file():
        raise _read_error(path, "a manifest", "another kind of file")
    try:
        given = json.loads(path.read_text())
        content = given["content"]
        is_whole = zlib.crc32(_canonical(content).encode()) == given["crc32"]
    except FileNotFoundError:
        raise _read_error(path, "a manifest", "no such file") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _read_error(path, "a manifest", f"something unreadable ({error})") from None
    if not is_whole:
        raise _read_error(path, "content that fits its checksum", "a damaged file")
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise _read_error(path, "a manifest with a format", "another file")
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"file '{path}': expected format {FORMAT} or older, got format {content['format']}. It "
            "was written by a newer fsdp_dynamo: upgrade to load it."
        )
    return _manifest(path, content)


def _manifest(path: Path, content: Mapping[str, Any]) -> Manifest:
    """Manifest of the known fields; a newer version with the same layout may have more."""
    for name, kind in _FIELDS.items():
        if type(content.get(name)) is not kind:
            raise _read_error(path, f"a field '{name}', {kind.__name__}", repr(content.get(name)))
    for name in content["files"]:
        if name in ("", ".", "..") or Path(name).name != name:
            raise _read_error(path, "names of files in this folder", repr(name))
    return Manifest(
        step=content["step"],
        world_size=content["world_size"],
        shared=tuple(content["shared"]),
        per_rank=tuple(content["per_rank"]),
        files={name: _file_checksum(path, name, one) for name, one in content["files"].items()},
        format=content["format"],
    )


def _file_checksum(path: Path, name: str, content: Any) -> FileChecksum:
    try:
        size, crc = content["size"], content["crc32"]
    except (KeyError, TypeError):
        raise _read_error(path, f"size and crc32 of file '{name}'", repr(content)) from None
    return FileChecksum(size, crc)


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _read_error(path: Path, expected: str, got: str) -> CheckpointError:
    return CheckpointError(
        f"file '{path}': expected {expected}, got {got}. Load an older step, or restore the file "
        "from a copy."
    )


# -- throttle --------------------------------------------------------------------------------------
# Background work that leaves most of the processor to training.


CHUNK_BYTES = 1 << 20
"""Bytes processed between two pauses."""

_MIN_WORK_S = 2e-3


class Throttle:
    """Limits the processor time of one thread.

    Args:
        duty_cycle: fraction of the time that the thread may work; 1: no pauses.
    """

    def __init__(self, duty_cycle: float = 1.0) -> None:
        self._pause_per_second = 1.0 / duty_cycle - 1.0
        self._worked_at_pause = 0.0

    def begin(self) -> None:
        """Count this thread's work from now on."""
        self._worked_at_pause = time.thread_time()

    def pause(self) -> None:
        """Sleep in proportion to the work since the last pause; call it often."""
        worked = time.thread_time() - self._worked_at_pause
        if self._pause_per_second > 0 and worked > _MIN_WORK_S:
            time.sleep(worked * self._pause_per_second)
            self._worked_at_pause = time.thread_time()

    def chunks(self, view: memoryview) -> Iterator[memoryview]:
        """A buffer in chunks, with a pause after each."""
        for begin in range(0, len(view), CHUNK_BYTES):
            yield view[begin : begin + CHUNK_BYTES]
            self.pause()
