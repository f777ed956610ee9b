"""A checkpoint folder: whole parameters once, and what only one rank knows in a file a rank.

::

    checkpoint/
        run.json     step, losses so far, and what must be the same to go on
        model.pt     full state dict with plain FQNs, written by rank 0
        rank0.pt     rank 0's optimizer state (of its shards) and random number states
        rank1.pt     ...

It is written under another name and renamed when complete, so a run that is stopped while it
saves leaves the checkpoint before in place.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo import FSDP


def save(
    folder: Path,
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    data_generator: torch.Generator,
    run: dict[str, Any],
) -> None:
    """Write a checkpoint in place of an older one; every rank must call it.

    Args:
        folder: where it will be; its parent must exist.
        data_generator: this rank's generator of batches; its state is saved.
        run: what ``read_run`` will return; must fit into JSON.
    """
    rank = dist.get_rank()
    draft = folder.with_name(folder.name + ".part")
    if rank == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
    dist.barrier()
    parameters = model.state_dict()  # collective: whole tensors on every rank
    own = {
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "data_rng": data_generator.get_state(),
    }
    torch.save(own, draft / f"rank{rank}.pt")
    if rank == 0:
        torch.save(parameters, draft / "model.pt")
        (draft / "run.json").write_text(json.dumps(run, indent=2))
    dist.barrier()
    if rank == 0:
        before = folder.with_name(folder.name + ".before")
        shutil.rmtree(before, ignore_errors=True)
        if folder.exists():
            folder.rename(before)
        draft.rename(folder)
        shutil.rmtree(before, ignore_errors=True)
    dist.barrier()


def read_run(folder: Path, must_equal: dict[str, Any]) -> dict[str, Any]:
    """What ``save`` was given as ``run``.

    Raises:
        SystemExit: if there is no checkpoint, or an entry of ``must_equal`` has another value.
    """
    path = folder / "run.json"
    if not path.exists():
        raise SystemExit(
            f"--resume: expected a checkpoint in '{folder}', found none. "
            "Run once without --resume, or name the run's folder with --out."
        )
    run: dict[str, Any] = json.loads(path.read_text())
    for name, value in must_equal.items():
        if run.get(name) != value:
            raise SystemExit(
                f"--resume: expected {name} {run.get(name)}, as in the checkpoint '{folder}', "
                f"got {value}. Start it as the saved run was started, or drop --resume."
            )
    return run


def load(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_generator: torch.Generator,
) -> None:
    """Put a checkpoint's tensors back; each rank reads its own part and no rank waits."""
    parameters = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(parameters)
    path = folder / f"rank{dist.get_rank()}.pt"
    own = torch.load(path, map_location="cpu", weights_only=True)
    optimizer.load_state_dict(own["optimizer"])
    torch.set_rng_state(own["rng"])
    data_generator.set_state(own["data_rng"])
