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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.agreement.collective_order import difference_of_orders
from fsdp_dynamo.agreement.exchange import (
    agreement_timeout_s,
    busy,
    leave_notice,
    raise_if_noticed,
    shared_store,
    wait_for_texts,
)
from fsdp_dynamo.comm.collective_log import newest
from fsdp_dynamo.comm.watchdog import watch
from fsdp_dynamo.errors import DivergenceError, RankFailedError, error_message
from graph_passes.text.fingerprint import SEPARATOR, alone, describe_entry

_CAUSE = (
    "Ranks took different branches, or models, shapes or dtypes differ between ranks: make them "
    "the same on all ranks, then start all ranks again."
)
_SHOWN = 60
"""Characters of a text that a message shows."""

_SHOWN_OF_ERROR = 300

_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()
_rounds: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, tuple[int, ...]]]] = (
    WeakKeyDictionary()
)
"""Exchanges so far, by purpose and ranks; by the default group, with which its store ends."""

_watched: WeakKeyDictionary[dist.ProcessGroup, None] = WeakKeyDictionary()

_stores: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Stores of the groups that tell each other, by their ranks; by the default group, too."""


def require_agreement(group: dist.ProcessGroup, fingerprint: str) -> None:
    """Return if all ranks of a group are about to run this graph; compare if it is new here.

    Args:
        group: the group of the graph's first collective.
        fingerprint: of the graph, from ``graph_passes.text.fingerprint``.

    Raises:
        DivergenceError: on every rank, if one of them differs or has not come.
    """
    agreed = _agreed.get(group)
    if agreed is None:
        agreed = _agreed[group] = set()
    if fingerprint in agreed:
        return
    if shared_store(group) is not None:
        _require_same_graph(fingerprint)
    agreed.add(fingerprint)


def require_same(
    group: dist.ProcessGroup,
    name: str,
    text: str,
    *,
    fix: str = "Give all ranks the same, then start all ranks again.",
) -> None:
    """Return if all ranks of a group give the same text; every rank must call it.

    Args:
        group: whose ranks.
        name: what the text is, in words, for messages.
        text: this rank's.
        fix: what to do about ranks that differ.

    Raises:
        DivergenceError: on every rank, naming the ranks whose text is not that of the first one,
            or those that have not come.
    """
    store = shared_store(group)
    if store is None:
        return
    texts = _exchange(group, store, f"same/{name}", text, _not_given(name))
    message = difference(name, texts, fix)
    if message is not None:
        _fail(store, message)


def difference(name: str, texts: Mapping[int, str], fix: str) -> str | None:
    """What is said where ranks' texts are not all the same.

    Args:
        name: what the texts are, in words.
        texts: by rank.
        fix: what to do about it.
    """
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if not differing:
        return None
    first, other = _where_they_differ(texts[ranks[0]], texts[differing[0]])
    return error_message(
        expected=f"the same {name} on all ranks, {first!r} as on rank {ranks[0]}",
        got=f"{other!r} on rank(s) {_listed(differing)}",
        where=name,
        fix=fix,
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
            what = f"{type(error).__name__}: {error}"
            leave_notice(store, RankFailedError(f"{name}: rank {ranks[0]} failed: {what}"))
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
    error = DivergenceError(message)
    leave_notice(store, error)
    raise error


# -- graphs ----------------------------------------------------------------------------------------


def _require_same_graph(fingerprint: str) -> None:
    """Compare among the ranks of each of the graph's groups, one after the other."""
    found = _groups_of(fingerprint)
    for groups in found.values():
        tell_each_other(groups)
    known = _known()
    try:
        for ranks in [ranks for ranks in found if ranks in known]:
            _compare_graphs(found[ranks][0], known[ranks], _as_seen_by(ranks, fingerprint))
    except DivergenceError as error:
        _tell_all(known, error)
        raise


def tell_each_other(groups: Iterable[dist.ProcessGroup]) -> None:
    """From now on, what one of these groups' ranks finds out is told to those of the others."""
    known = _known()
    for group in groups:
        store = shared_store(group)
        if store is None or group in _watched:  # a group of one, or of ranks that share nothing
            continue
        _watched[group] = None
        ranks = _ranks(group)
        known.setdefault(ranks, store)
        # Names of groups are local to a rank: which one of the groups of these ranks it is.
        name = str(_next_round("group", ranks))
        watch(group, partial(_look, known, store, name), partial(_tell_all, known))


def _look(
    known: Mapping[tuple[int, ...], Any], store: Any, name: str, group: dist.ProcessGroup
) -> None:
    """Raise what another rank has left, or where the order of a group's ranks is not the same."""
    _pass_notices_on(known)
    message = difference_of_orders(group, store, name)
    if message is not None:
        error = DivergenceError(message)
        _tell_all(known, error)
        raise error


def _known() -> dict[tuple[int, ...], Any]:
    return _stores.setdefault(dist.group.WORLD, {})  # type: ignore[arg-type]


