"""Values that must be equal on all ranks: comparison, and decisions by the first rank."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.errors import DivergenceError, FSDPValueError, RankFailedError
from fsdp_dynamo.health import late_ranks
from fsdp_dynamo.health.flight_recorder import listed, ranges_by_text
from fsdp_dynamo.health.late_ranks import Awaited, LateRanks, busy
from fsdp_dynamo.health.notices import deliver, raise_on_all_ranks, stores_with
from fsdp_dynamo.health.store import exchange_device, next_round, shared_store

_MAX_SHOWN = 60
"""Characters of a text that a message shows."""


_END = object()
"""Fill value behind the end of the shorter of two sequences."""


def require_same(
    group: dist.ProcessGroup,
    name: str,
    text: str,
    *,
    fix: str = "Give all ranks the same, then start all ranks again.",
) -> None:
    """Return if all ranks of a group give the same text; every rank must call it.

    Args:
        name: name of the text, for messages.
        text: this rank's text.
        fix: advice for ranks that differ.

    Raises:
        DivergenceError: on every rank; names the ranks whose text differs from the first rank's, or
            that have not come.
    """
    store = shared_store(group)
    if store is None:
        return
    texts = exchange_texts(group, store, f"same/{name}", text, awaited(name))
    message = difference(name, texts, fix)
    if message is not None:
        raise_on_all_ranks(group, DivergenceError(message))


def difference(name: str, texts: Mapping[int, str], fix: str) -> str | None:
    """Error message for texts that differ between ranks; ``None`` if all are equal.

    Args:
        name: name of the texts.
        texts: texts by rank.
        fix: advice for ranks that differ.
    """
    ranks = list(texts)
    differing = [rank for rank in ranks[1:] if texts[rank] != texts[ranks[0]]]
    if not differing:
        return None
    first, other = _excerpts(texts[ranks[0]], texts[differing[0]])
    return (
        f"{name}: expected the same {name} on all ranks, {first!r} as on rank {ranks[0]}, got "
        f"{other!r} on rank(s) {listed(differing)}. {fix}"
    )


def first_difference(one: Sequence[object], other: Sequence[object]) -> int | None:
    """First position at which two sequences differ or one has ended; ``None`` if they are equal."""
    pairs = enumerate(zip_longest(one, other, fillvalue=_END))
    return next((i for i, (a, b) in pairs if a != b), None)


def share_from_first(group: dist.ProcessGroup, name: str, make: Callable[[], str]) -> str:
    """Return the text that the first rank of a group makes; every rank must call it.

    Args:
        group: without a shared store, each rank makes its own text.
        name: name of the text, for messages.
        make: called on the first rank only; the other ranks wait for as long as it takes.

    Raises:
        DivergenceError: the first rank has not come, or ``make`` raised there. The first rank
            raises the error of ``make`` itself.
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
    """Describe a text that each rank gives, for messages."""
    return Awaited(name, lambda ranks: f"the {name} of rank(s) {listed(ranks)}")


def _excerpts(one: str, other: str) -> tuple[str, str]:
    """Cut both texts to a readable length around their first difference."""
    begin = max(0, (first_difference(one, other) or 0) - _MAX_SHOWN // 3)
    return one[begin : begin + _MAX_SHOWN], other[begin : begin + _MAX_SHOWN]


# -- exchange --------------------------------------------------------------------------------------
# Waits for texts of other ranks in the store, with a timeout.


_POLL_S = (0.005, 0.2)  # at first, and at most

_timeout_s: float | None = None


def set_agreement_timeout(seconds: float | None) -> None:
    """Limit how long a rank waits for ranks that do not compile.

    Ranks wait before they first run a new graph, and for decisions that one rank makes for all.
    After 10 s the waiting rank warns, and names who is late. It raises if a rank that it waits for
    has failed, is gone or runs something else; after ``seconds`` in which no missing rank compiled;
    and in any case after the longer of ``seconds`` and the process group's timeout.

    Args:
        seconds: more than 0; ``None``: the process group's timeout, but at least 10 s.

    Raises:
        FSDPValueError: neither ``None`` nor a number above 0.
    """
    global _timeout_s
    fix = "Pass how late a rank that does not compile may be, or None."
    where = "set_agreement_timeout()"
    _timeout_s = None if seconds is None else checked_seconds(seconds, where, fix)


def checked_seconds(seconds: object, where: str, fix: str) -> float:
    """Return a user's number of seconds as a float.

    Raises:
        FSDPValueError: not a number above 0.
    """
    if not (isinstance(seconds, (int, float)) and seconds > 0):
        raise FSDPValueError(
            f"{where}: expected a number of seconds above 0, got {seconds!r}. {fix}"
        )
    return float(seconds)


def maximum_over(
    groups: Sequence[dist.ProcessGroup], values: list[int], device: torch.device, what: str
) -> list[int]:
    """Each value's maximum over all ranks that groups connect; every rank must call it.

    Each group continues with the previous group's result. So over the shard and the replicate group
    of a mesh the maximum reaches every rank.

    Args:
        groups: this rank's groups, in the same order on all ranks.
        values: equally many on all ranks.
        device: used by groups that do not serve the CPU.
        what: what the values are, for messages.
    """
    for group in groups:
        tensor = torch.tensor(values, device=exchange_device(group, device))
        with watched(group, "all_reduce", what, len(values)):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        values = tensor.tolist()
    return values


def wait_for_texts(
    group: dist.ProcessGroup,
    store: Any,
    key: str,
    ranks: Sequence[int],
    awaited: Awaited,
    each_time: Callable[[], object] | None = None,
) -> dict[int, str]:
    """Wait until ranks have set ``key/rank``; return their texts by rank.

    Args:
        group: its timeout bounds the wait in any case.
        store: the group's, from ``shared_store``.
        ranks: global ranks.
        awaited: description for messages.
        each_time: called after every look into the store.

    Raises:
        DivergenceError: on all ranks that wait: a rank has failed, is gone, runs something else, or
            has not come in time.
    """
    with late_ranks.waiting():
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        wait_for_keys(group, store, keys, awaited, each_time=each_time)
    return {rank: store.get(f"{key}/{rank}").decode() for rank in ranks}


def wait_for_keys(
    group: dist.ProcessGroup,
    store: Any,
    keys: Mapping[int, str],
    awaited: Awaited,
    *,
    each_time: Callable[[], object] | None = None,
    shows_life: Callable[[], bool] | None = None,
) -> None:
    """Wait until ranks have set a key each; see ``wait_for_texts``.

    Args:
        keys: keys by rank.
        shows_life: whether the missing ranks have shown since the last call that they wait
            themselves, and so are not late.
    """
    try:
        with LateRanks(group, store, keys, awaited, _timeout_s, shows_life) as late:
            try:
                _poll(late, each_time)
            except dist.DistError:  # the store has gone with the rank that served it
                late.raise_if_gone(rank for rank in keys if rank != dist.get_rank())
                raise
    except DivergenceError as error:
        raise_on_all_ranks(group, error)


def _poll(late: LateRanks, each_time: Callable[[], object] | None) -> None:
    poll_s, max_poll_s = _POLL_S
    while missing := late.missing():
        late.look_after(missing)
        if each_time is not None:
            each_time()
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, max_poll_s)


