"""Loading of checkpoints: everything is verified before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader

from fsdp_dynamo.checkpoint import manifest, saving, states
from fsdp_dynamo.checkpoint.coordination import RankCoordinator, coordinate_ranks
from fsdp_dynamo.checkpoint.manifest import Manifest
from fsdp_dynamo.checkpoint.saving import OneOrMore, as_list
from fsdp_dynamo.checkpoint.states import StatefulObject
from fsdp_dynamo.checkpoint.storage import (
    LoadPlanner,
    Reader,
    require_checksums,
    require_complete_files,
)
from fsdp_dynamo.errors import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """Checkpoint that was loaded.

    Attributes:
        step: the run's step when it was saved.
        path: the checkpoint's folder.
        world_size: number of ranks that saved it.
        is_exact: whether random numbers and ``per_rank`` states were restored. They are not if
            another number of ranks saved them.
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
    missing_ok: bool = False,
    shared: Mapping[str, StatefulObject] | None = None,
    per_rank: Mapping[str, StatefulObject] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded | None:
    """Load a checkpoint of ``save`` into a model of any sharding; every rank must call it.

    First all files are compared with their checksums; each rank reads some of them. If an error is
    raised, nothing has changed. Optimizers need no states before.

    Args:
        folder: the run's checkpoint folder.
        model: has the parameters of the saved model, under any sharding or none.
        optimizers: one or several; leave them out to load only the model.
        step: step of the checkpoint to load; ``None``: the newest complete checkpoint.
        missing_ok: return ``None`` if there is no checkpoint yet, as when a run that resumes starts
            for the first time.
        shared: as for ``save``; saved states that are not named here are ignored.
        per_rank: as for ``save``; saved states that are not named here are ignored.
        process_group: as for ``save``.

    Raises:
        CheckpointError: on every rank. There is no checkpoint, or only one of
            ``torch.distributed.checkpoint``; a file is missing or damaged (names the file); the
            checkpoint belongs to another model or has a newer format; a rank has died or did not
            arrive.
        DivergenceError: ranks want to load different steps, states or folders.
        FSDPTypeError: a value of ``optimizers``, ``shared`` or ``per_rank`` has the wrong type.
        FSDPValueError: an optimizer's parameters or groups differ from the saved ones.
    """
    shared, per_rank = dict(shared or {}), dict(per_rank or {})
    saving.finish_pending_save()
    target = Path(folder).absolute()
    names = (tuple(sorted(shared)), tuple(sorted(per_rank)))
    coordinator = coordinate_ranks(
        process_group, "checkpoint to load", f"step {step!r}, states {names}, folder '{target}'"
    )

    def check() -> list[torch.optim.Optimizer]:
        states.require_stateful(shared, "shared")
        states.require_stateful(per_rank, "per_rank")
        return as_list(optimizers)

    optimizers = coordinator.run_locally(check)
    path = coordinator.run_on_first(lambda: manifest.find(target, step, missing_ok=missing_ok))
    if path is None:
        return None
    found = _checked_manifest(coordinator, path, names)
    is_exact = found.world_size == coordinator.size
    shared_states, own_states = coordinator.run_locally(
        lambda: _read_auxiliary_states(path, coordinator.rank, is_exact)
    )
    _load_tensors(coordinator, path, model, optimizers, shared_states["model"])

    def restore() -> None:
        states.restore_states(shared, shared_states["shared"])
        if own_states is not None:
            states.restore_states(per_rank, own_states["per_rank"])
            states.set_random_state(own_states["random"])

    coordinator.run_locally(restore)
    if not is_exact:
        warnings.warn(
            f"'{path}' was saved by {found.world_size} ranks and is loaded by {coordinator.size}: "
            "states of single ranks (random numbers, per_rank) stay as they are.",
            stacklevel=2,
        )
    return Loaded(found.step, path, found.world_size, is_exact)


def _checked_manifest(
    coordinator: RankCoordinator, path: Path, names: tuple[tuple[str, ...], ...]
) -> Manifest:
    """Read the manifest, and compare the wanted states and all files with it.

    Each rank reads the manifest itself: it lists the files of all ranks, so N copies of it would be
    sent if the ranks exchanged it.
    """
    share, shares = coordinator.rank, coordinator.size

    def check() -> Manifest:
        found = manifest.read(path)
        for kind, wanted, saved in zip(
            ("shared", "per_rank"), names, (found.shared, found.per_rank), strict=True
        ):
            _require_names(path, kind, wanted, saved)
        require_complete_files(path, found, share, shares)
        return found

    found = coordinator.run_locally(check)
    coordinator.run_locally(lambda: require_checksums(path, found, share, shares))
    return found


def _load_tensors(
    coordinator: RankCoordinator,
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    extra_states: Mapping[str, Any],
) -> None:
    """Read everything into new memory, and change the model only when all ranks have read it."""
    reader = Reader(path)
    index = coordinator.run_locally(reader.read_metadata)

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            states.model_tensors(index, extra_states, model),
            states.allocate_optim_states(index, model, optimizers),
        )

    def read(state: dict[str, Any]) -> None:
        with coordinator.dcp_errors():
            state_dict_loader.load(
                state,
                storage_reader=reader,
                planner=LoadPlanner(),
                process_group=coordinator.group,
                no_dist=coordinator.group is None,
            )

    model_tensors, optimizer_tensors = coordinator.run_locally(prepare)
    load_optimizers: Callable[[], None] | None = None
    if optimizers:
        coordinator.run_locally(lambda: read(optimizer_tensors))
        load_optimizers = coordinator.run_locally(
            lambda: states.prepare_optimizer_load(optimizer_tensors, index, model, optimizers)
        )
    coordinator.run_locally(lambda: read(model_tensors))
    if load_optimizers is not None:
        before = [(one, one.state, one.param_groups) for one in optimizers]
        try:
            coordinator.run_locally(load_optimizers)
        except Exception:  # load_state_dict() may fail halfway on states of another optimizer
            for optimizer, state, groups in before:
                optimizer.state, optimizer.param_groups = state, groups
            raise
    coordinator.run_locally(lambda: states.load_model(model_tensors, extra_states, model))


def _read_auxiliary_states(path: Path, rank: int, is_exact: bool) -> tuple[Any, Any]:
    """Return the states shared by all ranks, and this rank's own (``None`` unless exact)."""
    shared = states.deserialize((path / manifest.SHARED_FILE).read_bytes())
    if not is_exact:
        return shared, None
    return shared, states.deserialize((path / manifest.rank_file(rank)).read_bytes())


def _require_names(path: Path, kind: str, wanted: tuple[str, ...], saved: tuple[str, ...]) -> None:
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"checkpoint '{path}': expected {kind} states {', '.join(wanted)}, got a checkpoint "
            f"without '{missing[0]}' (it has: {', '.join(saved) or 'none'}). Leave out the states "
            "that were not saved."
        )
