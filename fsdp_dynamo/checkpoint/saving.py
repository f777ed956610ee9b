"""Writing a checkpoint: beside the others, verified, then made current."""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from fsdp_dynamo.agreement.comparison import difference
from fsdp_dynamo.checkpoint import directory as folders
from fsdp_dynamo.checkpoint import manifest, other_states, tensor_states
from fsdp_dynamo.checkpoint.integrity import require_present, require_written
from fsdp_dynamo.checkpoint.manifest import Manifest
from fsdp_dynamo.checkpoint.other_states import Kept
from fsdp_dynamo.checkpoint.rank_coordination import Concert, meet, said_of, torchs_errors
from fsdp_dynamo.checkpoint.storage_reader import SavePlanner
from fsdp_dynamo.checkpoint.storage_writer import Writer
from fsdp_dynamo.checkpoint.throttle import Pace
from fsdp_dynamo.errors import (
    CheckpointError,
    DivergenceError,
    FSDPTypeError,
    FSDPValueError,
)
from fsdp_dynamo.state_dict import optim_state

_SHARE = 0.2
"""Of a processor's time, for writing in the background."""

Told = tuple[Sequence[dist.ProcessGroup], str]
"""Whose ranks must tell the same, and what this one tells."""

OneOrMore = torch.optim.Optimizer | list[torch.optim.Optimizer] | tuple[torch.optim.Optimizer, ...]


@dataclass(frozen=True)
class _Content:
    """What this rank writes: nothing that training changes, where that goes on.

    Attributes:
        tensors: for torch.distributed.checkpoint.
        shared, own: bytes of the files of small states.
        names: of small states, shared and of each rank.
    """

    step: int
    tensors: dict[str, Any]
    shared: bytes
    own: bytes
    names: tuple[tuple[str, ...], tuple[str, ...]]


class Saving:
    """A checkpoint that is being written while training goes on; ``async_save`` makes it."""

    def __init__(self, write: Callable[[], Path]) -> None:
        self._path: Path | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint")
        self._thread.start()

    def _run(self, write: Callable[[], Path]) -> None:
        try:
            self._path = write()
        except Exception as error:  # noqa: BLE001  # raised where somebody waits; perhaps nobody
            self._error = error
            warnings.warn(f"a checkpoint was not saved: {said_of(error)}", stacklevel=1)

    def is_done(self) -> bool:
        """Whether it is complete, or has failed."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until it is complete.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: it could not be written. Older checkpoints are as they were.
        """
        global _last
        self._thread.join()
        if _last is self:
            _last = None
        if self._error is not None:
            raise CheckpointError(said_of(self._error)) from self._error
        assert self._path is not None
        return self._path


_last: Saving | None = None
"""The one that may still be written: there is never more than one."""


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore = (),
    *,
    step: int,
    shared: Mapping[str, Kept] | None = None,
    per_rank: Mapping[str, Kept] | None = None,
    keep_last: int | None = None,
) -> Saving:
    """``save`` whose writing goes on in the background; every rank must call it.

    It returns when this rank's part of everything has been copied to memory on the CPU. If an
    earlier one is still being written, it waits for that first, and raises what that has met.
    Call ``wait()`` on what it returns before the process group is destroyed. For the arguments and
    errors see ``save``; what goes wrong while writing is raised by ``wait()``.
    """
    global _last
    write = _prepared(folder, model, optimizers, step, shared, per_rank, keep_last, copied=True)
    _last = Saving(write)
    return _last


