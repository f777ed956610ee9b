"""Texts that ranks exchange through their store, and what is said about ranks that are late.

A rank that compiles says so in the store, and the time that it takes is not held against it. A rank
that gives up leaves a notice, which whoever waits for it looks for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._dynamo.callback import callback_handler  # who else compiles has no public reader
from torch.distributed.distributed_c10d import PrefixStore

from fsdp_dynamo.comm.process_groups import group_timeout_s
from fsdp_dynamo.errors import DivergenceError, FSDPValueError, RankFailedError

_STORES_OF_MANY = frozenset({"TCPStore", "FileStore"})
_PREFIX = "fsdp_dynamo/agreement"
_NOTICE = "notice"
_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}
_POLL_S = (0.005, 0.2)  # at first, and at most

TooLate = Callable[[Sequence[int]], str]

_timeout_s = 10.0


def set_agreement_timeout(seconds: float) -> None:
    """How long a rank waits for others that do not compile (default 10 s).

    It waits before it first runs a new graph, and where one rank decides for all. The time in
    which a rank of the group compiles does not count, up to the process group's own timeout.

    Args:
        seconds: more than 0.

    Raises:
        FSDPValueError: not a number above 0.
    """
    global _timeout_s
    if not (isinstance(seconds, (int, float)) and seconds > 0):
        raise FSDPValueError(
            expected="a number of seconds above 0",
            got=repr(seconds),
            where="set_agreement_timeout()",
            fix="Pass for how long ranks that do not compile may be late.",
        )
    _timeout_s = float(seconds)


def agreement_timeout_s() -> float:
    """What ``set_agreement_timeout`` has set."""
    return _timeout_s


def _default_store() -> Any:
    """The store that all ranks share, or ``None``.

    Simulated and fake groups have ranks that do not exist, and stores that nobody shares.
    """
    if not dist.is_initialized():
        return None
    kept = store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return kept if type(store).__name__ in _STORES_OF_MANY else None


def shared_store(group: dist.ProcessGroup) -> Any:
    """The store of a group's ranks, or ``None`` where they have nothing to agree on or with."""
    store = None if group.size() == 1 else _default_store()
    if store is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    start = _starts.get(dist.group.WORLD, {}).get(ranks, "")  # type: ignore[arg-type]
    listed = "-".join(map(str, ranks))
    return PrefixStore(f"{_PREFIX}/{listed}/{start}", store)


_starts: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], str]] = WeakKeyDictionary()
"""Names of the starts of ranks; by the default group, and by ranks."""


def name_this_start(group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the ranks of a group read nothing that those of an earlier start have left.

    A launcher may keep one store for all starts. All ranks of the group call it together, before
    they exchange anything; ``device`` is one of theirs, used where the group serves no CPU.
    """
    if shared_store(group) is None:
        return
    ranks = tuple(dist.get_process_group_ranks(group))
    known = _starts.setdefault(dist.group.WORLD, {})  # type: ignore[arg-type]
    if ranks not in known:
        said = [secrets.token_hex(4)]
        kinds = {kind.type for kind in group._device_types}
        place = torch.device("cpu") if "cpu" in kinds else device
        by = place if place.type in kinds else None  # else torch looks for one
        dist.broadcast_object_list(said, src=ranks[0], group=group, device=by)
        known[ranks] = said[0]
        _say(is_busy=_num_reasons > 0)


# -- ranks that are busy ---------------------------------------------------------------------------


def _busy_key(rank: int) -> str:
    return f"{_PREFIX}/busy/{rank}"


def _say(is_busy: bool) -> None:
    store = _default_store()
    if store is None:
        return
    with suppress(RuntimeError):  # a store that is gone is no reason to fail a compilation
        store.set(_busy_key(dist.get_rank()), "1" if is_busy else "0")


_num_reasons = 0


def _begin(_: object = None) -> None:
    global _num_reasons
    _num_reasons += 1
    if _num_reasons == 1:
        _say(is_busy=True)


def _end(_: object = None) -> None:
    global _num_reasons
    _num_reasons = max(0, _num_reasons - 1)
    if _num_reasons == 0:
        _say(is_busy=False)


def announce_compilations() -> None:
    """Tell the other ranks when this one compiles, until ``torch._dynamo.reset`` ends that."""
    if _end not in callback_handler.end_callbacks:
        callback_handler.register_start_callback(_begin)
        callback_handler.register_end_callback(_end)


def announce_this_compilation() -> None:
    """Call where a compilation is under way; its end is announced by itself."""
    if _end not in callback_handler.end_callbacks:
        announce_compilations()
        _begin()


@contextmanager
def busy() -> Iterator[None]:
    """Others that wait for this rank wait on while the context is open."""
    _begin()
    try:
        yield
    finally:
        _end()


@contextmanager
def _waiting() -> Iterator[None]:
    """Who waits for others is not busy, also while it compiles: two that wait are no progress."""
    if _num_reasons:
        _say(is_busy=False)
    try:
        yield
    finally:
        if _num_reasons:
            _say(is_busy=True)


def _is_busy(rank: int) -> bool:
    store = _default_store()
    key = _busy_key(rank)
    return bool(store.check([key])) and store.get(key) == b"1"


# -- notices ---------------------------------------------------------------------------------------


def leave_notice(store: Any, error: DivergenceError) -> None:
    """Let everybody who waits for a rank of the group raise this error; the first one counts."""
    if not store.check([_NOTICE]):
        store.set(_NOTICE, f"{type(error).__name__} {error}")


def raise_if_noticed(store: Any) -> None:
    """Raise what another rank has left.

    Raises:
        DivergenceError: with the other rank's message.
    """
    if store.check([_NOTICE]):
        kind, _, message = store.get(_NOTICE).decode().partition(" ")
        raise _KINDS[kind](message)


# -- texts -----------------------------------------------------------------------------------------


def wait_for_texts(
    group: dist.ProcessGroup, store: Any, key: str, ranks: Sequence[int], too_late: TooLate
) -> dict[int, str]:
    """Texts of ranks, by rank, from ``key/rank``.

    Args:
        group: whose timeout bounds everything.
        store: the group's, from ``shared_store``.
        key: of this exchange.
        ranks: global ranks that have set, or will set, their text.
        too_late: makes the error's message of the ranks that have not come.

    Raises:
        DivergenceError: ranks that do not compile have not come within the timeout, or a rank has
            left a notice.
    """
    with _waiting():
        _wait_for_keys(group, store, {rank: f"{key}/{rank}" for rank in ranks}, too_late)
    return {rank: store.get(f"{key}/{rank}").decode() for rank in ranks}


def _wait_for_keys(
    group: dist.ProcessGroup, store: Any, keys: dict[int, str], too_late: TooLate
) -> None:
    began = heard = time.monotonic()
    limit_s = max(group_timeout_s(group), _timeout_s)
    poll_s, max_poll_s = _POLL_S
    missing = list(keys)
    while missing := [rank for rank in missing if not store.check([keys[rank]])]:
        raise_if_noticed(store)
        now = time.monotonic()
        if any(map(_is_busy, missing)):
            heard = now
        if now - heard > _timeout_s or now - began > limit_s:
            error = DivergenceError(too_late(missing))
            leave_notice(store, error)
            raise error
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, max_poll_s)
