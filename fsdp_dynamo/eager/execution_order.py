"""The order in which units run their forwards: recorded in the first step, watched in the others.

Prefetch follows the last step's order, and ranks must agree on it: they issue collectives in it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from fsdp_dynamo.agreement.comparison import require_same


class ExecutionOrder:
    """FQNs of units in the order of their forwards, in training.

    Attributes:
        fqns: of the first step, or ``None`` before its end.
    """

    def __init__(self) -> None:
        self.fqns: tuple[str, ...] | None = None
        self._is_paused = False
        self._warned = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Orders in the context do not count: another method than the forward runs."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def check(self, order: tuple[str, ...], group: dist.ProcessGroup) -> None:
        """Record the first order; warn once of another one.

        With ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` ranks compare each order that is new to them.

        Args:
            order: FQNs of units in the order in which their forwards began.
            group: the ranks that compare.

        Raises:
            DivergenceError: ranks run their units in different orders.
        """
        if order == self.fqns or self._is_paused:
            return
        if get_debug_level() == DebugLevel.DETAIL:  # pybind's enums are no singletons
            require_same(group, "order of units in the forward", " ".join(map(repr, order)))
        if self.fqns is None:
            self.fqns = order
        elif not self._warned:
            self._warned = True
            warnings.warn(_difference(self.fqns, order), stacklevel=2)


def _difference(first: Sequence[str], now: Sequence[str]) -> str:
    pairs = enumerate(zip_longest(first, now, fillvalue=None))
    position, (expected, got) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    described = ["nothing" if fqn is None else f"unit '{fqn}'" for fqn in (expected, got)]
    return (
        f"the forward runs units in another order than in the first step: expected {described[0]} "
        f"at position {position}, got {described[1]}. All ranks must do the same; all-gathers are "
        "prefetched in the order of the step before."
    )
