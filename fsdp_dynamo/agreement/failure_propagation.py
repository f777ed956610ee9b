"""Propagation of failures between groups: a notice for one group reaches all that share a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.agreement.collective_order import find_order_mismatch
from fsdp_dynamo.agreement.exchange import next_round
from fsdp_dynamo.agreement.flight_recorder import report_blocked
from fsdp_dynamo.agreement.notices import Requests, post_notice, raise_if_noticed
from fsdp_dynamo.agreement.store import shared_store
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.watchdog import Watched, enable_watchdog
from fsdp_dynamo.errors import DivergenceError, RankFailedError, error_message

Stores = Mapping[tuple[int, ...], Any]
"""Stores of linked groups, by their ranks."""

_MAX_SHOWN = 300
"""Characters of an error that a notice shows."""

_linked: WeakKeyDictionary[dist.ProcessGroup, None] = WeakKeyDictionary()
_stores: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Stores of the linked groups, by default group."""


def link_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let notices reach these groups and all groups that were linked before, and watch for them."""
    stores = linked_stores()
    for group in groups:
        store = shared_store(group)
        if store is None or group in _linked:  # one rank, or no shared store
            continue
        _linked[group] = None
        ranks = tuple(dist.get_process_group_ranks(group))
        stores.setdefault(ranks, store)
        # Names of groups are local to a rank, so groups of the same ranks are numbered.
        name = str(next_round("group", ranks))
        requests = Requests(store)
        watched = Watched(
            check=partial(_check, stores, store, name),
            post=partial(post_to_all, stores),
            ask=requests.make,
            is_asked=requests.is_new,
            report_blocked=report_blocked,
        )
        enable_watchdog(group, watched)


def linked_stores() -> dict[tuple[int, ...], Any]:
    """Stores of all linked groups, by ranks."""
    return _stores.setdefault(dist.group.WORLD, {})  # type: ignore[arg-type]


def post_to_all(stores: Stores, error: DivergenceError) -> None:
    """Post a notice in each store."""
    for store in stores.values():
        post_notice(store, error)


def announce_failure(error: BaseException) -> None:
    """Post a notice to all linked groups that an exception ends this rank."""
    if isinstance(error, DivergenceError) or not dist.is_initialized():
        return  # the other ranks have a notice already, or cannot be reached
    last = collective_log.latest()
    message = error_message(
        expected="all ranks to go on",
        got=f"{type(error).__name__}: {str(error)[:_MAX_SHOWN]}",
        where=f"rank {dist.get_rank()}" + (f" after {last.description()}" if last else ""),
        fix="Look at the output of that rank, and start all ranks again.",
    )
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        post_to_all(linked_stores(), RankFailedError(message))


def _check(stores: Stores, store: Any, name: str, group: dist.ProcessGroup) -> None:
    """Raise for another rank's notice, or for a mismatch in the order of a group's collectives."""
    try:
        for other in stores.values():
            raise_if_noticed(other)
        message = find_order_mismatch(group, store, name)
        if message is not None:
            raise DivergenceError(message)
    except DivergenceError as error:
        # Pass it on: this rank may be the only one that two groups have in common.
        post_to_all(stores, error)
        raise
