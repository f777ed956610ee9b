"""The checkpoint folder of a run: its layout, and how checkpoints are created and removed.

::

    run/
        owner.json                    the run that saves there (``coordination.Owner``)
        000001-step-100/              complete, as its name shows
        000002-step-200/
            manifest.json             contents: sizes, checksums, format (manifest.py)
            .metadata                 torch.distributed.checkpoint's index
            __0_0.distcp              rank 0's parts of tensors
            __1_0.distcp
            shared.pt                 states shared by all ranks, written by rank 0
            rank-0.pt                 states of rank 0 only
            rank-1.pt
        000003-step-300.part/         being written, or left by a run that was killed

A checkpoint is never modified under its final name. Renaming a folder is atomic, so a reader sees
all of a checkpoint or none of it; removal renames first, too. The leading number gives the order of
saving: a run that was resumed from an earlier step has newer checkpoints of lower steps.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path

from fsdp_dynamo.checkpoint.coordination import claim
from fsdp_dynamo.errors import CheckpointError

MANIFEST = "manifest.json"
SHARED_FILE = "shared.pt"
_COMPLETE = re.compile(r"(\d+)-step-(\d+)")
_ANY = re.compile(_COMPLETE.pattern + r"(\.part|\.gone)?")


def rank_file(rank: int) -> str:
    """Name of the file with the states of one rank."""
    return f"rank-{rank}.pt"


def complete(folder: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of the complete checkpoints, in the order of saving."""
    return [(step, path) for _, step, path in sorted(_numbered(Path(folder), _COMPLETE))]


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, int, Path]]:
    """Number, step and path of each folder whose name matches."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    matches = [(pattern.fullmatch(path.name), path) for path in paths]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]


def find(folder: Path, step: int | None, *, missing_ok: bool) -> Path | None:
    """The newest checkpoint, or the newest of ``step``.

    Returns:
        Its path; ``None`` if there is no checkpoint, ``step`` is not given, and ``missing_ok``.

    Raises:
        CheckpointError: no checkpoint (of this step), or ``folder`` is a file, a single checkpoint,
            or holds checkpoints of ``torch.distributed.checkpoint``.
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
    """Raise if a folder without complete checkpoints is, or holds, something else to load."""
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
    """A folder, or the first one in it, with an index of torch's; incomplete ones of ours aside."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    candidates = (folder, *[path for path in inside if not _ANY.fullmatch(path.name)])
    return next((path for path in candidates if (path / ".metadata").is_file()), None)


def create_partial(folder: Path, step: int) -> Path:
    """Create an empty folder to write to, and remove the incomplete ones of killed runs.

    Raises:
        CheckpointError: another run saves there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim(folder)
    found = _numbered(folder, _ANY)
    for _, _, path in found:
        if path.suffix:
            _remove(path)
    number = 1 + max((number for number, _, _ in found), default=0)
    part = folder / f"{number:06d}-step-{step}.part"
    part.mkdir()
    return part


def publish(part: Path) -> Path:
    """Give a folder its final name; durable once this returns."""
    fsync_folder(part)
    path = part.with_suffix("")
    part.rename(path)
    fsync_folder(path.parent)
    return path


def remove_old(folder: Path, keep_last: int | None) -> None:
    """Remove all but the newest ``keep_last`` checkpoints; ``None``: keep all."""
    for _, path in complete(folder)[:-keep_last] if keep_last else ():
        _remove(path)


_told: set[Path] = set()
"""Folders that could not be removed, of which a warning has been given."""


def _remove(path: Path) -> None:
    """Remove a folder, or say once why it stays: no reason to stop, as others are complete."""
    gone = path if path.suffix else path.with_name(f"{path.name}.gone")
    try:
        if gone != path:
            path.rename(gone)  # a partly removed checkpoint must not look complete
        shutil.rmtree(gone)
    except OSError as error:
        if path not in _told and gone not in _told:
            warnings.warn(
                f"an old checkpoint, '{path}', could not be removed and takes space: {error}. "
                "Newer ones are complete; each save tries again.",
                stacklevel=2,
            )
        _told.update((path, gone))


def discard(part: Path) -> None:
    """Remove a folder that will not be published."""
    shutil.rmtree(part, ignore_errors=True)


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that they survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
