"""A folder of checkpoints of one run, and how one of them comes to be and goes.

::

    run/
        step-0000000100/              complete: its name says so
        step-0000000200/
            manifest.json             what is in it: sizes, checksums, format (manifest.py)
            .metadata                 torch.distributed.checkpoint's index
            __0_0.distcp              rank 0's parts of tensors
            __1_0.distcp
            shared.pt                 states that all ranks have in common, by rank 0
            rank-0.pt                 states that rank 0 alone has
            rank-1.pt
        step-0000000300.part/         being written, or left by a run that was killed

Nothing is ever written into a checkpoint that has its final name: renaming a folder is atomic, so
whoever looks finds all of it or nothing. It goes the other way round.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from fsdp_dynamo.errors import CheckpointError, explain

MANIFEST = "manifest.json"
SHARED = "shared.pt"
_COMPLETE = re.compile(r"step-(\d{10,})(?:-(\d+))?")
_LEFTOVERS = ("step-*.part", "step-*.gone")


def own_file(rank: int) -> str:
    """The name of the file of what one rank alone has."""
    return f"rank-{rank}.pt"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Steps and folders of complete checkpoints, the newest last.

    A step that was saved again counts once.
    """
    found: dict[int, tuple[int, Path]] = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _COMPLETE.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        step, repeat = int(match[1]), int(match[2] or 0)
        if step not in found or repeat > found[step][0]:
            found[step] = (repeat, path)
    return [(step, found[step][1]) for step in sorted(found)]


def find(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of a step, or the newest; ``None``: there is no checkpoint at all.

    Raises:
        CheckpointError: there is none of this step.
    """
    there = complete(folder)
    if step is None:
        return there[-1][1] if there else None
    for number, path in there:
        if number == step:
            return path
    listed = ", ".join(str(number) for number, _ in there)
    raise CheckpointError(
        explain(
            expected=f"one of the steps {listed or '(there is none)'}",
            got=f"step {step}",
            where=f"checkpoints in '{folder}'",
            fix="Leave step out to load the newest.",
        )
    )


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder to write to; remove what killed runs have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _LEFTOVERS:
        for path in folder.glob(pattern):
            shutil.rmtree(path)
    name = f"step-{step:010d}"
    repeat = 0
    while (folder / (name if not repeat else f"{name}-{repeat}")).exists():
        repeat += 1
    part = folder / f"{name if not repeat else f'{name}-{repeat}'}.part"
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
    """Remove all but the newest ``last`` checkpoints (``None``: none), and repeated steps."""
    there = complete(folder)
    kept = {path for _, path in (there if last is None else there[-last:])}
    for path in folder.iterdir():
        if _COMPLETE.fullmatch(path.name) and path.is_dir() and path not in kept:
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
