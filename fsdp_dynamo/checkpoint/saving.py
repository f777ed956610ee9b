"""Saving of checkpoints: written to a temporary folder, read back, then renamed."""

from __future__ import annotations

import os
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from fsdp_dynamo.checkpoint import manifest, states
from fsdp_dynamo.checkpoint.coordination import (
    STATE,
    RankCoordinator,
    coordinate_ranks,
    error_text,
)
from fsdp_dynamo.checkpoint.manifest import Manifest
from fsdp_dynamo.checkpoint.states import StatefulObject
from fsdp_dynamo.checkpoint.storage import (
    SavePlanner,
    Writer,
    require_complete_files,
    require_readback,
)
from fsdp_dynamo.core.dtensors import local_of, with_local
from fsdp_dynamo.errors import (
    CheckpointError,
    DivergenceError,
    FSDPTypeError,
    FSDPValueError,
)
from fsdp_dynamo.health.comparison import difference
from fsdp_dynamo.health.periodic_comparison import compare_before_saving
from fsdp_dynamo.state_dict import optim_state
from fsdp_dynamo.state_dict.optim_state import copied

_LOWEST_PRIORITY = 19

Comparison = tuple[Sequence[dist.ProcessGroup], str]
"""Process groups whose ranks must have equal texts, and this rank's text."""

OneOrMore = torch.optim.Optimizer | list[torch.optim.Optimizer] | tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True)
class _Content:
    """Everything that this rank writes: tensors for DCP, ``shared.pt``, and its own file.

    ``names`` are those of the shared and of the per-rank states.
    """

    step: int
    tensors: dict[str, Any]
    shared: bytes
    own: bytes
    names: tuple[tuple[str, ...], tuple[str, ...]]


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore = (),
    *,
    step: int,
    shared: Mapping[str, StatefulObject] | None = None,
    per_rank: Mapping[str, StatefulObject] | None = None,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Future[Path]:
    """Save in the background; every rank must call it. For arguments and errors see ``save``.

    Returns when this rank's shards are copied to host memory. If an earlier checkpoint is still
    being written, waits for it first. The future's result is the checkpoint's folder. If the
    writing fails, a warning says so at once, and ``result()`` raises ``CheckpointError``; the next
    checkpoint is not affected. Call ``result()`` before the process group is destroyed.
    """
    write = _prepare(
        folder, model, optimizers, step, shared, per_rank, keep_last, process_group, copied=True
    )
    saved: Future[Path] = Future()
    saved.set_running_or_notify_cancel()  # ranks write together: one rank cannot cancel alone
    threading.Thread(target=_complete, args=(saved, write), name="checkpoint").start()
    STATE.pending_save = saved
    return saved


def _complete(saved: Future[Path], write: Callable[[], Path]) -> None:
    """Write a checkpoint, and give the future its result or exception."""
    with suppress(OSError):  # Linux has a priority for each thread: training comes first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    try:
        path = write()
    except BaseException as error:  # noqa: BLE001  # the future raises it
        failure = CheckpointError(error_text(error))
        failure.__cause__ = error
        saved.set_exception(failure)
        with suppress(UserWarning):  # a filter may raise it
            warnings.warn(f"a checkpoint was not saved: {error_text(error)}", stacklevel=1)
    else:
        saved.set_result(path)


