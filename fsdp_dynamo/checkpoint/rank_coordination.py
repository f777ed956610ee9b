"""Ranks that do something together: what one of them fails at, all of them learn."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_dynamo.errors import CheckpointError, DivergenceError, FSDPError

T = TypeVar("T")

PATIENCE_S = 300.0
"""How late a rank may come to a save or load: one of them may have evaluated, or written a log."""

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""By the default group: one of the same ranks for texts and small objects alone, which may be used
by another thread while the model communicates."""


@dataclass(frozen=True)
class Concert:
    """All ranks of a run.

    Attributes:
        group: a gloo group of theirs; ``None``: this process is the only one.
        rank: this one's.
        size: how many they are.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def all(self, act: Callable[[], T]) -> list[T]:
        """Every rank acts; returns what each returned, by rank.

        Raises:
            CheckpointError: on every rank, if one of them raised, or has died. A rank that raised
                another error of this package raises that one again.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = act()
        except Exception as error:  # noqa: BLE001  # the others wait for this rank's answer
            failure = error
        own = (value, None if failure is None else said_of(failure))
        answers = [own] * self.size
        if self.group is not None:
            self._gather(answers, own)
        failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
        if isinstance(failure, FSDPError) and not isinstance(failure, CheckpointError):
            raise failure
        if failures:
            raise CheckpointError(_joined(failures)) from failure
        return [answer for answer, _ in answers]  # type: ignore[misc]

    def _gather(self, answers: list[Any], own: object) -> None:
        try:
            dist.all_gather_object(answers, own, group=self.group)
        except RuntimeError as error:
            raise self.broken(error) from error

    def broken(self, error: RuntimeError) -> CheckpointError:
        """What is raised when ranks are out of reach."""
        return CheckpointError(
            expected=f"all {self.size} ranks to come and to go on",
            got=str(error).split("\n")[0],
            where=f"rank {self.rank}",
            fix="A rank has died, is stuck, or does not save or load. Start all ranks again; "
            "complete checkpoints are as they were.",
        )

    def first(self, act: Callable[[], T]) -> T:
        """The first rank acts; every rank gets what it returned.

        Raises:
            CheckpointError: on every rank, if the first one raised; see ``all``.
        """
        return self.all(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def meet(what: str, text: str) -> Concert:
    """Bring all ranks together; every rank must call it, with the same text.

    Raises:
        DivergenceError: a rank's text differs. All ranks may go on.
        CheckpointError: a rank has died, or has not come within ``PATIENCE_S``.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None or world.size() == 1:
        return Concert(None, 0, 1)
    concert = Concert(_group_beside(world), world.rank(), world.size())
    if not _is_same(concert, zlib.crc32(text.encode())):
        _raise_difference(what, concert.all(lambda: text))
    return concert


def _group_beside(world: dist.ProcessGroup) -> dist.ProcessGroup:
    if world not in _groups:
        try:
            dist.barrier()  # finds out about a rank that has died, which making a group does not
        except RuntimeError as error:
            raise Concert(world, world.rank(), world.size()).broken(error) from error
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]


def _is_same(concert: Concert, number: int) -> bool:
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(concert.size)]
    work = dist.all_gather(numbers, torch.tensor([number]), group=concert.group, async_op=True)
    try:
        work.wait(timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        raise concert.broken(error) from error
    return len({int(one) for one in numbers}) == 1


def _raise_difference(what: str, texts: list[str]) -> None:
    differing = [rank for rank, text in enumerate(texts) if text != texts[0]]
    raise DivergenceError(
        expected=f"the same on all ranks, {texts[0]} as on rank 0",
        got=f"{texts[differing[0]]} on rank(s) {', '.join(map(str, differing))}",
        where=what,
        fix="Call it with the same arguments on all ranks. Nothing was changed.",
    )


@contextmanager
def torchs_errors() -> Iterator[None]:
    """Errors of torch.distributed.checkpoint, which are no ``Exception``, as one of ours."""
    try:
        yield
    except CheckpointException as error:
        failures = {rank: said_of(one) for rank, (one, _) in error.failures.items()}
        raise CheckpointError(_joined(failures)) from error


def said_of(error: BaseException) -> str:
    """What an error says; of ours, what was expected, what came, and what to do."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _joined(failures: dict[int, str]) -> str:
    """Texts of ranks; one that several ranks have said comes once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    return "\n".join(
        text if text.startswith("rank ") else f"rank {', '.join(map(str, who))}: {text}"
        for text, who in ranks.items()
    )
