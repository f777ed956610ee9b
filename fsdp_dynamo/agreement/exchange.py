"""Exchange of texts between the ranks of a group through their store, with a timeout."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.agreement import busy_ranks
from fsdp_dynamo.agreement.late_ranks import Awaited, LateRanks
from fsdp_dynamo.agreement.notices import raise_on_all_ranks
from fsdp_dynamo.agreement.store import exchange_device, next_round, shared_store
from fsdp_dynamo.comm.watchdog import watched
from fsdp_dynamo.errors import DivergenceError, FSDPValueError

_POLL_S = (0.005, 0.2)  # at first, and at most

_timeout_s: float | None = None


def set_agreement_timeout(seconds: float | None) -> None:
    """Limit how long a rank waits for others that do not compile (default: no shorter limit).

    It waits before it first runs a new graph, and for decisions that one rank makes for all. After
    10 s it warns, and names who is late. It raises when a rank it waits for has failed, is gone or
    runs something else, and in any case after the process group's own timeout. A limit here ends
    the wait earlier, or later; time in which a rank of the group compiles is not counted.

    Args:
        seconds: more than 0; ``None``: the process group's timeout, but 10 s at least.

    Raises:
        FSDPValueError: neither ``None`` nor a number above 0.
    """
    global _timeout_s
    fix = "Pass how late a rank that does not compile may be, or None."
    where = "set_agreement_timeout()"
    _timeout_s = None if seconds is None else checked_seconds(seconds, where, fix)


def checked_seconds(seconds: object, where: str, fix: str) -> float:
    """A number of seconds that a user has given.

    Raises:
        FSDPValueError: not a number above 0.
    """
    if not (isinstance(seconds, (int, float)) and seconds > 0):
        raise FSDPValueError(
            expected="a number of seconds above 0", got=repr(seconds), where=where, fix=fix
        )
    return float(seconds)


def exchange_texts(
    group: dist.ProcessGroup, store: Any, purpose: str, text: str, awaited: Awaited
) -> dict[int, str]:
    """Every rank's text, by rank; every rank must call it. See ``wait_for_texts``."""
    ranks = dist.get_process_group_ranks(group)
    key = f"{purpose}/{next_round(purpose, ranks)}"
    store.set(f"{key}/{dist.get_rank()}", text)
    return wait_for_texts(group, store, key, ranks, awaited)


def maximum_over(
    groups: Sequence[dist.ProcessGroup], values: list[int], device: torch.device, what: str
) -> list[int]:
    """Each value's maximum over all ranks that groups connect; every rank must call it.

    What is known is carried from group to group: over the shard and the replicate group of a mesh
    it reaches every rank.

    Args:
        groups: this rank's, in the same order on all ranks.
        values: integers, as many on all ranks.
        device: one of the groups', used by those that do not serve the CPU.
        what: they are, for messages.
    """
    for group in groups:
        tensor = torch.tensor(values, device=exchange_device(group, device))
        with watched(group, "all_reduce", what, len(values)):
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        values = tensor.tolist()
    return values


def texts_over(
    groups: Sequence[dist.ProcessGroup], purpose: str, text: str, awaited: Awaited
) -> dict[int, str]:
    """The texts of all ranks that groups connect, by rank; every rank must call it."""
    texts = {dist.get_rank(): text}
    for group in groups:
        known = json.dumps(list(texts.items()))
        store = shared_store(group)
        for one in exchange_texts(group, store, purpose, known, awaited).values():
            texts.update(json.loads(one))
    return dict(sorted(texts.items()))


def wait_for_texts(
    group: dist.ProcessGroup,
    store: Any,
    key: str,
    ranks: Sequence[int],
    awaited: Awaited,
) -> dict[int, str]:
    """Texts of ranks, by rank, from ``key/rank``.

    Args:
        group: its timeout bounds the wait in any case.
        store: the group's, from ``shared_store``.
        key: of this exchange.
        ranks: global ranks that set their text.
        awaited: what they set, for messages.

    Raises:
        DivergenceError: on all ranks that wait: a rank has failed, is gone, runs something else, or
            has not come in time.
    """
    with busy_ranks.waiting():
        _wait_for_keys(group, store, {rank: f"{key}/{rank}" for rank in ranks}, awaited)
    return {rank: store.get(f"{key}/{rank}").decode() for rank in ranks}


def _wait_for_keys(
    group: dist.ProcessGroup, store: Any, keys: Mapping[int, str], awaited: Awaited
) -> None:
    try:
        with LateRanks(group, store, keys, awaited, _timeout_s) as late:
            try:
                _poll(late)
            except dist.DistError:  # the store has gone with the rank that served it
                late.raise_if_gone(rank for rank in keys if rank != dist.get_rank())
                raise
    except DivergenceError as error:
        raise_on_all_ranks(group, error)


def _poll(late: LateRanks) -> None:
    poll_s, max_poll_s = _POLL_S
    while missing := late.missing():
        late.look_after(missing)
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, max_poll_s)
