"""Failure notices: errors that all ranks of a job raise instead of waiting.

A rank that has failed, or has found that ranks have diverged, writes a numbered notice into the
store of the job. Ranks read them during long waits, more and more seldom, and when a wait fails.
Each raises every notice once: one that was caught is not raised by the next wait, and a rank that
was busy meanwhile still raises it. A counter for each group asks its ranks to compare what they
have issued.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.exit_callbacks import run_with_timeout
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.watchdog import STORE_TIMEOUT_S, report_failure_at_exit, set_monitor
from fsdp_dynamo.errors import DivergenceError, RankFailedError
from fsdp_dynamo.health.collective_order import Comparison
from fsdp_dynamo.health.flight_recorder import report_blocked
from fsdp_dynamo.health.store import digest_of, run_store

_KINDS = {kind.__name__: kind for kind in (DivergenceError, RankFailedError)}
_COMPARED_AT = frozenset({1, 3, 18, 90})
"""Periods of a wait after which ranks compare what they have issued."""
_WARNED_AT = 12
"""Periods of a wait after which a warning names a late rank; the rank behind it warns."""
_POLL_S = 0.5
_MAX_SHOWN = 300
"""Characters of an error that a notice shows."""


class _Notices:
    """Notices of a job, as far as this rank has read them, and its groups.

    Attributes:
        ranks: ranks with which this rank shares a linked group.
    """

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self._comparisons: WeakKeyDictionary[dist.ProcessGroup, Comparison] = WeakKeyDictionary()
        self._num_of_ranks: Counter[tuple[int, ...]] = Counter()
        self._num_read = 0
        self._unraised: deque[DivergenceError] = deque()
        self._lock = threading.RLock()  # the main thread and the watchdog use all of it

    def link(self, group: dist.ProcessGroup) -> None:
        """Share failures with the ranks of a group; all of them must call it in one order."""
        store = run_store()
        if group in self._comparisons or group.size() == 1 or store is None:
            return
        ranks = tuple(dist.get_process_group_ranks(group))
        with self._lock:
            self._num_of_ranks[ranks] += 1  # torch's names are local to a rank
            name = f"{digest_of(ranks)}/{self._num_of_ranks[ranks]}"
            self._comparisons[group] = comparison = Comparison(name)
            self.ranks.update(ranks)
        store.add(comparison.requests, 0)

    def groups(self) -> dict[dist.ProcessGroup, Comparison]:
        """Return the linked groups that were not destroyed, in their order."""
        with self._lock:
            return {one: self._comparisons[one] for one in self._comparisons if _is_known(one)}

    def oldest(self, store: Any) -> DivergenceError | None:
        """Read what is new; return the oldest notice that this rank has not raised."""
        with self._lock:
            while store.check([self._next]):
                self._take(store.get(self._next).decode())
            return self._unraised[0] if self._unraised else None

    def post(self, store: Any, error: DivergenceError) -> None:
        """Post an error, unless there is a notice that this rank has not raised.

        Of errors that ranks find at the same time, the first one counts.
        """
        own = json.dumps([type(error).__name__, str(error), sorted(self.ranks)])
        with self._lock:
            is_posted = self.oldest(store) is not None
            while not is_posted:
                found = store.compare_set(self._next, "", own).decode()
                is_posted = self._take(found) or found == own

    def count_raised(self, store: Any, error: DivergenceError) -> None:
        """Count the oldest notice as raised; post the error first if there is none."""
        with self._lock:
            self.post(store, error)
            if self._unraised:
                self._unraised.popleft()

    @property
    def _next(self) -> str:
        return f"notice/{self._num_read}"

    def _take(self, notice: str) -> bool:
        """Take in the next notice; return whether it is for this rank."""
        self._num_read += 1
        kind, text, ranks = json.loads(notice)
        is_for_this_rank = not self.ranks.isdisjoint(ranks)
        if is_for_this_rank:
            self._unraised.append(_KINDS[kind](text))
        return is_for_this_rank


def _is_known(group: dist.ProcessGroup) -> bool:
    """Whether torch knows a group: one that was destroyed lives on as long as a model has it."""
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


class _Monitor:
    """Questions of the watchdog to other ranks; see ``comm.watchdog.Monitor``."""

    def look(self, group: dist.ProcessGroup, num_periods: int, runs_ahead: bool) -> None:
        self.raise_notice()
        store, comparison = run_store(), _known().groups().get(group)
        if store is None or comparison is None:
            return
        if num_periods in _COMPARED_AT:
            if runs_ahead:  # a rank whose device does not stand still compares only if asked
                store.add(comparison.requests, 1)
            self._compare(group, comparison)
        if num_periods == _WARNED_AT:
            _warn_of_late_rank(comparison.unseen_before(group, store), group)

    def look_in_passing(self) -> None:
        self.raise_notice()
        store, groups = run_store(), _known().groups()
        if store is None or not groups:
            return
        counts = store.multi_get([one.requests for one in groups.values()])
        for (group, comparison), count in zip(groups.items(), counts, strict=True):
            if comparison.num_requests != count:
                comparison.num_requests = count
                self._compare(group, comparison)

    def _compare(self, group: dist.ProcessGroup, comparison: Comparison) -> None:
        message = comparison.message(group, run_store())
        if message is not None:
            _known().post(run_store(), DivergenceError(message))
            self.raise_notice()

    def raise_notice(self) -> None:
        store = run_store()
        notice = None if store is None else _known().oldest(store)
        if notice is not None:
            raise type(notice)(str(notice))

    def count_raised(self, error: DivergenceError) -> None:
        store = run_store()
        if store is not None:
            _known().count_raised(store, error)

    def report_blocked(self, error: DivergenceError) -> None:
        report_blocked(error)


def _known() -> _Notices:
    return state_of(dist.group.WORLD, _Notices)


_monitor = _Monitor()


def _warn_of_late_rank(late: int | None, group: dist.ProcessGroup) -> None:
    if late is None:
        return
    what = "".join(entry.description() for entry in collective_log.recent(group, 1))
    with suppress(Warning):  # where warnings are errors
        warnings.warn(
            f"rank {dist.get_rank()} has waited {_WARNED_AT} s for {what}: rank {late} has not "
            "reported it. It may load data, write a file, be at a breakpoint or be slow (py-spy "
            "dump shows where). It is waited for until the process group's timeout.",
            stacklevel=2,
        )


def link_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Share failures with the ranks of these groups, and watch waits from now on."""
    for group in groups:
        _known().link(group)
    set_monitor(_monitor)


def linked_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this job with whose ranks failures are shared, in their order."""
    return list(_known().groups())


def raise_on_all_ranks(error: DivergenceError) -> NoReturn:
    """Raise an error here, and on all waiting ranks of linked groups."""
    run_with_timeout(STORE_TIMEOUT_S, partial(_monitor.count_raised, error))
    raise error


def difference_now(group: dist.ProcessGroup) -> DivergenceError | None:
    """Compare what the ranks of a group have issued, which all of them do now.

    Returns:
        The error that this rank or another one finds; ``None`` if nobody does for some seconds.
    """
    store, comparison = run_store(), _known().groups().get(group)
    until = time.monotonic() + STORE_TIMEOUT_S
    while comparison is not None and time.monotonic() < until:
        message = comparison.message(group, store, collective_log.MAX_ENTRIES)
        if message is not None:
            return DivergenceError(message)
        found = _known().oldest(store)
        if found is not None:
            return type(found)(str(found))
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
    run_with_timeout(STORE_TIMEOUT_S, partial(_monitor.count_raised, RankFailedError(message)))
