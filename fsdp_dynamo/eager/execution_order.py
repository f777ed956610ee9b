"""Order of the units' forwards: recorded in each step, compared with the first step's.

Prefetch follows the order of the last step. Ranks must agree on it, as they issue collectives in
that order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.eager.forward_call import ForwardCall
from fsdp_dynamo.errors import unit_name
from fsdp_dynamo.health.comparison import first_difference, require_same


class ExecutionOrder:
    """Units in the order of their forwards; consecutive calls of one unit count once.

    Attributes:
        fqns: FQNs in the order of the first training step; ``None`` before its end.
        repeated: units that were called twice in a row.
    """

    def __init__(self) -> None:
        self.fqns: tuple[str, ...] | None = None
        self.repeated: set[Unit] = set()
        self._last: list[Unit] = []  # order in which forwards began, in the last step
        self._began: list[Unit] = []  # order in which forwards began, in the current step
        self._ended: list[Unit] = []  # order in which forwards ended, in the current step
        self._agreed: set[tuple[str, ...]] = set()  # orders that `require_same_calls` has compared
        self._is_paused = False
        self._warned = False

    def begin(self) -> None:
        self._began = []
        self._ended = []

    def add(self, unit: Unit) -> None:
        if self._began and self._began[-1] is unit:
            self.repeated.add(unit)
        else:
            self._began.append(unit)

    def following(self) -> Unit | None:
        """Return the unit that followed the newest unit in the last step, or ``None``."""
        position = len(self._began)
        if position >= len(self._last) or self._last[position - 1] is not self._began[-1]:
            return None
        return self._last[position]

    def end_call(self, call: ForwardCall) -> None:
        if not self._ended or self._ended[-1] is not call.unit:
            self._ended.append(call.unit)
        call.order = len(self._ended) - 1

    def ended_before(self, call: ForwardCall) -> Iterator[Unit]:
        """Yield units whose forwards ended before that of a call, newest first."""
        if call.order <= len(self._ended):
            for position in range(call.order - 1, -1, -1):
                yield self._ended[position]

    def require_same_calls(self) -> None:
        """Compare ranks' calls of units whose gradients are all-reduced, before a backward.

        The backend issues all-reduces by itself. If ranks issued them for different units, data
        would be mixed up or the process would end. Calls that ranks have agreed on are not compared
        again.

        Raises:
            DivergenceError: on every rank, if ranks have called different units.
        """
        calls = tuple([unit.fqn for unit in self._ended])
        if calls in self._agreed:
            return
        by_group: dict[dist.ProcessGroup, list[str]] = {}
        for unit in self._ended:
            for group in unit.all_reduce_groups():
                by_group.setdefault(group, []).append(unit_name(unit.fqn))
        for group, names in by_group.items():
            require_same(group, "order of units in the forward", ", ".join(names))
        self._agreed.add(calls)

    def forget_calls(self) -> None:
        self._ended = []

    def end(self, group: dist.ProcessGroup, is_training: bool) -> None:
        """Keep the step's order for the next step; in training, check it (see ``_check``)."""
        self._last = self._began
        if is_training and torch.is_grad_enabled():
            self._check(tuple([unit.fqn for unit in self._began]), group)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Check no order inside the context: a method other than the forward runs."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _check(self, order: tuple[str, ...], group: dist.ProcessGroup) -> None:
        """Record the first order; in debug mode check later orders, as FSDP1 does.

        With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` warn once if the order changes, and compare each new
        order between the ranks of ``group``.

        Raises:
            DivergenceError: ranks run their units in different orders.
        """
        if order == self.fqns or self._is_paused:
            return
        if self.fqns is None:
            self.fqns = order
        if get_debug_level() != DebugLevel.DETAIL:  # `is not` fails: pybind enums are no singletons
            return
        require_same(group, "order of units in the forward", " ".join(map(repr, order)))
        if order != self.fqns and not self._warned:
            self._warned = True
            warnings.warn(_difference(self.fqns, order), stacklevel=2)


def _difference(first: Sequence[str], now: Sequence[str]) -> str:
    position = first_difference(first, now) or 0
    expected, got = (
        f"unit '{fqns[position]}'" if position < len(fqns) else "nothing" for fqns in (first, now)
    )
    return (
        f"the forward runs units in another order than in the first step: expected {expected} "
        f"at position {position}, got {got}. All ranks must do the same; all-gathers are "
        "prefetched in the order of the step before."
    )
