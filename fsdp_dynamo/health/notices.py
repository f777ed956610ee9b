"""Failure notices in the store: errors that all ranks of a group raise instead of waiting.

The notices of a group are numbered. Each rank counts, in the store, the notices that it has raised
("heard"), so it raises every notice exactly once: a notice that was caught is not raised by the
next wait, and a rank that was busy meanwhile still raises it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.watchdog import Watched, enable_watchdog, report_failure_at_exit
from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health.collective_order import find_order_mismatch
from fsdp_dynamo.health.flight_recorder import report_blocked
from fsdp_dynamo.health.store import next_round, shared_store

_REQUESTS = "requests"
_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}


def _heard() -> str:
    """Key under which this rank counts the notices that it has raised."""
    return f"heard/{dist.get_rank()}"


def _next(store: Any) -> str:
    """Key of the first notice that this rank has not raised."""
    number = store.get(_heard()).decode() if store.check([_heard()]) else "0"
    return f"notice/{number}"


def post_notice(store: Any, error: DivergenceError) -> None:
    """Make the ranks of a group raise this error while they wait.

    A notice in the same place that this rank has not raised yet stays: of errors found at the same
    time, the first counts.
    """
    store.compare_set(_next(store), "", f"{type(error).__name__} {error}")
    Requests(store).make()


class Requests:
    """Requests to look for a notice, and to compare collectives.

    Needed on devices, where a rank may have nothing to wait for while another rank waits for it.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._seen = 0

    def make(self) -> None:
        """Ask all other ranks."""
        self._seen = self._store.add(_REQUESTS, 1)

    def is_new(self) -> bool:
        """Whether another rank has asked since the last call."""
        before, self._seen = self._seen, self._store.add(_REQUESTS, 0)
        return self._seen != before


def raise_if_noticed(store: Any) -> None:
    """Raise the error of another rank's notice, without counting it as heard.

    Raises:
        DivergenceError: with the other rank's message.
    """
    key = _next(store)
    if store.check([key]):
        kind, _, message = store.get(key).decode().partition(" ")
        raise _KINDS[kind](message)


def deliver(stores: Stores, error: DivergenceError) -> None:
    """Post an error that this rank is about to raise, and count it as heard.

    Args:
        stores: stores of all groups that must raise it.
        error: this rank's error, or one from a notice in one of the stores.
    """
    for store in stores.values():
        post_notice(store, error)
        store.add(_heard(), 1)


def raise_on_all_ranks(group: dist.ProcessGroup, error: DivergenceError) -> NoReturn:
    """Raise an error here, and on all waiting ranks of this group and the linked groups."""
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        deliver(stores_with(group), error)
    raise error


# -- failure propagation ---------------------------------------------------------------------------
# A notice for one group reaches all groups that share a rank with it.


_MAX_SHOWN = 300
"""Characters of an error that a notice shows."""


def link_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Deliver notices to these groups and all groups linked before, and watch for them."""
    stores = linked_stores()
    for group in groups:
        added = add_group(group)
        if added is not None:
            requests = Requests(added[0])
            watched = Watched(
                check=partial(_check, stores, *added),
                ask=requests.make,
                is_asked=requests.is_new,
                report_blocked=report_blocked,
            )
            enable_watchdog(group, watched, _check_notices, _deliver)


def announce_failure(error: BaseException) -> None:
    """Tell all linked groups that an exception ends this rank."""
    if isinstance(error, DivergenceError) or not dist.is_initialized():
        return  # the other ranks have a notice already, or cannot be reached
    report_failure_at_exit()
    last = collective_log.latest()
    where = f"rank {dist.get_rank()}" + (f" after {last.description()}" if last else "")
    message = (
        f"{where}: expected all ranks to go on, got {type(error).__name__}: "
        f"{str(error)[:_MAX_SHOWN]}. Look at the output of that rank, and start all ranks again."
    )
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        _pass_on(linked_stores(), RankFailedError(message))


def _deliver(error: DivergenceError) -> None:
    deliver(linked_stores(), error)


def _check_notices(_: dist.ProcessGroup) -> None:
    """Raise for another rank's notice to any linked group."""
    for store in linked_stores().values():
        raise_if_noticed(store)


def _pass_on(stores: Stores, error: DivergenceError) -> None:
    for store in stores.values():
        post_notice(store, error)


def _check(stores: Stores, store: Any, name: str, group: dist.ProcessGroup) -> None:
    """Raise for another rank's notice, or for a mismatch in the order of a group's collectives."""
    try:
        for other in stores.values():
            raise_if_noticed(other)
        message = find_order_mismatch(group, store, name)
        if message is not None:
            raise DivergenceError(message)
    except DivergenceError as error:
        # This rank may be the only one that two groups share, so it forwards the notice.
        _pass_on(stores, error)
        raise


# -- linked groups ---------------------------------------------------------------------------------
# Groups that share failures.


Stores = dict[tuple[int, ...], Any]
"""Stores of groups, by their ranks."""


class _Links:
    """Linked groups of a job.

    Attributes:
        names: name and ranks of each group. torch's names are local to a rank, so groups of the
            same ranks are numbered.
        stores: stores of the groups.
    """

    def __init__(self) -> None:
        self.names: WeakKeyDictionary[dist.ProcessGroup, tuple[str, tuple[int, ...]]]
        self.names = WeakKeyDictionary()
        self.stores: Stores = {}


def add_group(group: dist.ProcessGroup) -> tuple[Any, str] | None:
    """Link a group; return its store and its name, which is equal on all of its ranks.

    Returns ``None`` if it is linked already, has one rank, or has no shared store.
    """
    store = shared_store(group)
    names = state_of(dist.group.WORLD, _Links).names
    if store is None or group in names:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    linked_stores().setdefault(ranks, store)
    name = str(next_round("group", ranks))
    names[group] = name, ranks
    return store, name


def linked_stores() -> Stores:
    """Return the stores of all linked groups by ranks; empty without a default group."""
    return state_of(dist.group.WORLD, _Links).stores


def stores_with(group: dist.ProcessGroup) -> Stores:
    """Return the stores of all linked groups and of ``group``, which has a shared store."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return {ranks: shared_store(group), **linked_stores()}


def linked_groups() -> list[tuple[dist.ProcessGroup, str, tuple[int, ...]]]:
    """Return the linked groups with their names and ranks."""
    names = state_of(dist.group.WORLD, _Links).names
    return [(group, *known) for group, known in list(names.items())]
