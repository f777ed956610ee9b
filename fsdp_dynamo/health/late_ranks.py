"""Wait for ranks that have not come: a warning first, an error only on evidence.

A rank may be late for good reasons: it tokenizes, its disk is slow, it stands at a breakpoint. So
late ranks are named in a warning, and waited for until the group's timeout. A wait ends early with
an error if:

- a rank has posted a notice: it has failed;
- the connection to a late rank is closed: it has ended or was killed, compiling or not;
- a late rank has issued a collective, or waits for an exchange, that needs this rank and comes
  before the awaited one. The two ranks run different programs, and would wait for each other
  forever.
"""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._dynamo.callback import callback_handler  # no public API reports compilations

from fsdp_dynamo.comm import collective_log, watchdog
from fsdp_dynamo.comm.process_groups import group_timeout_s
from fsdp_dynamo.comm.watchdog import GONE, GONE_FIX, gone_ranks
from fsdp_dynamo.dynamo.progress import compilations
from fsdp_dynamo.dynamo.untraced import UNDER_LOCK, untraced
from fsdp_dynamo.errors import DivergenceError, RankFailedError, with_section
from fsdp_dynamo.health.collective_order import issued_by
from fsdp_dynamo.health.flight_recorder import Ranges, listed, ranges_by_text
from fsdp_dynamo.health.notices import (
    linked_groups,
    linked_stores,
    raise_if_noticed,
    stores_with,
)
from fsdp_dynamo.health.store import PREFIX, default_store

CAUSE = (
    "Ranks took different branches, or models, shapes or dtypes differ between ranks: make them "
    "the same on all ranks, then start all ranks again."
)
_LATE_FIX = f"{CAUSE} If they are only late, call fsdp_dynamo.set_agreement_timeout()."
WARN_S = 10.0
"""Seconds after which a late rank is named in a warning; a rank that compiles is not late."""

LEAST_S = 10.0
"""Smallest limit by default, since ranks do not compile equally fast."""

_MAX_LOOKED_AT = 16
"""Number of ranks checked at each look."""
_MAX_NAMED = 4
"""Number of late ranks whose process a warning names."""


@dataclass(frozen=True)
class Awaited:
    """Description of something that a rank waits for.

    Attributes:
        name: name of what is exchanged.
        expected: text for an error message about the given missing ranks.
    """

    name: str
    expected: Callable[[Sequence[int]], str]