# -- gathering -------------------------------------------------------------------------------------
# Gathering of texts from all ranks of a group, at a cost linear in their number.
#
# If each rank read all texts, 512 ranks with a fingerprint of 20 kB would read 5 GB from the
# process that serves the store. So the rank that comes first reads for all::
#
#     each rank   gives its text                                              N texts
#     the first   reads all of them, tells which ranks are late, publishes    N texts
#     the others  read what it has published: each distinct text once         N times one text
#
# Digests are compared first: equal texts are never transferred.


def exchange_texts(
    group: dist.ProcessGroup, store: Any, purpose: str, text: str, awaited: Awaited
) -> dict[int, str]:
    """Return every rank's text by rank; every rank must call it.

    Args:
        store: the group's, from ``shared_store``.
        purpose: keeps exchanges apart.
        text: this rank's text.
        awaited: description for messages.

    Raises:
        DivergenceError: ranks that are not busy have not come within the timeout, or a rank has
            posted a notice.
    """
    ranks = dist.get_process_group_ranks(group)
    key = f"{purpose}/{next_round(purpose, ranks)}"
    digest = hashlib.sha256(text.encode()).hexdigest()
    digests = _gather(group, store, f"{key}/digest", digest, awaited)
    if len(set(digests.values())) == 1:
        return dict.fromkeys(ranks, text)
    return _gather(group, store, f"{key}/text", text, awaited)


def texts_over(
    groups: Sequence[dist.ProcessGroup], purpose: str, text: str, awaited: Awaited
) -> dict[int, str]:
    """Texts of all ranks that groups connect, by rank; every rank must call it."""
    texts = {dist.get_rank(): text}
    for number, group in enumerate(groups):
        # The first group gets the bare text: with ranks in it, no two texts would be equal.
        own = _packed(texts) if number else text
        answers = exchange_texts(group, shared_store(group), purpose, own, awaited)
        for rank, answer in answers.items():
            texts |= _unpacked(answer) if number else {rank: answer}
    return dict(sorted(texts.items()))


def _gather(
    group: dist.ProcessGroup, store: Any, key: str, text: str, awaited: Awaited
) -> dict[int, str]:
    rank = dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    store.set(f"{key}/{rank}", text)
    first = int(store.compare_set(f"{key}/first", "", str(rank)))
    if first == rank:
        beat = partial(store.add, f"{key}/beat", 1)
        texts = wait_for_texts(group, store, key, ranks, awaited, each_time=beat)
        store.set(f"{key}/all", _packed(texts))
        return texts
    beats = _Beats(store, f"{key}/beat")
    with late_ranks.waiting():
        keys = {first: f"{key}/all"}
        wait_for_keys(group, store, keys, awaited, shows_life=beats.have_come)
    return _unpacked(store.get(f"{key}/all").decode())


class _Beats:
    """Signs of the first rank that it still waits for late ranks, which it names itself."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._seen = -1

    def have_come(self) -> bool:
        """Whether there was a sign since the last call."""
        before, self._seen = self._seen, self._store.add(self._key, 0)
        return self._seen != before


def _packed(texts: Mapping[int, str]) -> str:
    """Serialize each distinct text once, with its ranks as ranges."""
    return json.dumps(ranges_by_text(texts))


def _unpacked(content: str) -> dict[int, str]:
    texts = {
        rank: text
        for text, ranges in json.loads(content)
        for begin, end in ranges
        for rank in range(begin, end + 1)
    }
    return dict(sorted(texts.items()))
