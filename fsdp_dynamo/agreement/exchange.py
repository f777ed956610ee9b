"""Waits for texts of other ranks in the store, with a timeout, and small values of all ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from fsdp_dynamo.agreement import busy_ranks
from fsdp_dynamo.agreement.notices import raise_if_noticed, raise_on_all_ranks
from fsdp_dynamo.agreement.store import exchange_device
from fsdp_dynamo.comm.process_groups import group_timeout_s
from fsdp_dynamo.errors import FSDPValueError

POLL_S = (0.005, 0.2)  # at first, and at most

LateMessage = Callable[[Sequence[int]], str]
"""Makes the error message for ranks that have not come."""

_timeout_s = 10.0

_rounds: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[str, tuple[int, ...]]]] = (
    WeakKeyDictionary()
)
"""Exchanges so far, by purpose and ranks; by default group, whose store holds them."""


def set_agreement_timeout(seconds: float) -> None:
    """Limit how long a rank waits for others that do not compile (default 10 s).

    It waits before it first runs a new graph, and for decisions that one rank makes for all. Time
    in which a rank of the group compiles is not counted, up to the process group's own timeout.

    Args:
        seconds: more than 0.

    Raises:
        FSDPValueError: not a number above 0.
    """
    global _timeout_s
    fix = "Pass how late a rank that does not compile may be."
    _timeout_s = checked_seconds(seconds, "set_agreement_timeout()", fix)


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


def agreement_timeout_s() -> float:
    """The value of ``set_agreement_timeout``."""
    return _timeout_s


def next_round(purpose: str, ranks: Sequence[int]) -> int:
    """The number of these ranks' next exchange for a purpose; the same on each of them."""
    counter = _rounds.setdefault(dist.group.WORLD, Counter())  # type: ignore[arg-type]
    counter[purpose, tuple(ranks)] += 1
    return counter[purpose, tuple(ranks)]


def maximum_over(
    groups: Sequence[dist.ProcessGroup], values: list[int], device: torch.device
) -> list[int]:
    """Each value's maximum over all ranks that groups connect; every rank must call it.

    What is known is carried from group to group: over the shard and the replicate group of a mesh
    it reaches every rank.

    Args:
        groups: this rank's, in the same order on all ranks.
        values: integers, as many on all ranks.
        device: one of the groups', used by those that do not serve the CPU.
    """
    for group in groups:
        tensor = torch.tensor(values, device=exchange_device(group, device))
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group)
        values = tensor.tolist()
    return values


def wait_for_texts(
    group: dist.ProcessGroup,
    store: Any,
    key: str,
    ranks: Sequence[int],
    late_message: LateMessage,
    each_time: Callable[[], object] | None = None,
) -> dict[int, str]:
    """Texts of ranks, by rank, from ``key/rank``.

    Args:
        group: its timeout bounds the wait in any case.
        store: the group's, from ``shared_store``.
        key: of this exchange.
        ranks: global ranks that set their text.
        late_message: for the ranks that have not come.
        each_time: called whenever this rank has looked for them.

    Raises:
        DivergenceError: ranks that are not busy have not come within the timeout, or a rank has
            posted a notice.
    """
    with busy_ranks.waiting():
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        _wait_for_keys(group, store, keys, late_message, each_time)
    return {rank: store.get(f"{key}/{rank}").decode() for rank in ranks}


def _wait_for_keys(
    group: dist.ProcessGroup,
    store: Any,
    keys: dict[int, str],
    late_message: LateMessage,
    each_time: Callable[[], object] | None,
) -> None:
    began = last_busy = time.monotonic()
    limit_s = max(group_timeout_s(group), _timeout_s)
    poll_s, max_poll_s = POLL_S
    missing = list(keys)
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        raise_if_noticed(store)
        if each_time is not None:
            each_time()
        now = time.monotonic()
        if any(map(busy_ranks.is_busy, missing)):
            last_busy = now
        if now - last_busy > _timeout_s or now - began > limit_s:
            raise_on_all_ranks(store, late_message(missing))
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, max_poll_s)
