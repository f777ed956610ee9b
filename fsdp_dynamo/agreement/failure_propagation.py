"""Propagation of failures between groups: a notice for one group reaches all that share a rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.agreement.collective_order import find_order_mismatch
from fsdp_dynamo.agreement.flight_recorder import report_blocked
from fsdp_dynamo.agreement.linked_groups import Stores, add_group, linked_stores
from fsdp_dynamo.agreement.notices import Requests, deliver, post_notice, raise_if_noticed
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.watchdog import Watched, enable_watchdog
from fsdp_dynamo.errors import DivergenceError, RankFailedError, error_message

_MAX_SHOWN = 300
"""Characters of an error that a notice shows."""


def link_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let notices reach these groups and all groups that were linked before, and watch for them."""
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
        _pass_on(linked_stores(), RankFailedError(message))


def _deliver(error: DivergenceError) -> None:
    deliver(linked_stores(), error)


def _check_notices(_: dist.ProcessGroup) -> None:
    """Raise for another rank's notice to any of the linked groups."""
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
        # Pass it on: this rank may be the only one that two groups have in common.
        _pass_on(stores, error)
        raise
