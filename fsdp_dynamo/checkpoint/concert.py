"""Ranks that do something together: what one of them fails at, all of them learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_dynamo.agreement import require_same
from fsdp_dynamo.errors import CheckpointError, FSDPError, explain

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
            raise CheckpointError(
                explain(
                    expected=f"all {self.size} ranks to go on",
                    got=str(error).split("\n")[0],
                    where=f"rank {self.rank}",
                    fix="A rank has died, or is stuck. Start all ranks again; complete checkpoints "
                    "are as they were.",
                )
            ) from error

    def first(self, act: Callable[[], T]) -> T:
        """The first rank acts; every rank gets what it returned.

        Raises:
            CheckpointError: on every rank, if the first one raised.
        """
        return self.all(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def meet(what: str, text: str) -> Concert:
    """Bring all ranks together; every rank must call it, with the same text.

    Raises:
        DivergenceError: a rank's text differs, or it has not come within ``PATIENCE_S``.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Concert(None, 0, 1)
    world = dist.group.WORLD
    assert world is not None
    require_same(world, what, text, patience_s=PATIENCE_S)
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return Concert(_groups[world], dist.get_rank(), dist.get_world_size())


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
