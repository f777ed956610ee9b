"""Actions that all ranks run together: a failure on one rank is raised on all."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_dynamo.agreement.rank_ranges import listed
from fsdp_dynamo.checkpoint.coordination_group import Meeting, arrival_timeout
from fsdp_dynamo.comm.watchdog import Interruptible, notice_for
from fsdp_dynamo.errors import CheckpointError, DivergenceError, FSDPError

T = TypeVar("T")


@dataclass(frozen=True)
class RankCoordinator:
    """Runs actions on all ranks and shares their outcome.

    Attributes:
        group: a gloo group of all ranks; ``None`` if this process is the only one.
        rank: this process's rank in it.
        size: number of ranks.
        meeting: what they do together.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    meeting: Meeting | None = None

    def run_on_all(self, action: Callable[[], T]) -> list[T]:
        """Run an action on every rank; returns all ranks' results, by rank.

        Raises:
            CheckpointError: on every rank, if the action raised on one, or a rank has died. A rank
                whose action raised another error of this package raises that error instead.
        """
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:  # noqa: BLE001  # the others wait for this rank's answer
            failure = error
        own = (value, None if failure is None else error_text(failure))
        answers = [own] * self.size
        if self.group is not None:
            self._gather(answers, own)
        failures = {rank: text for rank, (_, text) in enumerate(answers) if text is not None}
        if isinstance(failure, FSDPError) and not isinstance(failure, CheckpointError):
            raise failure
        if failures:
            raise CheckpointError(_joined(failures)) from failure
        return [answer for answer, _ in answers]  # type: ignore[misc]

    def run_locally(self, action: Callable[[], T]) -> T:
        """``run_on_all`` for a result that only this rank needs; it is not sent."""
        results: list[T] = []
        self.run_on_all(lambda: results.append(action()))
        return results[0]

    def _gather(self, answers: list[Any], own: object) -> None:
        assert self.group is not None
        try:
            with Interruptible(self.group):
                dist.all_gather_object(answers, own, group=self.group)
        except RuntimeError as error:
            raise self.unreachable_error(error) from error

    def unreachable_error(self, error: RuntimeError) -> CheckpointError:
        """The error for a rank that does not answer; the group is not used again."""
        notice = None if self.group is None else notice_for(self.group)
        if self.meeting is not None:
            self.meeting.give_up()
        return CheckpointError(
            expected=f"all {self.size} ranks to take part",
            got=str(notice or error).split("\n")[0],
            where=f"rank {self.rank}",
            fix="A rank has died, is stuck, or does not save or load. If it was only late, "
            "call fsdp_dynamo.checkpoint.set_arrival_timeout(); complete checkpoints are "
            "unchanged.",
        )

    def run_on_first(self, action: Callable[[], T]) -> T:
        """Run an action on the first rank; returns its result on every rank.

        Raises:
            CheckpointError: on every rank, if the action raised; see ``run_on_all``.
        """
        results = self.run_on_all(lambda: action() if self.rank == 0 else None)
        return results[0]  # type: ignore[return-value]


def coordinate_ranks(group: dist.ProcessGroup | None, what: str, text: str) -> RankCoordinator:
    """Wait for all ranks of a group and compare their texts; each of them must call it.

    Args:
        group: by default, the default group.
        what: the operation, for messages.
        text: its arguments, which must be the same on all ranks.

    Raises:
        DivergenceError: a rank's text differs. All ranks may go on.
        CheckpointError: a rank has died, or has not come within the time of
            ``set_arrival_timeout``.
    """
    ranks = group or (dist.group.WORLD if dist.is_initialized() else None)
    if ranks is None or ranks.size() == 1:
        return RankCoordinator(None, 0, 1)
    meeting = Meeting(ranks, f"{what}: {text}")
    try:
        own = meeting.group()
    except CheckpointError:
        raise
    except RuntimeError as error:
        raise RankCoordinator(ranks, ranks.rank(), ranks.size()).unreachable_error(error) from error
    coordinator = RankCoordinator(own, ranks.rank(), ranks.size(), meeting)
    if not _is_same_on_all(coordinator, zlib.crc32(text.encode())):
        _raise_divergence(what, coordinator.run_on_all(lambda: text))
    return coordinator


def _is_same_on_all(coordinator: RankCoordinator, number: int) -> bool:
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(coordinator.size)]
    group = coordinator.group
    assert group is not None
    try:
        with Interruptible(group):
            work = dist.all_gather(numbers, torch.tensor([number]), group=group, async_op=True)
            work.wait(arrival_timeout())
    except RuntimeError as error:
        raise coordinator.unreachable_error(error) from error
    return len({int(one) for one in numbers}) == 1


def _raise_divergence(what: str, texts: list[str]) -> None:
    differing = [rank for rank, text in enumerate(texts) if text != texts[0]]
    raise DivergenceError(
        expected=f"the same arguments on all ranks, {texts[0]} as on rank 0",
        got=f"{texts[differing[0]]} on rank(s) {listed(differing)}",
        where=what,
        fix="Call it with the same arguments on all ranks. Nothing was changed.",
    )


@contextmanager
def translate_dcp_errors(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raise errors of torch.distributed.checkpoint, which are no ``Exception``s, as our own.

    Args:
        group: which it communicates in, if it does.
    """
    try:
        with nullcontext() if group is None else Interruptible(group):
            yield
    except CheckpointException as error:
        failures = {rank: error_text(one) for rank, (one, _) in error.failures.items()}
        raise CheckpointError(_joined(failures)) from error


def error_text(error: BaseException) -> str:
    """An error's message, with its class unless it is a ``CheckpointError``."""
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _joined(failures: dict[int, str]) -> str:
    """Messages with their ranks, each distinct message once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    return "\n".join(
        text if text.startswith("rank ") else f"rank {', '.join(map(str, failed))}: {text}"
        for text, failed in ranks.items()
    )
