"""The unit that stays unsharded because it may be called, or be reached by the backward, again."""

from __future__ import annotations

from fsdp_dynamo import events
from fsdp_dynamo.core.unit import Unit


class CallsInARow:
    """At most one unit, between two of its calls; it is resharded when another one begins.

    Only units that have been called twice in a row are kept. For the others it would cost memory:
    the last block would stay whole beside the logits.
    """

    def __init__(self) -> None:
        self._kept: tuple[Unit, events.Phase] | None = None

    def keep(self, unit: Unit, phase: events.Phase, may_follow: bool) -> None:
        """End a call of a unit; reshard it at once, unless another call may follow."""
        self.begin(unit)
        self._kept = unit, phase
        if not may_follow:
            self.end()
        elif phase == "forward":
            unit.stay_unsharded()

    def begin(self, unit: Unit) -> None:
        """Before a call of ``unit``: reshard what was kept, unless this is the call."""
        if self._kept is not None and self._kept[0] is unit:
            self.forget()
        self.end()

    def end(self) -> None:
        """Reshard what was kept: no call follows."""
        if self._kept is None:
            return
        unit, phase = self._kept
        self.forget()
        if phase == "forward":
            unit.reshard("forward")
        else:
            unit.end_backward()

    def forget(self) -> None:
        """Keep nothing, and leave the unit as it is."""
        self._kept = None
