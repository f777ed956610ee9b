"""Failure notices in the store: errors that all ranks of a group raise instead of waiting."""

from __future__ import annotations

from typing import Any, NoReturn

from fsdp_dynamo.errors import DivergenceError, RankFailedError

_KEY = "notice"
_REQUESTS = "requests"
_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}


def post_notice(store: Any, error: DivergenceError) -> None:
    """Let the ranks of a group raise this error while they wait; the first notice counts."""
    if not store.check([_KEY]):
        store.set(_KEY, f"{type(error).__name__} {error}")
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
    """Raise the error of another rank's notice.

    Raises:
        DivergenceError: with the other rank's message.
    """
    if store.check([_KEY]):
        kind, _, message = store.get(_KEY).decode().partition(" ")
        raise _KINDS[kind](message)


def raise_on_all_ranks(store: Any, message: str) -> NoReturn:
    """Post a ``DivergenceError`` as a notice, and raise it here."""
    error = DivergenceError(message)
    post_notice(store, error)
    raise error
