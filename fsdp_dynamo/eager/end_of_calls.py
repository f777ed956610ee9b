"""The end of all calls of a unit in a backward, and the sum of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch.autograd.graph import get_gradient_edge

from fsdp_dynamo import events
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.untraced import BY_AUTOGRAD, untraced

Grads = list[torch.Tensor | None]


class EndOfCalls:
    """Autograd leaf that all calls of a unit depend on; marks the end of the unit's backward.

    A unit may be called several times, in one forward or in several. The engine counts the
    dependencies of each node in a backward; leaves have the highest priority. So the leaf's node
    runs right after the nodes of all calls that this backward reaches, and the unit is reduced
    once, when its gradients are complete.

    Args:
        unit: the unit.
        reached: bound method, held weakly, that is called with the unit at that point.

    Attributes:
        leaf: empty input of the node that makes a call's views, on the computing device. It never
            has a gradient.
    """

    def __init__(self, unit: Unit, reached: Callable[[Unit], None]) -> None:
        self.device = unit.flats[0].device
        self.leaf = torch.empty(0, device=self.device, requires_grad=True)
        self._grads: dict[FlatParameter, Grads] = {}
        self._stream: Any = None  # stream on which the gradients of this backward are added
        self._node = get_gradient_edge(self.leaf).node
        unit_ref, method = ref(unit), WeakMethod(reached)

        @untraced(BY_AUTOGRAD)
        def tell(_inputs: Any, _outputs: Any) -> None:
            tell_root, unit = method(), unit_ref()
            if tell_root is not None and unit is not None:
                tell_root(unit)

        self._node.register_hook(tell)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return nothing: a copy of the unit makes its own."""

    def add(self, flat: FlatParameter, grads: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of one call's views of a flat parameter."""
        streams = side_streams(self.device)
        if streams is None:
            self._add(flat, grads)
            return
        current = streams.current()
        self._stream = self._stream or current
        if self._stream == current:
            self._add(flat, grads)
            return
        with streams.on(self._stream):
            streams.follow(current)
            self._add(flat, grads)
        # The gradients' memory belongs to the current stream: do not reuse it before they are read.
        streams.follow(self._stream)

    def _add(self, flat: FlatParameter, grads: Sequence[torch.Tensor | None]) -> None:
        before = self._grads.get(flat)
        self._grads[flat] = list(grads) if before is None else sums(before, grads)

    def take(self) -> dict[FlatParameter, Grads]:
        grads, self._grads = self._grads, {}
        return grads

    def on_stream(self) -> AbstractContextManager[object]:
        """Enqueue the work inside on the stream on which the gradients were added."""
        streams = side_streams(self.device)
        if streams is None or self._stream is None:
            return nullcontext()
        return streams.on(self._stream)

    def join(self) -> None:
        """End a backward: the current stream follows the one on which gradients were added."""
        streams = side_streams(self.device)
        if streams is not None and self._stream is not None:
            streams.follow(self._stream)
            self._stream = None


def sums(totals: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> Grads:
    """Add gradients elementwise; ``None`` where neither has a value."""
    return [
        total if grad is None else grad if total is None else total + grad
        for total, grad in zip(totals, grads, strict=True)
    ]


# -- calls in a row --------------------------------------------------------------------------------


class CallsInARow:
    """At most one unit that is held unsharded after its call, for a next call of the same unit.

    Only units that were called twice in a row before are held. For all other units this would cost
    memory: the last block would stay unsharded beside the logits.
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
        """Reshard the kept unit before a call of another unit."""
        if self._kept is not None and self._kept[0] is unit:
            self.forget()
        self.end()

    def end(self) -> None:
        """Reshard the kept unit: no call follows."""
        if self._kept is None:
            return
        unit, phase = self._kept
        self.forget()
        if phase == "forward":
            unit.reshard("forward")
        else:
            unit.end_backward()

    def forget(self) -> None:
        self._kept = None
