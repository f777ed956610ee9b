"""Manifest of a checkpoint (files with checksums, names of states), and the folder's layout.

The manifest is written last and read first. Checksums are CRC-32: they detect corruption by disks
and networks, not tampering.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import uuid
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp_dynamo.checkpoint.coordination import STATE
from fsdp_dynamo.errors import CheckpointError

FORMAT = 1


_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileChecksum:
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint: names of the auxiliary states, and all files but the manifest."""

    step: int
    world_size: int
    shared: tuple[str, ...]
    per_rank: tuple[str, ...]
    files: Mapping[str, FileChecksum]
    format: int = FORMAT


def checksum_of(path: Path) -> FileChecksum:
    """Read a file and return its checksum."""
    size = crc = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]
            crc = zlib.crc32(buffer[:count], crc)
            size += count
    return FileChecksum(size, crc)


def write(manifest: Manifest, folder: Path) -> None:
    """Write a manifest together with its own checksum, and flush it to disk."""
    content = _canonical(asdict(manifest))
    text = f'{{"crc32": {zlib.crc32(content.encode())},\n"content": {content}}}\n'
    with (folder / MANIFEST).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Read a checkpoint's manifest, and compare its checksum; unknown fields are ignored."""
    path = folder / MANIFEST
    if path.exists() and not path.is_file():
        raise _read_error(path, "another kind of file")
    try:
        given = json.loads(path.read_text())
        content = given["content"]
        if zlib.crc32(_canonical(content).encode()) != given["crc32"]:
            raise _read_error(path, "content that does not fit its checksum")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"file '{path}': expected format {FORMAT} or older, got format "
                f"{content['format']}. It was written by a newer fsdp_dynamo: upgrade to load it."
            )
        files = content["files"].items()
        return Manifest(
            step=content["step"],
            world_size=content["world_size"],
            shared=tuple(content["shared"]),
            per_rank=tuple(content["per_rank"]),
            files={name: FileChecksum(one["size"], one["crc32"]) for name, one in files},
        )
    except FileNotFoundError:
        raise _read_error(path, "no such file") from None
    except (KeyError, TypeError, ValueError) as error:
        raise _read_error(path, f"something unreadable ({error!r})") from None


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _read_error(path: Path, got: str) -> CheckpointError:
    return CheckpointError(
        f"file '{path}': expected a manifest, got {got}. Load an older step, or restore the file "
        "from a copy."
    )


# -- directory -------------------------------------------------------------------------------------
# Layout of a run's checkpoint folder.
#
# ::
#
#     run/
#         owner.json                    the run that saves there
#         000001-step-100/              complete, as its name shows
#         000002-step-200/
#             manifest.json             contents: sizes, checksums, format (manifest.py)
#             .metadata                 torch.distributed.checkpoint's index
#             __0_0.distcp              rank 0's parts of tensors
#             __1_0.distcp
#             shared.pt                 states shared by all ranks, written by rank 0
#             rank-0.pt                 states of rank 0 only
#             rank-1.pt
#         000003-step-300.part/         being written, or left by a run that was killed
#
# A checkpoint is never modified under its final name. Renaming a folder is atomic, so a reader
# sees a whole checkpoint or none; removal renames first, too. The leading number is the order of
# saving, which differs from the order of steps if a run was resumed from an earlier step.


MANIFEST = "manifest.json"
SHARED_FILE = "shared.pt"
_COMPLETE = re.compile(r"(\d+)-step-(\d+)")
_ANY = re.compile(_COMPLETE.pattern + r"(\.part|\.gone)?")


def rank_file(rank: int) -> str:
    """Return the name of the file with the states of one rank."""
    return f"rank-{rank}.pt"


