"""Failure notices in the store: errors that all ranks of a group raise instead of waiting."""

from __future__ import annotations

from typing import Any, NoReturn

from fsdp_dynamo.errors import DivergenceError, RankFailedError

_KEY = "notice"
_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}


def post_notice(store: Any, error: DivergenceError) -> None:
    """Let the ranks of a group raise this error while they wait; the first notice counts."""
    if not store.check([_KEY]):
        store.set(_KEY, f"{type(error).__name__} {error}")


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
