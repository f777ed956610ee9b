"""``inspect_graphs``: compiled graphs after every stage, as files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp_dynamo.dynamo.artifacts import record_artifacts
from fsdp_dynamo.errors import FSDPStateError, FSDPValueError, how_to_install
from fsdp_dynamo.observe.inspection.listings import (
    Listing,
    emit_decompiled,
    find_depyf,
    listings_of,
)


@dataclass
class Inspection:
    """Result of ``inspect_graphs``, filled when the context exits.

    Attributes:
        folder: folder of the files; ``None`` on ranks that write none.
        listings: every graph at every stage; every rank has them.
    """

    folder: Path | None
    listings: list[Listing] = field(default_factory=list)


@contextmanager
def inspect_graphs(folder: str | Path, rank: int | None = 0) -> Iterator[Inspection]:
    """Write every graph that ``torch.compile`` makes of the steps inside; all ranks must enter it.

    ::

        with fsdp_dynamo.inspect_graphs("out/"):
            step(batch).sum().backward()

    The folder gets one file per graph and stage, named by unit, phase and stage
    (``layers.3.backward.after_planner.py``; ``_whole`` is a whole step, ``_root`` the root).
    Existing files of these names are overwritten. If a step fails, the graphs compiled before it
    are written.

    Everything is compiled again, without caches; results do not change. Without depyf (the extra
    ``inspection``) the decompiled code is left out, with a warning.

    Args:
        folder: created if it does not exist.
        rank: the rank that writes; ``None``: every rank, into ``rank0``, ``rank1`` and so on.

    Raises:
        FSDPValueError: there is no such rank.
        FSDPStateError: on exit, if nothing was compiled inside.
    """
    inspection = Inspection(_folder_of_this_rank(Path(folder), rank))
    depyf = find_depyf()
    if depyf is None and inspection.folder is not None:
        warnings.warn(
            "inspect_graphs(): depyf is not installed, so the decompiled code "
            "(*.dynamo.decompiled.py) is left out; everything else is written. "
            f"To get it: {how_to_install('inspection')}.",
            stacklevel=3,
        )
    torch.compiler.reset()
    completed = False
    with ExitStack() as stack:
        no_caches = {"fx_graph_cache": False, "fx_graph_remote_cache": False}
        stack.enter_context(torch._inductor.config.patch(no_caches))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        artifacts = stack.enter_context(record_artifacts())
        stack.enter_context(emit_decompiled(depyf))
        try:
            yield inspection
            completed = True
        finally:  # also after an error: the graphs before a failed compilation help to find it
            inspection.listings = listings_of(artifacts)
            if inspection.folder is not None:
                for listing in inspection.listings:
                    path = inspection.folder / listing.file_name
                    path.write_text(listing.text, encoding="utf-8")
    if completed and not inspection.listings:
        raise FSDPStateError(
            "inspect_graphs(): expected a step of a compiled model inside the context, got none: "
            "nothing was compiled. Call what torch.compile returned inside, not the model itself."
        )


def _folder_of_this_rank(folder: Path, rank: int | None) -> Path | None:
    own = _own_rank()
    if rank is not None and not 0 <= rank < _world_size():
        raise FSDPValueError(
            f"inspect_graphs(), 'rank': expected a rank from 0 to {_world_size() - 1}, or None for "
            f"all, got {rank!r}. Name the rank that should write the files."
        )
    if rank is None:
        folder = folder / f"rank{own}"
    elif rank != own:
        return None
    folder.mkdir(parents=True, exist_ok=True)  # now, to fail before the first step
    return folder


def _own_rank() -> int:
    """Return this rank, from torchrun's variables if there is no process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    """Return the number of ranks, from torchrun's variables if there is no process group."""
    known = dist.is_initialized()
    return dist.get_world_size() if known else int(os.environ.get("WORLD_SIZE", "1"))


__all__ = ["Inspection", "Listing", "inspect_graphs"]
