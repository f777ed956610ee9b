"""The folder of one checkpoint of a ``transformers.Trainer``, with ours inside.

::

    output_dir/
        checkpoint-100/
            fsdp_dynamo/000001-step-100/    model, optimizer, scheduler, random numbers of each rank
            trainer_state.json              written last, by Trainer
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_dynamo import checkpoint
from fsdp_dynamo.checkpoint.auxiliary_states import random_state, set_random_state
from fsdp_dynamo.errors import CheckpointError

FOLDER = "fsdp_dynamo"
STATE = "trainer_state.json"


def is_ours(path: str | Path) -> bool:
    """Whether a Trainer's checkpoint contains a complete one of ours."""
    return bool(checkpoint.complete(Path(path) / FOLDER))


def newest(output_dir: str | Path) -> str | None:
    """The newest complete checkpoint, for ``resume_from_checkpoint``.

    Args:
        output_dir: the Trainer's output folder.

    Returns:
        The folder of the checkpoint of the highest step; ``None``: there is none.
    """
    folders = {
        int(match[1]): path
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
    }
    for step in sorted(folders, reverse=True):
        if is_ours(folders[step]) and _is_readable(folders[step] / STATE):
            return str(folders[step])
    return None


def _is_readable(path: Path) -> bool:
    try:
        json.loads(path.read_text())
    except (OSError, ValueError):
        return False
    return True


def save(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, step: int
) -> None:
    """Write our part of a Trainer's checkpoint; every rank must call it."""
    shared = {"scheduler": scheduler}
    checkpoint.save(Path(path) / FOLDER, model, optimizer, step=step, shared=shared, keep_last=1)


def load(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any
) -> dict[str, Any] | None:
    """Restore a checkpoint, except the random state, which is restored when training resumes.

    Returns:
        This rank's random state; ``None`` if other ranks saved the checkpoint.

    Raises:
        CheckpointError: see ``checkpoint.load``.
    """
    before = random_state()
    shared = {"scheduler": scheduler}
    loaded = checkpoint.load(Path(path) / FOLDER, model, optimizer, shared=shared)
    saved = random_state()
    set_random_state(before)
    return saved if loaded is not None and loaded.is_exact else None


def load_model(path: str | Path, model: nn.Module) -> None:
    """Restore only the model."""
    before = random_state()
    checkpoint.load(Path(path) / FOLDER, model)
    set_random_state(before)


def require_no_other(path: str | Path) -> None:
    """Refuse an optimizer's state that a Trainer without sharding has saved.

    Raises:
        CheckpointError: there is one.
    """
    for name in ("optimizer.pt", "optimizer.bin"):
        if (Path(path) / name).exists():
            raise CheckpointError(
                expected=f"a folder '{FOLDER}' with a checkpoint of FSDPTrainer",
                got=f"'{name}' of another Trainer, whose states are of whole parameters",
                where=f"checkpoint '{path}'",
                fix="Load its model with from_pretrained() and begin anew.",
            )


__all__ = ["newest"]
