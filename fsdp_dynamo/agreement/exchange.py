"""Waits for texts of other ranks in the store, with a timeout, and small values of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_dynamo.agreement import busy_ranks
from fsdp_dynamo.agreement.late_ranks import Awaited, LateRanks
from fsdp_dynamo.agreement.notices import raise_on_all_ranks
from fsdp_dynamo.agreement.store import exchange_device
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


def wait_for_texts(
    group: dist.ProcessGroup,
    store: Any,
    key: str,
    ranks: Sequence[int],
    awaited: Awaited,
    each_time: Callable[[], object] | None = None,
) -> dict[int, str]:
    """Texts of ranks, by rank, from ``key/rank``.

    Args:
        group: its timeout bounds the wait in any case.
        store: the group's, from ``shared_store``.
        key: of this exchange.
        ranks: global ranks that set their text.
        awaited: what they set, for messages.
        each_time: called whenever this rank has looked for them.

    Raises:
        DivergenceError: on all ranks that wait: a rank has failed, is gone, runs something else, or
            has not come in time.
    """
    with busy_ranks.waiting():
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
    """Wait until ranks have set a key each; otherwise as ``wait_for_texts``.

    Args:
        keys: by rank.
        shows_life: whether the ranks that have not come have shown meanwhile that they wait
            themselves: then they are not late.
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
