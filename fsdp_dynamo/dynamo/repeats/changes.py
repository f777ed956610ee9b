"""What the trace of a call changes of what was there before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import functions, nn_module
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew


class NotRepeatedError(Exception):
    """A call has to be traced by itself; the message says why."""


@dataclass
class Changes:
    """What a trace has changed.

    Attributes:
        own: sources of what traced functions of ours change and restore
            (``private_api.with_side_effects``), in this trace and around it.
        others: names of all else, what the trace itself has made left out; and of methods whose
            results the user has declared to be constant.
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
            raise NotRepeatedError(f"it changes, or takes for constant, {self.others[0]}")


@contextmanager
def watched(output: Any, own: set[Any], given: Sequence[Any] = ()) -> Iterator[Changes]:
    """While open, notes what a trace reads and changes.

    Args:
        output: Dynamo's ``OutputGraph``.
        own: ``Changes.own``, to which it is added.
        given: variables of lists and dicts that may be new and are from before the trace.
    """
    changes, tracer, subtracer = Changes(own), output.current_tracer, output.subtracer
    check, around = SideEffects.check_allowed_side_effect, tracer.traced_sources
    constant = functions.invoke_and_store_as_constant
    num_hooks, num_random = len(output.side_effects.tensor_hooks), len(output.random_calls)

    def note(effects: Any, item: Any) -> Any:
        if effects.should_allow_externally_visible_side_effects_in_subtracer():
            changes.own.add(item.source)
        elif not _is_new(item) or any(item is one for one in given):
            changes.others.append(item.source.name if item.source else type(item).__name__)
        return check(effects, item)

    @contextmanager
    def enter_body(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with subtracer(*args, **kwargs) as inner:
            try:
                yield inner
            finally:
                changes.read.update(inner.traced_sources)

    def assume(tx: Any, fn: Any, *args: Any) -> Any:
        if hasattr(fn, "__self__"):  # what it returns is not guarded, nor is its object
            changes.others.append(fn.__qualname__)
        return constant(tx, fn, *args)

    tracer.traced_sources = type(around)()
    try:
        # Of the class: around a body Dynamo puts a copy of its side effects in their place.
        with (
            patch.object(SideEffects, "check_allowed_side_effect", note),
            patch.object(output, "subtracer", enter_body),
            patch.object(functions, "invoke_and_store_as_constant", assume),
            patch.object(nn_module, "invoke_and_store_as_constant", assume),
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


def _is_new(variable: Any) -> bool:
    """Whether an object is made in a trace."""
    return isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