def save(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore = (),
    *,
    step: int,
    shared: Mapping[str, Kept] | None = None,
    per_rank: Mapping[str, Kept] | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write a checkpoint; every rank must call it, with the same arguments.

    Each rank writes its own part of the model's and the optimizers' tensors; nothing is gathered.
    What is written is read back and compared. Only then does the folder get its final name, so a
    run that is killed at any time leaves the checkpoints that were there, and perhaps this one.

    Args:
        folder: of all checkpoints of the run, on storage that all ranks see.
        model: wrapped, composable, or plain on a single rank.
        optimizers: one or several, of parameters of the model.
        step: of the run; the checkpoint's name.
        shared: states that are the same on all ranks (scheduler, gradient scaler), by name; what
            has ``state_dict`` and ``load_state_dict``, or a ``torch.Generator``. Rank 0's is saved.
        per_rank: the same, of states that each rank has for itself (data loader).
        keep_last: how many checkpoints to keep, this one among them; ``None``: all.

    Random number states of Python, NumPy and torch are always in it, for each rank.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: it could not be written; names the file and what it was to hold. On every
            rank; older checkpoints are as they were. Also where a rank has died, or does not come.
        DivergenceError: ranks want to save something different.
        FSDPTypeError: something in ``optimizers``, ``shared`` or ``per_rank`` is not what it is to
            be; nothing was written.
        FSDPValueError: ``step`` or ``keep_last`` is no whole number, or too small; an optimizer of
            other parameters, or two of the same one; nothing was written.
        UnsupportedError: a state that could not be read again; nothing was written.
    """
    return _prepared(folder, model, optimizers, step, shared, per_rank, keep_last, copied=False)()


def _prepared(
    folder: str | Path,
    model: nn.Module,
    optimizers: OneOrMore,
    step: int,
    shared: Mapping[str, Kept] | None,
    per_rank: Mapping[str, Kept] | None,
    keep_last: int | None,
    *,
    copied: bool,
) -> Callable[[], Path]:
    """Collect what is to be written; returns what writes it."""
    kept, own = dict(shared or {}), dict(per_rank or {})
    names = (tuple(sorted(kept)), tuple(sorted(own)))
    failure = failure_of_last()
    concert = meet("checkpoint to save", f"step {step!r}, states {names}, keep_last {keep_last!r}")
    content: list[_Content] = []
    told: list[Told] = []

    def collect() -> None:  # without communication: a rank may fail alone
        if failure is not None:
            raise failure
        _require_numbers(step, keep_last)
        other_states.require_stateful(kept, "shared")
        other_states.require_stateful(own, "per_rank")
        state, others = tensor_states.to_save(
            model, as_list(optimizers), lambda *one: told.append(one)
        )
        content.append(
            _Content(
                step,
                tensor_states.copied(state) if copied else state,
                other_states.packed({"shared": other_states.states_of(kept), "model": others}),
                other_states.packed(
                    {
                        "random": other_states.random_state(),
                        "per_rank": other_states.states_of(own),
                    }
                ),
                names,
            )
        )

    concert.all(collect)
    _require_alike(concert, told)
    pace = Pace(_SHARE if copied else 1.0)
    return lambda: _write(concert, Path(folder), content.pop(), keep_last, pace)


def _require_alike(concert: Concert, told: list[Told]) -> None:
    """Compare what ranks tell of their optimizers' states; checksums first, which are short."""
    sums = concert.all(lambda: zlib.crc32("\n".join(text for _, text in told).encode()))
    if len(set(sums)) == 1:
        return
    every = concert.all(lambda: [text for _, text in told])

    def compare() -> None:
        for position, (groups, _) in enumerate(told):
            for group in groups:
                ranks = dist.get_process_group_ranks(group)
                texts = {rank: every[rank][position] for rank in ranks}
                message = difference(optim_state.STATES, texts, optim_state.ALIKE)
                if message is not None:
                    raise DivergenceError(message)

    concert.all(compare)


def _write(
    concert: Concert, folder: Path, content: _Content, keep_last: int | None, pace: Pace
) -> Path:
    pace.begin()
    part = concert.first(lambda: folders.begin(folder, content.step))
    try:
        sums = _written(concert, part, content, pace)
        listed = Manifest(content.step, concert.size, *content.names, sums)
        concert.all(lambda: require_present(part, listed))  # is it one storage that all ranks see?
        path = concert.first(lambda: _published(part, listed))
    except CheckpointError:
        with suppress(CheckpointError):  # a rank has died: the next save removes it
            concert.first(lambda: folders.discard(part))
        raise
    concert.first(lambda: folders.keep(folder, keep_last))
    return path


def _written(
    concert: Concert, part: Path, content: _Content, pace: Pace
) -> dict[str, manifest.Sum]:
    """Write all files; the sums of those of all ranks."""
    writer = Writer(part, pace)
    alone = concert.group is None

    def write_tensors() -> None:
        with torchs_errors():
            state_dict_saver.save(
                content.tensors,
                storage_writer=writer,
                planner=SavePlanner(),
                process_group=concert.group,
                no_dist=alone,
            )

    def write_the_rest() -> dict[str, manifest.Sum]:
        writer.write_bytes(folders.own_file(concert.rank), content.own)
        if concert.rank == 0:
            writer.write_bytes(folders.SHARED, content.shared)
        for name, meant in writer.sums.items():
            require_written(part / name, meant, pace)
        return writer.sums

    concert.all(write_tensors)
    every = concert.all(write_the_rest)
    return {name: one for sums in every for name, one in sums.items()}


def _published(part: Path, listed: Manifest) -> Path:
    manifest.write(listed, part)
    return folders.publish(part)


def failure_of_last() -> CheckpointError | None:
    """Wait for a checkpoint that is still being written; why it could not be, if nobody knows."""
    try:
        if _last is not None:
            _last.wait()
    except CheckpointError as error:
        return error
    return None


def as_list(optimizers: OneOrMore) -> list[torch.optim.Optimizer]:
    """Optimizers as a list.

    Raises:
        FSDPTypeError: something else.
    """
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for one in given:
        if not isinstance(one, torch.optim.Optimizer):
            raise FSDPTypeError(
                expected="an optimizer, or a list of some",
                got=type(one).__name__,
                where="checkpoint",
                fix="Pass torch.optim.Optimizer objects; other states go to shared.",
            )
    return given


def _require_numbers(step: int, keep_last: int | None) -> None:
    for name, value, least in (("step", step, 0), ("keep_last", keep_last, 1)):
        if value is None and name == "keep_last":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise FSDPValueError(
                expected=f"a whole number, {least} or more",
                got=repr(value),
                where=name,
                fix="Nothing was written.",
            )