def complete(folder: str | Path) -> list[tuple[int, Path]]:
    """Return step and folder of each complete checkpoint, in the order of saving."""
    return [(step, path) for _, step, path in sorted(_numbered(Path(folder), _COMPLETE))]


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, int, Path]]:
    """Return number, step and path of each folder whose name matches."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    matches = [(pattern.fullmatch(path.name), path) for path in paths]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]


def find(folder: Path, step: int | None, *, missing_ok: bool) -> Path | None:
    """Return the newest checkpoint, or the newest one of ``step``.

    With ``missing_ok`` it returns ``None`` if there is none at all and ``step`` is not given;
    otherwise it raises ``CheckpointError``, which says what ``folder`` is instead.
    """
    found = complete(folder)
    for saved_step, path in reversed(found):
        if step is None or saved_step == step:
            return path
    if not found:
        _require_run_folder(folder)
        if missing_ok and step is None:
            return None
        raise CheckpointError(
            f"'{folder}': expected a complete checkpoint, got "
            f"{'none in this folder' if folder.is_dir() else 'no such folder'}. Pass the folder "
            "that was given to save(), or missing_ok=True if the run may begin without a "
            "checkpoint."
        )
    raise CheckpointError(
        f"checkpoints in '{folder}': expected one of the steps "
        f"{', '.join((str(saved_step) for saved_step, _ in found))}, got step {step}. Leave step "
        "out to load the newest."
    )


def _require_run_folder(folder: Path) -> None:
    """Raise if a folder is a single checkpoint, a file, or contains checkpoints of torch's own."""
    own = _COMPLETE.fullmatch(folder.resolve().name)
    other = _checkpoint_of_torch(folder)
    if own is not None and (folder / MANIFEST).exists():
        got, fix = (
            "one of them",
            f"Pass '{folder.parent}', and step={int(own[2])} to load this one.",
        )
    elif other is not None:
        got = f"a checkpoint of torch.distributed.checkpoint, '{other}'"
        fix = (
            f"Load it with torch.distributed.checkpoint.load(..., checkpoint_id='{other}') and "
            "set_state_dict(): docs/checkpoints.md#without-fsdp_dynamocheckpoint."
        )
    elif folder.is_file():
        got, fix = "a file", "Pass the folder that was given to save()."
    else:
        return
    expected = "the folder of all checkpoints of a run"
    raise CheckpointError(f"'{folder}': expected {expected}, got {got}. {fix}")


def _checkpoint_of_torch(folder: Path) -> Path | None:
    """Return the folder or a folder in it that contains torch's index, except incomplete ours."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    candidates = (folder, *[path for path in inside if not _ANY.fullmatch(path.name)])
    return next((path for path in candidates if (path / ".metadata").is_file()), None)


def create_partial(folder: Path, step: int) -> Path:
    """Create a folder to write to, and remove incomplete folders of killed runs."""
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder)
    found = _numbered(folder, _ANY)
    for _, _, path in found:
        if path.suffix:
            _remove(path)
    number = 1 + max((number for number, _, _ in found), default=0)
    part = folder / f"{number:06d}-step-{step}.part"
    part.mkdir()
    return part


def publish(part: Path) -> Path:
    """Give a folder its final name; when this returns, it survives a power failure."""
    fsync_folder(part)
    path = part.with_suffix("")
    part.rename(path)
    fsync_folder(path.parent)
    return path


def remove_old(folder: Path, keep_last: int | None) -> None:
    """Remove all but the newest ``keep_last`` checkpoints; ``None``: keep all."""
    for _, path in complete(folder)[:-keep_last] if keep_last else ():
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder; if that fails, warn once: the new checkpoint is complete nevertheless."""
    gone = path if path.suffix else path.with_name(f"{path.name}.gone")
    try:
        if gone != path:
            path.rename(gone)  # a partly removed checkpoint must not look complete
        shutil.rmtree(gone)
    except OSError as error:
        if not {path, gone} & STATE.unremovable:
            warnings.warn(
                f"an old checkpoint, '{path}', could not be removed and takes space: {error}. "
                "Newer ones are complete; each save tries again.",
                stacklevel=2,
            )
        STATE.unremovable.update((path, gone))


def discard(part: Path) -> None:
    """Remove a folder that will not be published."""
    shutil.rmtree(part, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- owner -----------------------------------------------------------------------------------------
# Two runs that save into one folder would remove each other's checkpoints as old ones. So the first
# rank writes a text about its run into the folder at its first save there. A restarted run takes
# the folder over; if the previous run is still alive, its next save finds another text and raises.


OWNER_FILE = "owner.json"


def _claim(folder: Path) -> None:
    """Make this process's run the owner of a folder, unless another run has taken it over."""
    path, own = folder / OWNER_FILE, STATE.runs.get(folder.resolve())
    found = path.read_text() if path.exists() else None
    if own is not None and found == own:
        return
    if own is not None and found is not None:
        raise CheckpointError(
            f"'{folder}': expected no run but this one ({own}) to save there, got another run "
            f"({found}). Give each run a folder of its own. If the other run has ended and this "
            f"one should continue, remove '{OWNER_FILE}'. Nothing was written."
        )
    run = uuid.uuid4().hex
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    about = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "run": run}
    own = json.dumps(about)
    draft = folder / f"{OWNER_FILE}.{run}"
    draft.write_text(own)
    draft.replace(path)
    STATE.runs[folder.resolve()] = own
