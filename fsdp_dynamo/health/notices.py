"""Failure notices: errors that all ranks of a job raise instead of waiting.

Ranks write numbered records into the store of the job: a notice, when a rank has failed or has
found that ranks have diverged, or a request to compare what a group has issued. A rank reads them
during long waits, more and more seldom, and when a wait fails. It raises every notice once: one
that was caught is not raised by the next wait, and a rank that was busy meanwhile still raises it.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.watchdog import report_failure_at_exit, set_monitor
from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health.collective_order import Comparison
from fsdp_dynamo.health.flight_recorder import report_blocked
from fsdp_dynamo.health.store import digest_of, run_store, shared_store

_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}
_COMPARED_AT = frozenset({1, 3, 18, 90})
"""Periods of a wait after which ranks compare what they have issued."""
_WARNED_AT = 12
"""Periods of a wait after which a warning names a late rank; the rank behind it warns."""
_POLL_S = 0.5
_MAX_SHOWN = 300
"""Characters of an error that a notice shows."""


class _Records:
    """Records of a job, as far as this rank has read them.

    Attributes:
        ranks: ranks with which this rank shares a linked group.
        comparisons: linked groups.
        names: linked groups by their names, which are equal on all of their ranks.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.comparisons: WeakKeyDictionary[dist.ProcessGroup, Comparison] = WeakKeyDictionary()
        self._num_of_ranks: Counter[tuple[int, ...]] = Counter()
        self._num_read = 0
        self._notices: deque[DivergenceError] = deque()
        self._lock = threading.RLock()  # the main thread and the watchdog read

    def link(self, group: dist.ProcessGroup) -> None:
        """Share failures with the ranks of a group; all of them must call it in one order."""
        if group in self.comparisons or shared_store(group) is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        self._num_of_ranks[ranks] += 1  # torch's names are local to a rank
        self.comparisons[group] = Comparison(f"{digest_of(ranks)}/{self._num_of_ranks[ranks]}")
        self.ranks.update(ranks)

    def oldest(self, store: Any) -> DivergenceError | None:
        """Read what is new; return the oldest notice that this rank has not raised."""
        with self._lock:
            while store.check([self._next]):
                self._take(store.get(self._next).decode())
            return self._notices[0] if self._notices else None

    def post(self, store: Any, error: DivergenceError) -> None:
        """Post an error, unless there is a notice that this rank has not raised.

        Of errors that ranks find at the same time, the first one counts.
        """
        with self._lock:
            if self.oldest(store) is None:
                self._add(store, type(error).__name__, str(error), sorted(self.ranks))

    def count_raised(self, store: Any, error: DivergenceError) -> None:
        """Count the oldest notice as raised; post the error first if there is none."""
        with self._lock:
            self.post(store, error)
            if self._notices:
                self._notices.popleft()

    def ask(self, store: Any, group: dist.ProcessGroup) -> None:
        """Ask the ranks of a group to compare what they have issued."""
        with self._lock:
            self._add(store, "request", self.comparisons[group].name, [])

    @property
    def _next(self) -> str:
        return f"record/{self._num_read}"

    def _add(self, store: Any, kind: str, text: str, ranks: list[int]) -> None:
        """Add a record, unless another rank adds one of this kind for the same ranks first."""
        own = json.dumps([kind, text, ranks])
        while True:
            found = store.compare_set(self._next, "", own).decode()
            is_notice = self._take(found)
            if found == own or (is_notice and kind != "request"):
                return

    def _take(self, record: str) -> bool:
        """Take in the next record; return whether it is a notice for this rank."""
        self._num_read += 1
        kind, text, ranks = json.loads(record)
        if kind == "request":
            for comparison in self.comparisons.values():
                comparison.is_due |= comparison.name == text
            return False
        is_for_this_rank = not self.ranks.isdisjoint(ranks)
        if is_for_this_rank:
            self._notices.append(_KINDS[kind](text))
        return is_for_this_rank


