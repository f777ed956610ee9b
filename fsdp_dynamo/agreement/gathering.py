"""Gathering of texts from all ranks of a group, at a cost that grows with their number.

If each rank read what all others give, operations and bytes would grow with the square of it: 512
ranks with a fingerprint of 20 kB would read 5 GB from the process that serves the store. So the
rank that comes first reads for all, and publishes what it has read::

    each rank   gives its text                                              N texts
    the first   reads all of them, tells which ranks are late, publishes    N texts
    the others  read what it has published: each distinct text once         N times one text

Texts that are to be the same are compared by their digests first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist

from fsdp_dynamo.agreement import busy_ranks
from fsdp_dynamo.agreement.exchange import wait_for_keys, wait_for_texts
from fsdp_dynamo.agreement.late_ranks import Awaited
from fsdp_dynamo.agreement.rank_ranges import ranges_by_text
from fsdp_dynamo.agreement.store import next_round, shared_store


def exchange_texts(
    group: dist.ProcessGroup, store: Any, purpose: str, text: str, awaited: Awaited
) -> dict[int, str]:
    """Every rank's text, by rank; every rank must call it.

    Args:
        group: the ranks.
        store: the group's, from ``shared_store``.
        purpose: keeps exchanges apart.
        text: this rank's.
        awaited: what ranks give, for messages.

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
    """The texts of all ranks that groups connect, by rank; every rank must call it."""
    texts = {dist.get_rank(): text}
    for number, group in enumerate(groups):
        # To the first group the text goes as it is: with a rank's number, no two would be equal.
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
    with busy_ranks.waiting():
        keys = {first: f"{key}/all"}
        wait_for_keys(group, store, keys, awaited, shows_life=beats.have_come)
    return _unpacked(store.get(f"{key}/all").decode())


class _Beats:
    """Signs of the first rank that it waits for others, which it names itself if they are late."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._seen = -1

    def have_come(self) -> bool:
        """Whether there was one since the last call."""
        before, self._seen = self._seen, self._store.add(self._key, 0)
        return self._seen != before


def _packed(texts: Mapping[int, str]) -> str:
    """Each distinct text once, with its ranks as ranges."""
    return json.dumps(ranges_by_text(texts))


def _unpacked(content: str) -> dict[int, str]:
    texts = {
        rank: text
        for text, ranges in json.loads(content)
        for begin, end in ranges
        for rank in range(begin, end + 1)
    }
    return dict(sorted(texts.items()))
