"""Failure notices in the store: errors that all ranks of a group raise instead of waiting.

The notices of a group are numbered. Each rank raises each of them once: it keeps, in the store as
well, how many it has heard. So a notice that was raised and caught is not raised again by the next
wait, and a rank that was busy meanwhile still raises it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist

from fsdp_dynamo.agreement.linked_groups import Stores, stores_with
from fsdp_dynamo.errors import DivergenceError, RankFailedError

_REQUESTS = "requests"
_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}


def _heard() -> str:
    """The key under which this rank counts the notices that it has raised."""
    return f"heard/{dist.get_rank()}"


def _next(store: Any) -> str:
    """The key of the first notice that this rank has not raised."""
    number = store.get(_heard()).decode() if store.check([_heard()]) else "0"
    return f"notice/{number}"


def post_notice(store: Any, error: DivergenceError) -> None:
    """Let the ranks of a group raise this error while they wait.

    A notice that this rank has not raised yet stays in its place: of what several ranks find at
    the same time, the first counts.
    """
    store.compare_set(_next(store), "", f"{type(error).__name__} {error}")
    Requests(store).make()


class Requests:
    """Requests to look for a notice, and to compare collectives.

    On a device a rank may have nothing to wait for while another waits for it.

    Args:
        store: of the ranks.
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
    """Raise the error of another rank's notice; it is not counted as heard yet.

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
        stores: of all groups that are to raise it.
        error: this rank's, or the one of a notice in one of the stores.
    """
    for store in stores.values():
        post_notice(store, error)
        store.add(_heard(), 1)


def raise_on_all_ranks(group: dist.ProcessGroup, error: DivergenceError) -> NoReturn:
    """Raise an error here, and on all ranks of a group and of the linked ones that wait."""
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        deliver(stores_with(group), error)
    raise error
