"""Values that must be the same on all ranks: comparison, and decisions by the first rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist

from fsdp_dynamo.agreement.busy_ranks import busy
from fsdp_dynamo.agreement.exchange import wait_for_texts
from fsdp_dynamo.agreement.gathering import exchange_texts
from fsdp_dynamo.agreement.late_ranks import Awaited
from fsdp_dynamo.agreement.linked_groups import stores_with
from fsdp_dynamo.agreement.notices import deliver, raise_on_all_ranks
from fsdp_dynamo.agreement.rank_ranges import listed
from fsdp_dynamo.agreement.store import next_round, shared_store
from fsdp_dynamo.errors import DivergenceError, RankFailedError, error_message

_MAX_SHOWN = 60
"""Characters of a text that a message shows."""


_END = object()
"""Stands behind the end of the shorter of two sequences."""


def require_same(
    group: dist.ProcessGroup,
    name: str,
    text: str,
    *,
    fix: str = "Give all ranks the same, then start all ranks again.",
) -> None:
    """Return if all ranks of a group give the same text; every rank must call it.

    Args:
        group: the ranks.
        name: of the text, for messages.
        text: this rank's.
        fix: for ranks that differ.

    Raises:
        DivergenceError: on every rank, naming the ranks whose text differs from the first rank's,
            or those that have not come.
    """
    store = shared_store(group)
    if store is None:
        return
    texts = exchange_texts(group, store, f"same/{name}", text, awaited(name))
    message = difference(name, texts, fix)
    if message is not None:
        raise_on_all_ranks(group, DivergenceError(message))


def difference(name: str, texts: Mapping[int, str], fix: str) -> str | None:
    """The error message for texts that differ between ranks; ``None`` if they are all the same.

    Args:
        name: of the texts.
        texts: by rank.
        fix: for ranks that differ.
    """
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if not differing:
        return None
    first, other = _excerpts(texts[ranks[0]], texts[differing[0]])
    return error_message(
        expected=f"the same {name} on all ranks, {first!r} as on rank {ranks[0]}",
        got=f"{other!r} on rank(s) {listed(differing)}",
        where=name,
        fix=fix,
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first position at which two sequences differ, or one has ended; ``None``: they do not."""
    pairs = enumerate(zip_longest(one, other, fillvalue=_END))
    return next((i for i, (a, b) in pairs if a != b), None)


def share_from_first(group: dist.ProcessGroup, name: str, make: Callable[[], str]) -> str:
    """The text that the first rank of a group makes, on every rank; every rank must call it.

    Args:
        group: the ranks. Without a shared store, each rank makes its own text.
        name: of the text, for messages.
        make: called on the first rank only. The others wait for as long as it takes.

    Raises:
        DivergenceError: the first rank has not come, or ``make`` raised there. On the first rank,
            the error that ``make`` raised.
    """
    store = shared_store(group)
    if store is None:
        return make()
    ranks = dist.get_process_group_ranks(group)
    key = f"share/{name}/{next_round(f'share/{name}', ranks)}"
    if dist.get_rank() == ranks[0]:
        try:
            with busy():
                text = make()
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            failure = RankFailedError(f"{name}: rank {ranks[0]} failed: {cause}")
            deliver(stores_with(group), failure)
            raise
        store.set(f"{key}/{ranks[0]}", text)
        return text
    texts = wait_for_texts(group, store, key, ranks[:1], awaited(name))
    return texts[ranks[0]]


def awaited(name: str) -> Awaited:
    """A text of each rank, for messages."""
    return Awaited(name, lambda ranks: f"the {name} of rank(s) {listed(ranks)}")


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Both texts from shortly before their first difference, cut to a readable length."""
    begin = max(0, (first_difference(one, other) or 0) - _MAX_SHOWN // 3)
    return one[begin : begin + _MAX_SHOWN], other[begin : begin + _MAX_SHOWN]
