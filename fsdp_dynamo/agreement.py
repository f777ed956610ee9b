"""All ranks run the same collectives, or all ranks raise: checked before a graph first runs.

Collectives that differ between ranks do not fail: they hang, or mix up bytes. So the first
collective of every compiled graph carries the graph's fingerprint. Before a fingerprint is used
for the first time, each rank puts it into the store and compares it with those of the others.

A rank that meets a new fingerprint alone (it has recompiled, the others have not) gets no answer.
After a timeout it leaves a notice; the others, blocked in a collective that it never joins, look
for a notice while they wait, and raise the same error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.errors import DivergenceError, explain
from fsdp_dynamo.rendezvous import (
    agreement_timeout_s,
    busy,
    leave_notice,
    raise_if_noticed,
    shared_store,
    wait_for_texts,
)
from fsdp_dynamo.watching import watch
from graph_passes.fingerprint import SEPARATOR, describe_entry

_CAUSE = (
    "Ranks took different branches, or models, shapes or dtypes differ between ranks: make them "
    "the same on all ranks, then start all ranks again."
)
_SHOWN = 60
"""Characters of a text that a message shows."""

_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_rounds: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, tuple[int, ...]]]] = (
    WeakKeyDictionary()
)
"""Exchanges so far, by purpose and ranks; by the default group, with which its store ends."""


def require_agreement(group: dist.ProcessGroup, fingerprint: str) -> None:
    """Return if all ranks of a group are about to run this graph; compare if it is new here.

    Args:
        group: the group of the graph's first collective.
        fingerprint: of the graph, from ``graph_passes.fingerprint``.

    Raises:
        DivergenceError: on every rank, if one of them differs or has not come.
    """
    agreed = _agreed.get(group)
    if agreed is None:
        agreed = _agreed[group] = set()
    if fingerprint in agreed:
        return
    store = shared_store(group)
    if store is not None:
        watch(group, partial(raise_if_noticed, store))
        _compare_graphs(group, store, fingerprint)
    agreed.add(fingerprint)


def require_same(group: dist.ProcessGroup, name: str, text: str) -> None:
    """Return if all ranks of a group give the same text; every rank must call it.

    Args:
        group: whose ranks.
        name: what the text is, in words, for messages.
        text: this rank's.

    Raises:
        DivergenceError: on every rank, naming the ranks whose text is not that of the first one,
            or those that have not come.
    """
    store = shared_store(group)
    if store is None:
        return
    texts = _exchange(group, store, f"same/{name}", text, _not_given(name))
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if differing:
        first, other = _where_they_differ(texts[ranks[0]], texts[differing[0]])
        _fail(
            store,
            explain(
                expected=f"the same {name} on all ranks, {first!r} as on rank {ranks[0]}",
                got=f"{other!r} on rank(s) {_listed(differing)}",
                where=name,
                fix="Give all ranks the same, then start all ranks again.",
            ),
        )


def share_from_first(group: dist.ProcessGroup, name: str, make: Callable[[], str]) -> str:
    """What the first rank of a group makes, on every rank; every rank must call it.

    Args:
        group: whose ranks. Without a store that they share, each rank makes its own.
        name: what is made, in words, for messages.
        make: called on the first rank only. The others wait for as long as it takes.

    Raises:
        DivergenceError: the first rank has not come, or ``make`` raised there. There, whatever
            ``make`` raised.
    """
    store = shared_store(group)
    if store is None:
        return make()
    ranks = dist.get_process_group_ranks(group)
    key = f"share/{name}/{_next_round(f'share/{name}', ranks)}"
    if dist.get_rank() == ranks[0]:
        try:
            with busy():
                text = make()
        except Exception as error:
            leave_notice(store, f"{name}: rank {ranks[0]} failed: {type(error).__name__}: {error}")
            raise
        store.set(f"{key}/{ranks[0]}", text)
        return text
    texts = wait_for_texts(group, store, key, ranks[:1], _not_given(name))
    return texts[ranks[0]]


def _next_round(purpose: str, ranks: Sequence[int]) -> int:
    counter = _rounds.setdefault(dist.group.WORLD, Counter())  # type: ignore[arg-type]
    counter[purpose, tuple(ranks)] += 1
    return counter[purpose, tuple(ranks)]


def _exchange(
    group: dist.ProcessGroup,
    store: Any,
    purpose: str,
    text: str,
    too_late: Callable[[Sequence[int]], str],
) -> dict[int, str]:
    """Every rank's text, by rank."""
    ranks = dist.get_process_group_ranks(group)
    key = f"{purpose}/{_next_round(purpose, ranks)}"
    store.set(f"{key}/{dist.get_rank()}", text)
    return wait_for_texts(group, store, key, ranks, too_late)


def _fail(store: Any, message: str) -> None:
    leave_notice(store, message)
    raise DivergenceError(message)


# -- graphs ----------------------------------------------------------------------------------------


def _compare_graphs(group: dist.ProcessGroup, store: Any, fingerprint: str) -> None:
    own = _with_ranks(fingerprint)
    begins = describe_entry(own.split(SEPARATOR)[0])

    def too_late(missing: Sequence[int]) -> str:
        return explain(
            expected=f"all ranks to compile a graph of collectives as rank {dist.get_rank()} did",
            got=f"nothing from rank(s) {_listed(missing)} within {agreement_timeout_s():g} s",
            where=f"compiled graph that begins with {begins}",
            fix=f"{_CAUSE} If they are only late, call fsdp_dynamo.set_agreement_timeout().",
        )

    texts = _exchange(group, store, "graph", own, too_late)
    ranks = list(texts)
    for rank in ranks[1:]:
        if texts[rank] != texts[ranks[0]]:
            _fail(store, _difference_message(ranks[0], rank, texts[ranks[0]], texts[rank]))


def _with_ranks(fingerprint: str) -> str:
    """Entries with the global ranks of each group in place of its name, which is local."""
    entries = []
    for entry in fingerprint.split(SEPARATOR):
        fields, _, name = entry.rpartition(" ")
        group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
        entries.append(f"{fields} {','.join(map(str, dist.get_process_group_ranks(group)))}")
    return SEPARATOR.join(entries)


# -- messages --------------------------------------------------------------------------------------


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference_message(first: int, other: int, of_first: str, of_other: str) -> str:
    pairs = zip_longest(of_first.split(SEPARATOR), of_other.split(SEPARATOR), fillvalue="")
    position, (one, two) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return explain(
        expected=f"rank {other} to issue what rank {first} does: {describe_entry(one)}",
        got=describe_entry(two),
        where=f"compiled graph, collective {position}",
        fix=_CAUSE,
    )


def _not_given(name: str) -> Callable[[Sequence[int]], str]:
    def message(missing: Sequence[int]) -> str:
        return explain(
            expected=f"the {name} of rank(s) {_listed(missing)}",
            got=f"nothing within {agreement_timeout_s():g} s",
            where=name,
            fix=f"{_CAUSE} If they are only late, call fsdp_dynamo.set_agreement_timeout().",
        )

    return message


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """The texts from shortly before their first difference on, cut to a readable length."""
    pairs = zip_longest(one, other)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    begin = max(0, first - _SHOWN // 3)
    return one[begin : begin + _SHOWN], other[begin : begin + _SHOWN]
