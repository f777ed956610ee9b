"""Many ranks of one process, each with a connection to a store whose operations are counted.

Only what goes through the store is simulated: there are no processes, and no collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.watchdog import is_look
from fsdp_dynamo.errors import DivergenceError
from fsdp_dynamo.health import notices, store


class Group:
    """A group, as one of its ranks has it.

    Args:
        ranks: global ranks.
        rank: this one, a global rank.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks, self._position = tuple(ranks), list(ranks).index(rank)

    def rank(self) -> int:
        """Return the position in the group."""
        return self._position

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


class _Connection:
    """A connection to a store, and how many operations went through it."""

    def __init__(self, to: Any) -> None:
        self._to = to
        self.num_operations = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.num_operations += 1
            return getattr(self._to, name)(*args)

        return call


class _Prefixed:
    """``PrefixStore`` of a ``_Connection``."""

    def __init__(self, prefix: str, of: Any) -> None:
        self._prefix, self._of = prefix, of

    def __getattr__(self, name: str) -> Any:
        def call(key: str | list[str], *args: Any) -> Any:
            if isinstance(key, list):
                return getattr(self._of, name)([f"{self._prefix}/{one}" for one in key], *args)
            return getattr(self._of, name)(f"{self._prefix}/{key}", *args)

        return call


class Rank:
    """A simulated rank.

    Attributes:
        number: global rank.
        world: the default group.
        store: its connection.
        groups: further groups, to keep them.
    """

    def __init__(self, number: int, size: int, to: Any) -> None:
        self.number = number
        self.world = Group(range(size), number)
        self.store = _Connection(to)
        self.groups: list[Group] = []

    def begin(self, label: str = "block") -> None:
        """Link the default group, and issue a collective."""
        with self.acting():
            notices.link_groups([self.world])  # type: ignore[list-item]
        self.issue(label)

    def issue(self, label: str = "block") -> None:
        """Issue a collective of the default group."""
        with self.acting():
            collective_log.record(self.world, "all_gather", label, 10)  # type: ignore[arg-type]

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Let the process be this rank inside the context."""
        with ExitStack() as patches:
            for target, name, value in (
                (dist, "get_rank", lambda *_: self.number),
                (dist, "get_process_group_ranks", lambda group: list(group.ranks)),
                (dist, "is_initialized", lambda: True),
                (dist, "group", mock.Mock(WORLD=self.world)),
                (store, "default_store", lambda: self.store),
                (store, "PrefixStore", _Prefixed),
            ):
                patches.enter_context(mock.patch.object(target, name, value))
            yield


def wait(ranks: Sequence[Rank], num_periods: int, runs_ahead: bool = False) -> dict[int, str]:
    """Let ranks wait for a collective; returns the errors of those that raise and so wait no more.

    Args:
        num_periods: how long.
        runs_ahead: devices wait, not hosts.
    """
    errors: dict[int, str] = {}
    for period in filter(is_look, range(1, num_periods + 1)):
        for rank in [rank for rank in ranks if rank.number not in errors]:
            try:
                with rank.acting():
                    notices._monitor.look(rank.world, period, runs_ahead)  # type: ignore[arg-type]
            except DivergenceError as error:
                errors[rank.number] = str(error)
    return errors


def operations_of_waiting_ranks(ranks: Sequence[Rank], num_periods: int, runs_ahead: bool) -> int:
    """Let all ranks wait for the last one; returns the most operations that one has made."""
    waiting = ranks[:-1]
    for rank in ranks:
        rank.begin()
    for rank in waiting:
        rank.issue()
    before = [rank.store.num_operations for rank in waiting]
    assert wait(waiting, num_periods, runs_ahead) == {}
    return max(r.store.num_operations - n for r, n in zip(waiting, before, strict=True))


@contextmanager
def simulated_ranks(size: int, *, over_tcp: bool = False) -> Iterator[list[Rank]]:
    """Ranks over one store; over TCP, with a connection each."""
    if not over_tcp:
        shared = dist.HashStore()
        yield [Rank(number, size, shared) for number in range(size)]
        return
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    yield [
        Rank(number, size, dist.TCPStore("127.0.0.1", server.port, None, is_master=False))
        for number in range(size)
    ]