def _tell_all(stores: Mapping[tuple[int, ...], Any], error: DivergenceError) -> None:
    for store in stores.values():
        leave_notice(store, error)


def tell_of_failure(error: BaseException) -> None:
    """Let all whom this rank knows learn that an exception ends it."""
    if isinstance(error, DivergenceError) or not dist.is_initialized():
        return  # they have been told, or cannot be
    last = newest()
    message = error_message(
        expected="all ranks to go on",
        got=f"{type(error).__name__}: {str(error)[:_SHOWN_OF_ERROR]}",
        where=f"rank {dist.get_rank()}" + (f" after {last.described()}" if last else ""),
        fix="Look at what that rank has printed, and start all ranks again.",
    )
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        _tell_all(_known(), RankFailedError(message))


def _pass_notices_on(stores: Mapping[tuple[int, ...], Any]) -> None:
    """Raise what a rank of any group has left, and let the other groups know: a rank that is in
    two of them may be the only one that connects theirs."""
    try:
        for store in stores.values():
            raise_if_noticed(store)
    except DivergenceError as error:
        _tell_all(stores, error)
        raise


def _compare_graphs(group: dist.ProcessGroup, store: Any, own: str) -> None:
    begins = describe_entry(own.split(SEPARATOR)[0])

    def too_late(missing: Sequence[int]) -> str:
        return error_message(
            expected=f"all ranks to compile a graph of collectives as rank {dist.get_rank()} did",
            got=f"nothing from rank(s) {_listed(missing)} within {agreement_timeout_s():g} s",
            where=f"compiled graph that begins with {begins}",
            fix=f"{_CAUSE} If they are only late, call fsdp_dynamo.set_agreement_timeout().",
            see="another-graph-on-one-rank",
        )

    texts = _exchange(group, store, "graph", own, too_late)
    ranks = list(texts)
    for rank in ranks[1:]:
        if texts[rank] != texts[ranks[0]]:
            _fail(store, _difference_message(ranks[0], rank, texts[ranks[0]], texts[rank]))


def _resolved(entry: str) -> tuple[str, dist.ProcessGroup]:
    """An entry without the name of its group, which is local to a rank, and the group."""
    fields, _, name = entry.rpartition(" ")
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return fields, group


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _groups_of(fingerprint: str) -> dict[tuple[int, ...], list[dist.ProcessGroup]]:
    """A graph's groups by their global ranks, in the order in which they come."""
    found: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
    for entry in fingerprint.split(SEPARATOR):
        _, group = _resolved(entry)
        found.setdefault(_ranks(group), []).append(group)
    return {ranks: list(dict.fromkeys(groups)) for ranks, groups in found.items()}


def _as_seen_by(ranks: tuple[int, ...], fingerprint: str) -> str:
    """Entries with the global ranks of each group; of other groups only how many they are.

    With replicas two ranks have groups in common and groups that differ, as they should.
    """
    entries = []
    for entry in fingerprint.split(SEPARATOR):
        fields, group = _resolved(entry)
        own = _ranks(group)
        shown = ",".join(map(str, own)) if own == ranks else f"{len(own)} others"
        entries.append(f"{fields} {shown}")
    return SEPARATOR.join(entries)


# -- messages --------------------------------------------------------------------------------------


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference_message(first: int, other: int, of_first: str, of_other: str) -> str:
    """The first collective that differs; launches count where nothing else does."""
    pairs = list(zip_longest(of_first.split(SEPARATOR), of_other.split(SEPARATOR), fillvalue=""))
    differing = [(i, one, two) for i, (one, two) in enumerate(pairs) if one != two]
    others = [(i, one, two) for i, one, two in differing if alone(one) != alone(two)]
    position, one, two = (others or differing)[0]
    if others:
        one, two = alone(one), alone(two)
    return error_message(
        expected=f"rank {other} to issue what rank {first} does: {describe_entry(one)}",
        got=describe_entry(two),
        where=f"compiled graph, collective {position}",
        fix=_CAUSE,
        see="another-graph-on-one-rank",
    )


def _not_given(name: str) -> Callable[[Sequence[int]], str]:
    def message(missing: Sequence[int]) -> str:
        return error_message(
            expected=f"the {name} of rank(s) {_listed(missing)}",
            got=f"nothing within {agreement_timeout_s():g} s",
            where=name,
            fix=f"{_CAUSE} If they are only late, call fsdp_dynamo.set_agreement_timeout().",
            see="another-graph-on-one-rank",
        )

    return message


def _where_they_differ(one: str, other: str) -> tuple[str, str]:
    """The texts from shortly before their first difference on, cut to a readable length."""
    pairs = zip_longest(one, other)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    begin = max(0, first - _SHOWN // 3)
    return one[begin : begin + _SHOWN], other[begin : begin + _SHOWN]