class LateRanks:
    """Ranks that this rank waits for; a context around the wait.

    Args:
        store: store of the group.
        keys: key that each rank sets when it comes.
        awaited: description for messages.
        timeout_s: how late ranks may be that do not compile; ``None``: the group's timeout, but at
            least ``LEAST_S``.
        shows_life: see ``wait_for_keys``.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        store: Any,
        keys: Mapping[int, str],
        awaited: Awaited,
        timeout_s: float | None,
        shows_life: Callable[[], bool] | None = None,
    ) -> None:
        self._shows_life = shows_life
        self._group, self._store, self._keys, self._awaited = group, store, keys, awaited
        self._missing = list(keys)
        self._num_looks = 0
        self._began = self._last_busy = self._last_look = time.monotonic()
        self._limit_s = max(group_timeout_s(group), timeout_s or LEAST_S)
        self._timeout_s = self._limit_s if timeout_s is None else timeout_s
        self._is_warned = False
        self._is_announced = False

    def __enter__(self) -> LateRanks:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_announced:
            with suppress(dist.DistError):
                self._store.set(_wait_key(dist.get_rank()), "")

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        came = [rank for rank in self._missing if self._store.check([self._keys[rank]])]
        self._missing = [rank for rank in self._missing if rank not in came]
        return self._missing

    def look_after(self, missing: Sequence[int]) -> None:
        """Warn if missing ranks are late, and raise if they will not come.

        Raises:
            DivergenceError: they run something else, or the time is over.
            RankFailedError: a rank has failed or is gone.
        """
        raise_if_noticed(self._store)
        now = time.monotonic()
        if now - self._last_look > watchdog.PERIOD_S:
            self._last_look = now
            self._raise_on_evidence(self._some_of(missing))
        shows_life = self._shows_life is not None and self._shows_life()
        if shows_life or any(map(is_busy, missing)):
            self._last_busy = now
        late_s = now - self._last_busy
        if late_s > self._timeout_s or now - self._began > self._limit_s:
            seconds = self._timeout_s if late_s > self._timeout_s else self._limit_s
            got = f"nothing from rank(s) {listed(missing)} within {seconds:g} s"
            raise DivergenceError(self._message(missing, got, _LATE_FIX))
        if late_s > WARN_S and not self._is_warned:
            self._is_warned = True
            self._warn(missing, late_s)

    def _some_of(self, missing: Sequence[int]) -> Sequence[int]:
        """Choose at most ``_MAX_LOOKED_AT`` ranks, others at each look, to spare the store."""
        begin = self._num_looks * _MAX_LOOKED_AT % max(1, len(missing))
        self._num_looks += 1
        return [*missing[begin:], *missing[:begin]][:_MAX_LOOKED_AT]

    def raise_if_gone(self, ranks: Iterable[int]) -> None:
        """Raise if the connection to one of these ranks is closed.

        Raises:
            RankFailedError: a rank is gone.
        """
        gone = gone_ranks(self._group, ranks)
        if gone:
            expected, where = self._awaited.expected(gone), f"rank {listed(gone)}"
            raise RankFailedError(f"{where}: expected {expected}, got {GONE}. {GONE_FIX}")

    def _raise_on_evidence(self, missing: Sequence[int]) -> None:
        if not self._is_announced:
            self._is_announced = True
            record = [_packed(self._keys), self._awaited.name]
            self._store.set(_wait_key(dist.get_rank()), json.dumps(record))
        try:
            self.raise_if_gone(missing)
        except RankFailedError:
            raise_if_noticed(self._store)  # the rank's own error, if it posted one
            raise
        found = _issued_instead(missing) or _awaited_instead(self._group, missing)
        # Check the key last: the rank may have come after the two reads above.
        if found is not None and not self._store.check([self._keys[found[0]]]):
            rank, what = found
            got = f"{what} on rank {rank}, which rank {dist.get_rank()} has not come to"
            raise DivergenceError(self._message([rank], got, CAUSE))

    def _message(self, ranks: Sequence[int], got: str, fix: str) -> str:
        return with_section(
            f"{self._awaited.name}: expected {self._awaited.expected(ranks)}, got {got}. {fix}",
            "another-graph-on-one-rank",
        )

    def _warn(self, missing: Sequence[int], late_s: float) -> None:
        first, others = missing[:_MAX_NAMED], missing[_MAX_NAMED:]
        each = ", ".join(f"{rank} ({process_of(rank)})" for rank in first)
        each += f", {listed(others)}" if others else ""
        warnings.warn(
            f"{self._awaited.name}: rank {dist.get_rank()} has waited {late_s:.0f} s for rank(s) "
            f"{each}. They neither compile nor have failed: perhaps they load data, write a file "
            "or are at a breakpoint (py-spy dump shows where). They are waited for, at most for "
            f"{self._timeout_s:g} s.",
            stacklevel=2,
        )


def _wait_key(rank: int) -> str:
    return f"waits/{rank}"


def _issued_instead(missing: Sequence[int]) -> tuple[int, str] | None:
    """Return a rank that has issued a collective which this rank has not, and the collective."""
    stores = linked_stores()
    for group, name, ranks in linked_groups():
        count = collective_log.count(group)
        for rank in [rank for rank in missing if rank in ranks]:
            for entry in issued_by(stores[ranks], name, rank):
                if entry.number >= count:
                    return rank, entry.description()
    return None


def _awaited_instead(group: dist.ProcessGroup, missing: Sequence[int]) -> tuple[int, str] | None:
    """Return a rank that waits for this rank in another exchange, and that exchange."""
    own = dist.get_rank()
    for ranks, store in stores_with(group).items():
        for rank in [rank for rank in missing if rank in ranks]:
            key = _wait_key(rank)
            record = store.get(key).decode() if store.check([key]) else ""
            if record:
                packed, name = json.loads(record)
                awaited = _key_in(packed, own)
                if awaited is not None and not store.check([awaited]):
                    return rank, f"a wait for the {name}"
    return None


def _packed(keys: Mapping[int, str]) -> list[tuple[str, Ranges]]:
    """Serialize keys of ranks for other ranks; ``base/rank`` is shortened to its common part."""
    return ranges_by_text(
        {
            rank: key[: -len(str(rank))] if key.endswith(f"/{rank}") else key
            for rank, key in keys.items()
        }
    )


def _key_in(packed: list[tuple[str, Ranges]], rank: int) -> str | None:
    """Return the key of a rank from ``_packed``."""
    for key, ranges in packed:
        if any(first <= rank <= last for first, last in ranges):
            return f"{key}{rank}" if key.endswith("/") else key
    return None


# -- busy ranks ------------------------------------------------------------------------------------
# While a rank compiles it announces that it is busy, so that other ranks do not call it late.


_num_reasons = 0


def _key(rank: int) -> str:
    return f"{PREFIX}/busy/{rank}"


def _publish(is_busy: bool) -> None:
    store = default_store()
    if store is None:
        return
    with suppress(RuntimeError):  # a store that is gone is no reason to fail a compilation
        store.set(_key(dist.get_rank()), "1" if is_busy else "0")


def publish_state() -> None:
    """Write to the store whether this rank is busy, and which process it is."""
    _publish(is_busy=_num_reasons > 0)
    store = default_store()
    if store is not None:
        process = f"process {os.getpid()} on {socket.gethostname()}"
        store.set(f"{PREFIX}/process/{dist.get_rank()}", process)


def process_of(rank: int) -> str:
    """Describe the process and the host of a rank."""
    store, key = default_store(), f"{PREFIX}/process/{rank}"
    return store.get(key).decode() if store.check([key]) else "of an unknown process"


@untraced(UNDER_LOCK)
def _begin(_: object = None) -> None:
    global _num_reasons
    _num_reasons += 1
    if _num_reasons == 1:
        _publish(is_busy=True)


@untraced(UNDER_LOCK)
def _end(_: object = None) -> None:
    global _num_reasons
    _num_reasons = max(0, _num_reasons - 1)
    if _num_reasons == 0:
        _publish(is_busy=False)


def announce_compilations() -> None:
    """Announce this rank's compilations, and report long ones, until ``torch.compiler.reset``."""
    if _end not in callback_handler.end_callbacks:
        for begin, end in (_begin, _end), (compilations.begin, compilations.end):
            callback_handler.register_start_callback(begin)
            callback_handler.register_end_callback(end)


def announce_this_compilation() -> None:
    """Announce the compilation in progress, unless it is announced already."""
    if _end not in callback_handler.end_callbacks:
        announce_compilations()
        _begin()
        compilations.begin(None)


@contextmanager
def busy() -> Iterator[None]:
    """Announce that this rank is busy inside the context; other ranks keep waiting for it."""
    _begin()
    try:
        yield
    finally:
        _end()


@contextmanager
def waiting() -> Iterator[None]:
    """Announce that this rank is not busy inside the context, because it waits for other ranks.

    Otherwise two ranks that wait for each other while compiling would both seem to make progress.
    """
    if _num_reasons:
        _publish(is_busy=False)
    try:
        yield
    finally:
        if _num_reasons:
            _publish(is_busy=True)


def is_busy(rank: int) -> bool:
    """Whether a rank has announced that it is busy."""
    store = default_store()
    key = _key(rank)
    return bool(store.check([key])) and store.get(key) == b"1"