class _Monitor:
    """Questions of the watchdog to other ranks; see ``comm.watchdog.Monitor``."""

    def look(self, group: dist.ProcessGroup, num_periods: int, runs_ahead: bool) -> None:
        store, records = run_store(), state_of(dist.group.WORLD, _Records)
        comparison = records.comparisons.get(group)
        if store is not None and comparison is not None and num_periods in _COMPARED_AT:
            comparison.is_due = True
            if runs_ahead:  # a rank whose device does not stand still compares only if asked
                records.ask(store, group)
        self.look_in_passing()
        if store is not None and comparison is not None and num_periods == _WARNED_AT:
            _warn_of_late_rank(comparison.unseen_before(group, store), group)

    def look_in_passing(self) -> None:
        store, records = run_store(), state_of(dist.group.WORLD, _Records)
        if store is None:
            return
        self.raise_notice()
        for group, comparison in list(records.comparisons.items()):
            message = comparison.message(group, store) if comparison.is_due else None
            comparison.is_due = False
            if message is not None:
                records.post(store, DivergenceError(message))
                self.raise_notice()

    def raise_notice(self) -> None:
        store = run_store()
        notice = None if store is None else state_of(dist.group.WORLD, _Records).oldest(store)
        if notice is not None:
            raise type(notice)(str(notice))

    def count_raised(self, error: DivergenceError) -> None:
        store = run_store()
        if store is not None:
            state_of(dist.group.WORLD, _Records).count_raised(store, error)

    def report_blocked(self, error: DivergenceError) -> None:
        report_blocked(error)


_monitor = _Monitor()


def _warn_of_late_rank(late: int | None, group: dist.ProcessGroup) -> None:
    if late is None:
        return
    what = "".join(entry.description() for entry in collective_log.recent(group, 1))
    with suppress(Warning):  # where warnings are errors
        warnings.warn(
            f"rank {dist.get_rank()} has waited {_WARNED_AT} s for {what}: rank {late} has not "
            "come to it. It may load data, write a file, be at a breakpoint or be slow (py-spy "
            "dump shows where). It is waited for until the process group's timeout.",
            stacklevel=2,
        )


def link_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Share failures with the ranks of these groups, and watch waits from now on."""
    records = state_of(dist.group.WORLD, _Records)
    for group in groups:
        records.link(group)
    set_monitor(_monitor)


def linked_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this job with whose ranks failures are shared, in their order."""
    return list(state_of(dist.group.WORLD, _Records).comparisons)


def raise_on_all_ranks(error: DivergenceError) -> NoReturn:
    """Raise an error here, and on all waiting ranks of linked groups."""
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        _monitor.count_raised(error)
    raise error


def compare_now(group: dist.ProcessGroup, timeout_s: float) -> DivergenceError | None:
    """Compare what the ranks of a group have issued, which all of them do now; ``None``: equal."""
    store, records = run_store(), state_of(dist.group.WORLD, _Records)
    comparison = records.comparisons.get(group)
    until = time.monotonic() + timeout_s
    while comparison is not None and time.monotonic() < until:
        message = comparison.message(group, store, collective_log.MAX_ENTRIES)
        if message is not None:
            return DivergenceError(message)
        time.sleep(_POLL_S)
    return None


def announce_failure(error: BaseException) -> None:
    """Tell all ranks of linked groups that an exception ends this rank."""
    if isinstance(error, DivergenceError) or not dist.is_initialized():
        return  # the other ranks have a notice already, or cannot be reached
    report_failure_at_exit()
    last = collective_log.latest()
    where = f"rank {dist.get_rank()}" + (f" after {last.description()}" if last else "")
    message = (
        f"{where}: expected all ranks to go on, got {type(error).__name__}: "
        f"{str(error)[:_MAX_SHOWN]}. Look at the output of that rank, and start all ranks again."
    )
    with suppress(dist.DistError):  # the store has gone with the rank that served it
        _monitor.count_raised(RankFailedError(message))
