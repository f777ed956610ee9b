"""Reading a checkpoint: everything is checked before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

from fsdp_dynamo.checkpoint import directory as folders
from fsdp_dynamo.checkpoint import manifest, other_states, saving, tensor_states
from fsdp_dynamo.checkpoint.integrity import require_intact, require_present
from fsdp_dynamo.checkpoint.manifest import Manifest
from fsdp_dynamo.checkpoint.other_states import Kept
from fsdp_dynamo.checkpoint.rank_coordination import Concert, meet, torchs_errors
from fsdp_dynamo.checkpoint.saving import OneOrMore, as_list
from fsdp_dynamo.checkpoint.storage_reader import LoadPlanner, Reader
from fsdp_dynamo.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        step: of the run when it was saved.
        path: the checkpoint's folder.
        world_size: ranks that had saved it.
        is_exact: whether states of each rank (random numbers, ``per_rank``) were put back, too.
            Not so with another number of ranks: nobody can say which rank's are whose.
    """

    step: int
    path: Path
    world_size: int
    is_exact: bool


def load(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore = (),
    *,
    step: int | None = None,
    shared: Mapping[str, Kept] | None = None,
    per_rank: Mapping[str, Kept] | None = None,
) -> Loaded | None:
    """Load a checkpoint of ``save`` into a model of any sharding; every rank must call it.

    All files are compared with their checksums first, each by one of the ranks. An optimizer need
    not have made a step.

    Args:
        folder: of all checkpoints of the run.
        model: of the same parameters as the one that was saved, sharded in any way or not.
        optimizers: one or several; leave them out to load the model only.
        step: which one to load; ``None``: the newest complete one.
        shared: as for ``save``; those that are given are put back.
        per_rank: as for ``save``; those that are given are put back.

    Returns:
        What was loaded; ``None`` where there is no checkpoint at all and ``step`` is not given.

    Raises:
        CheckpointError: a file is missing or damaged (names it, and the FQNs it holds), or the
            checkpoint is one of another model, or of a newer format. On every rank; nothing was
            changed. Also where a rank has died, or does not come.
        DivergenceError: ranks want to load something different.
        FSDPTypeError: something in ``optimizers``, ``shared`` or ``per_rank`` is not what it is to
            be; nothing was changed.
        FSDPValueError: an optimizer's parameters or groups are not those that were saved; nothing
            was changed.
    """
    kept, own = dict(shared or {}), dict(per_rank or {})
    failure = saving.failure_of_last()
    names = (tuple(sorted(kept)), tuple(sorted(own)))
    concert = meet("checkpoint to load", f"step {step!r}, states {names}")
    given: list[list[torch.optim.Optimizer]] = []

    def check() -> None:
        if failure is not None:
            raise failure
        other_states.require_stateful(kept, "shared")
        other_states.require_stateful(own, "per_rank")
        given.append(as_list(optimizers))

    concert.all(check)
    path = concert.first(lambda: folders.find(Path(folder), step))
    if path is None:
        return None
    found = _checked(concert, path, names)
    is_exact = found.world_size == concert.size
    states: list[tuple[Any, Any]] = []
    concert.all(lambda: states.append(_small_states(path, concert.rank, is_exact)))
    shared_states, own_states = states[0]
    _load_tensors(concert, path, model, given[0], shared_states["model"])
    concert.all(lambda: _put_back(shared_states["shared"], own_states, kept, own))
    if not is_exact:
        warnings.warn(
            f"'{path}' was saved by {found.world_size} ranks, and {concert.size} load it: states "
            "of single ranks (random numbers, per_rank) stay as they are.",
            stacklevel=2,
        )
    return Loaded(found.step, path, found.world_size, is_exact)


def _checked(concert: Concert, path: Path, names: tuple[tuple[str, ...], ...]) -> Manifest:
    def check() -> Manifest:
        found = manifest.read(path)
        for kind, wanted, saved in zip(
            ("shared", "per_rank"), names, (found.shared, found.per_rank), strict=True
        ):
            _require_names(path, kind, wanted, saved)
        require_present(path, found)
        return found

    found = concert.all(check)[0]
    concert.all(lambda: require_intact(path, found, concert.rank, concert.size))
    return found


def _load_tensors(
    concert: Concert,
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    others: Mapping[str, Any],
) -> None:
    """The states of optimizers first, into new memory: until all of it fits, nothing is changed."""
    reader = Reader(path)
    index = reader.read_metadata()
    states: dict[str, dict[str, Any]] = {}

    def prepare() -> None:
        states["model"] = tensor_states.model_to_load(index, others, model)
        states["optimizers"] = tensor_states.optimizers_to_load(index, model, optimizers)

    def read(state: dict[str, Any]) -> None:
        alone = concert.group is None
        with torchs_errors():
            state_dict_loader.load(
                state,
                storage_reader=reader,
                planner=LoadPlanner(),
                process_group=concert.group,
                no_dist=alone,
            )

    concert.all(prepare)
    give: list[Callable[[], None]] = []
    if optimizers:
        concert.all(lambda: read(states["optimizers"]))
        concert.all(
            lambda: give.append(tensor_states.giver(states["optimizers"], index, model, optimizers))
        )
    concert.all(lambda: read(states["model"]))
    concert.all(lambda: tensor_states.take(states["model"], others, model))
    for one in give:
        one()


def _small_states(path: Path, rank: int, is_exact: bool) -> tuple[Any, Any]:
    """States of all ranks, and of this one (``None`` where nobody can say which are whose)."""
    shared = other_states.unpacked((path / folders.SHARED).read_bytes())
    if not is_exact:
        return shared, None
    return shared, other_states.unpacked((path / folders.own_file(rank)).read_bytes())


def _put_back(
    shared: Mapping[str, Any], own: Any, kept: Mapping[str, Kept], per_rank: Mapping[str, Kept]
) -> None:
    other_states.give_back(kept, shared)
    if own is not None:
        other_states.give_back(per_rank, own["per_rank"])
        other_states.set_random_state(own["random"])


def _require_names(path: Path, kind: str, wanted: tuple[str, ...], saved: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            expected=f"{kind} states {', '.join(wanted)}",
            got=f"a checkpoint without '{missing[0]}' (it has: {', '.join(saved) or 'none'})",
            where=f"checkpoint '{path}'",
            fix="Leave out what was not saved.",
        )
