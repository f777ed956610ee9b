"""When the secondary shards of a root's units are gathered between nodes, and when they are freed.

They live from the beginning of a forward to the end of the backward that reduces gradients, as what
may follow is a step of the optimizer. Steps that only accumulate gradients share them, unless
parameters change in between: in place, by a state dict or in ``summon_full_params()``. What is
written through ``param.data`` there leaves no trace, and is seen by the next accumulation. A
forward without gradients has its own, so that weights can be swapped for it in any way.

All ranks must decide alike, but see versions of their own parameters only. So one that has changed
in any unit lets all units gather anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_dynamo.core.accumulation import Accumulation
from fsdp_dynamo.core.unit import Unit


class SecondaryShards:
    """Those of all units of a root.

    Args:
        units: of the root; those without a hierarchy of ranks are left alone.
        accumulation: of the root.
    """

    def __init__(self, units: Sequence[Unit], accumulation: Accumulation) -> None:
        self._accumulation = accumulation
        self._units = [unit for unit in units if unit.config.groups.hierarchy is not None]

    def begin_forward(self) -> None:
        """Free those that may be out of date."""
        accumulates = self._accumulation.has_sums or not self._accumulation.sync
        keeps = accumulates and torch.is_grad_enabled()
        if not (keeps and all(unit.is_secondary_current for unit in self._units)):
            self.drop()

    def gather(self) -> None:
        """Start to gather those that are missing, for all units: the link is never idle."""
        for unit in self._units:
            unit.gather_secondary()

    def end_forward(self) -> None:
        """Free those of an evaluation."""
        if not torch.is_grad_enabled():
            self.drop()

    def end_backward(self) -> None:
        """Free those of units whose gradients are reduced."""
        for unit in self._units:
            if unit.settings.reduces:
                unit.drop_secondary()

    def abandon(self) -> None:
        """Free all after an error, with gathers in any state."""
        for unit in self._units:
            unit.abandon()

    def drop(self) -> None:
        """Free all."""
        for unit in self._units:
            unit.drop_secondary()
