"""What the trace of a call changes of what was there before it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew


class NotRepeatedError(Exception):
    """A call has to be traced by itself; the message says why."""


@dataclass
class Changes:
    """What a trace has changed.

    Attributes:
        own: sources of what traced functions of ours change and restore
            (``private_api.with_side_effects``), in this trace and around it.
        others: names of all else, new objects left out.
        read: sources of what was read, also in bodies of operators.
    """

    own: set[Any]
    others: list[str] = field(default_factory=list)
    read: set[Any] = field(default_factory=set)

    def check(self) -> None:
        """Raise where a repeated call would not change what this one has.

        Raises:
            NotRepeatedError: what was changed.
        """
        if self.others:
            raise NotRepeatedError(f"it changes {self.others[0]}")


@contextmanager
def watched(output: Any, own: set[Any]) -> Iterator[Changes]:
    """While open, notes what a trace reads and changes.

    Args:
        output: Dynamo's ``OutputGraph``.
        own: ``Changes.own``, to which it is added.
    """
    changes, tracer, subtracer = Changes(own), output.current_tracer, output.subtracer
    check, around = SideEffects.check_allowed_side_effect, tracer.traced_sources
    num_hooks, num_random = len(output.side_effects.tensor_hooks), len(output.random_calls)

    def note(effects: Any, item: Any) -> Any:
        if effects.should_allow_externally_visible_side_effects_in_subtracer():
            changes.own.add(item.source)
        elif not isinstance(item.mutation_type, AttributeMutationNew | ValueMutationNew):
            changes.others.append(item.source.name if item.source else type(item).__name__)
        return check(effects, item)

    @contextmanager
    def enter_body(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with subtracer(*args, **kwargs) as inner:
            try:
                yield inner
            finally:
                changes.read.update(inner.traced_sources)

    tracer.traced_sources = type(around)()
    try:
        # Of the class: around a body Dynamo puts a copy of its side effects in their place.
        with (
            patch.object(SideEffects, "check_allowed_side_effect", note),
            patch.object(output, "subtracer", enter_body),
        ):
            yield changes
    finally:
        changes.read.update(tracer.traced_sources)
        around.update(tracer.traced_sources)
        tracer.traced_sources = around
        if len(output.side_effects.tensor_hooks) > num_hooks:
            changes.others.append("hooks of a tensor")
        if len(output.random_calls) > num_random:
            changes.others.append("Python's random numbers")