def save(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore = (),
    *,
    step: int,
    shared: Mapping[str, StatefulObject] | None = None,
    per_rank: Mapping[str, StatefulObject] | None = None,
    keep_last: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint and return its folder; every rank must call it with the same arguments.

    Each rank writes its own shards; nothing is gathered. Random number states of Python, NumPy and
    torch are saved for each rank. The files are read back and compared before the folder gets its
    final name, so a run that is killed at any time leaves the existing checkpoints intact.

    Args:
        folder: the run's checkpoint folder, on storage that all ranks share. A later ``chdir`` does
            not change it.
        model: wrapped, composable, or plain on a single rank.
        optimizers: one or several, with parameters of the model.
        step: step of the run; part of the checkpoint's name.
        shared: objects whose state is the same on all ranks (scheduler, gradient scaler), by name.
            They have ``state_dict`` and ``load_state_dict``, or are a ``torch.Generator``. Rank 0's
            states are saved.
        per_rank: such objects whose state differs between ranks (data loader), by name.
        keep_last: number of checkpoints to keep, including this one; ``None``: all. If an old one
            cannot be removed, a warning says so.
        process_group: group of all of the model's ranks; ``None``: the default group.

    Raises:
        CheckpointError: on every rank; older checkpoints are unchanged. A file could not be written
            (names the file), a rank has died or did not arrive
            (``set_arrival_timeout``), or another run has taken over the folder.
        DivergenceError: ranks want to save different steps or states, or to different folders.
        FSDPTypeError: a value of ``optimizers``, ``shared`` or ``per_rank`` has the wrong type.
        FSDPValueError: ``step`` or ``keep_last`` is not an integer or too small; an optimizer has
            parameters of another model, or two optimizers share a parameter.
        UnsupportedError: a state contains an object that could not be loaded again.
    """
    return _prepare(
        folder, model, optimizers, step, shared, per_rank, keep_last, process_group, copied=False
    )()


def _prepare(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore,
    step: int,
    shared: Mapping[str, StatefulObject] | None,
    per_rank: Mapping[str, StatefulObject] | None,
    keep_last: int | None,
    group: dist.ProcessGroup | None,
    *,
    copied: bool,
) -> Callable[[], Path]:
    """Collect this rank's content and return the function that writes it."""
    shared, per_rank = dict(shared or {}), dict(per_rank or {})
    names = (tuple(sorted(shared)), tuple(sorted(per_rank)))
    target = Path(folder).absolute()
    finish_pending_save()
    arguments = f"step {step!r}, states {names}, keep_last {keep_last!r}, folder '{target}'"
    coordinator = coordinate_ranks(group, "checkpoint to save", arguments)
    compare_before_saving()  # values that ranks have mixed up must not be saved
    comparisons: list[Comparison] = []
    content: list[_Content] = []

    def collect() -> int:  # must not communicate, because it may raise on one rank only
        _require_numbers(step, keep_last)
        states.require_stateful(shared, "shared")
        states.require_stateful(per_rank, "per_rank")
        state, extra_states = states.tensors_to_save(
            model, as_list(optimizers), lambda *comparison: comparisons.append(comparison)
        )
        shared_states = states.collect_states(shared)
        own_states = states.collect_states(per_rank)
        random_state = states.random_state()
        content.append(
            _Content(
                step,
                in_host_memory(state) if copied else state,
                states.serialize({"shared": shared_states, "model": extra_states}),
                states.serialize({"random": random_state, "per_rank": own_states}),
                names,
            )
        )
        return zlib.crc32("\n".join(text for _, text in comparisons).encode())

    if len(set(coordinator.run_on_all(collect))) > 1:
        _require_same_optim_states(coordinator, comparisons)
    # ``pop`` lets the copies be freed when they are written, before the function itself is.
    return lambda: _write(coordinator, target, content.pop(), keep_last)


def _require_same_optim_states(coordinator: RankCoordinator, comparisons: list[Comparison]) -> None:
    """Exchange the descriptions of optimizer states, and raise if they differ within a group."""
    own = [text for _, text in comparisons]
    members = dist.get_process_group_ranks(coordinator.group)
    texts_of = dict(zip(members, coordinator.run_on_all(lambda: own), strict=True))

    def compare() -> None:
        for number, (groups, _) in enumerate(comparisons):
            for group in groups:
                texts = {
                    rank: texts_of[rank][number] for rank in dist.get_process_group_ranks(group)
                }
                message = difference(optim_state.STATES_NAME, texts, optim_state.SAME_STATES_FIX)
                if message is not None:
                    raise DivergenceError(message)

    coordinator.run_on_all(compare)


def _write(
    coordinator: RankCoordinator,
    folder: Path,
    content: _Content,
    keep_last: int | None,
) -> Path:
    part = coordinator.run_on_first(lambda: manifest.create_partial(folder, content.step))
    try:
        checksums = _write_files(coordinator, part, content)
        listed = Manifest(content.step, coordinator.size, *content.names, checksums)
        # On every rank, so that ranks on different storage notice it.
        coordinator.run_locally(
            lambda: require_complete_files(part, listed, coordinator.rank, coordinator.size)
        )
        path = coordinator.run_on_first(lambda: _publish(part, listed))
    except CheckpointError:
        with suppress(CheckpointError):  # if a rank has died, the next save removes the folder
            coordinator.run_on_first(lambda: manifest.discard(part))
        raise
    coordinator.run_on_first(lambda: manifest.remove_old(folder, keep_last))
    return path


def _write_files(
    coordinator: RankCoordinator, part: Path, content: _Content
) -> dict[str, manifest.FileChecksum]:
    """Write and read back this rank's files, and return the checksums of all ranks' files."""
    writer = Writer(part)

    def write_tensors() -> None:
        with coordinator.dcp_errors():
            state_dict_saver.save(
                content.tensors,
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=coordinator.group,
                no_dist=coordinator.group is None,
            )

    def write_auxiliary_states() -> dict[str, manifest.FileChecksum]:
        writer.write_bytes(manifest.rank_file(coordinator.rank), content.own)
        if coordinator.rank == 0:
            writer.write_bytes(manifest.SHARED_FILE, content.shared)
        for name, written in writer.checksums.items():
            require_readback(part / name, written)
        return writer.checksums

    coordinator.run_locally(write_tensors)
    of_ranks = coordinator.run_on_all(write_auxiliary_states)
    return {name: one for checksums in of_ranks for name, one in checksums.items()}


def _publish(part: Path, listed: Manifest) -> Path:
    manifest.write(listed, part)
    return manifest.publish(part)


def finish_pending_save() -> None:
    """Wait for a checkpoint that is still being written; if it fails, its own warning says so."""
    if STATE.pending_save is not None:
        wait([STATE.pending_save])
        STATE.pending_save = None


def as_list(optimizers: OneOrMore) -> list[torch.optim.Optimizer]:
    """Return optimizers as a list; raise ``FSDPTypeError`` for anything else in it."""
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise FSDPTypeError(
                "checkpoint: expected an optimizer or a list of optimizers, got "
                f"{type(one).__name__}. Pass torch.optim.Optimizer objects; pass other objects as "
                "shared."
            )
    return given


def _require_numbers(step: int, keep_last: int | None) -> None:
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if value is None and name == "keep_last":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FSDPValueError(
                f"{name}: expected an integer of at least {least}, got {value!r}. Nothing was "
                "written."
            )


# -- staging ---------------------------------------------------------------------------------------


def in_host_memory(state: Any) -> Any:
    """Copy a nested state to host memory, so that training may go on.

    Device tensors are copied into pinned memory that lives as long as their storage: the next copy
    overwrites this one. All copies are complete on return, so later writes cannot reach them,
    whichever stream makes them.
    """
    elements: dict[Any, torch.Tensor] = {
        id(leaf): local_of(leaf).detach() for leaf in tree_leaves(state) if _is_on_device(leaf)
    }
    staged: Any = _stager().stage(elements, non_blocking=True) if elements else {}
    for device in {tensor.device for tensor in elements.values()}:
        torch.accelerator.synchronize(device)

    def in_host(leaf: Any) -> Any:
        if id(leaf) not in staged:
            return copied(leaf, to_cpu=True, is_deep=True)
        values = staged[id(leaf)]
        return with_local(leaf, values) if isinstance(leaf, DTensor) else values

    return tree_map(in_host, state)


def _is_on_device(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"


@cache
def _stager() -> StateDictStager:
    return StateDictStager(pin_memory=torch.cuda.is_available())
