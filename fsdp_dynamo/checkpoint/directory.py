"""A folder of checkpoints of one run, and how one of them comes to be and goes.

::

    run/
        000001-step-100/              complete: its name says so
        000002-step-200/
            manifest.json             what is in it: sizes, checksums, format (manifest.py)
            .metadata                 torch.distributed.checkpoint's index
            __0_0.distcp              rank 0's parts of tensors
            __1_0.distcp
            shared.pt                 states that all ranks have in common, by rank 0
            rank-0.pt                 states that rank 0 alone has
            rank-1.pt
        000003-step-300.part/         being written, or left by a run that was killed

Nothing is ever written into a checkpoint that has its final name: renaming a folder is atomic, so
whoever looks finds all of it or nothing. It goes the other way round. The number in front tells
which one is the newest: a run that went back to an earlier step has newer ones of lower steps.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from fsdp_dynamo.errors import CheckpointError

MANIFEST = "manifest.json"
SHARED = "shared.pt"
_COMPLETE = re.compile(r"(\d+)-step-(\d+)")
_ANY = re.compile(_COMPLETE.pattern + r"(\.part|\.gone)?")


def own_file(rank: int) -> str:
    """The name of the file of what one rank alone has."""
    return f"rank-{rank}.pt"


def complete(folder: str | Path) -> list[tuple[int, Path]]:
    """Steps and folders of complete checkpoints, in the order in which they were saved."""
    return [(step, path) for _, step, path in sorted(_numbered(Path(folder), _COMPLETE))]


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[tuple[int, int, Path]]:
    """Number, step and folder of each."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    matches = [(pattern.fullmatch(path.name), path) for path in paths]
    return [(int(match[1]), int(match[2]), path) for match, path in matches if match]


def find(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of a step, or the newest; ``None``: there is no checkpoint at all.

    Raises:
        CheckpointError: there is none of this step, or ``folder`` is no folder of checkpoints but
            one of them, or a file.
    """
    _require_folder_of_checkpoints(folder)
    there = complete(folder)
    if step is None:
        return there[-1][1] if there else None
    for number, path in reversed(there):
        if number == step:
            return path
    listed = ", ".join(str(number) for number, _ in there)
    raise CheckpointError(
        expected=f"one of the steps {listed or '(there is none)'}",
        got=f"step {step}",
        where=f"checkpoints in '{folder}'",
        fix="Leave step out to load the newest.",
    )


def _require_folder_of_checkpoints(folder: Path) -> None:
    own = _COMPLETE.fullmatch(folder.resolve().name)
    if own is not None and (folder / MANIFEST).exists():
        got, fix = (
            "one of them",
            f"Pass '{folder.parent}', and step={int(own[2])} to load this one.",
        )
    elif folder.is_file():
        got, fix = "a file", "Pass the folder that was given to save()."
    else:
        return
    expected = "the folder of all checkpoints of a run"
    raise CheckpointError(expected=expected, got=got, where=f"'{folder}'", fix=fix)


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder to write to; remove what killed runs have left."""
    folder.mkdir(parents=True, exist_ok=True)
    there = _numbered(folder, _ANY)
    for _, _, path in there:
        if path.suffix:
            shutil.rmtree(path)
    number = 1 + max((number for number, _, _ in there), default=0)
    part = folder / f"{number:06d}-step-{step}.part"
    part.mkdir()
    return part


def publish(part: Path) -> Path:
    """Give a folder its final name, for good once this has returned."""
    sync_folder(part)
    path = part.with_suffix("")
    part.rename(path)
    sync_folder(path.parent)
    return path


def keep(folder: Path, last: int | None) -> None:
    """Remove all but the newest ``last`` checkpoints; ``None``: keep all."""
    for _, path in complete(folder)[:-last] if last else ():
        gone = path.with_name(f"{path.name}.gone")
        path.rename(gone)  # half a checkpoint must not look like one
        shutil.rmtree(gone)


def discard(part: Path) -> None:
    """Remove a folder that will not become a checkpoint."""
    shutil.rmtree(part, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make sure that names in a folder outlast the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
