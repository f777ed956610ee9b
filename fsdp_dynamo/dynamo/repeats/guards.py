"""The guards on a module, asked of another one and installed for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch._dynamo import guards as dynamo_guards
from torch._dynamo.source import TypeSource, is_from_source
from torch._dynamo.variables.base import VariableTracker
from torch._guards import ChainedSource, Source

from fsdp_dynamo.dynamo.repeats.calls import Call
from fsdp_dynamo.dynamo.repeats.changes import NotRepeatedError
from fsdp_dynamo.module_tree import WRAPPED

SPECS: dict[str, Any] = getattr(dynamo_guards, "GUARD_VALUE_DISPATCH", {})
"""By the name of a kind of guard, what is asked and what must come out; since torch 2.13."""
_SAME = "DUPLICATE_INPUT"
"""The kind that asks whether two sources have one object; it names the second as ``source_b``."""
_TENSOR = "TENSOR_MATCH"
_EQUAL = ("CONSTANT_MATCH", "EQUALS_MATCH")
_PLAIN = {"attr", "key", "recompile_hint"}
"""What a guard may be made with that is the same for equal modules."""


class Move:
    """Sources below one call's module, as sources below another one's."""

    def __init__(self, origin: Call, target: Call) -> None:
        self._moved: dict[Any, Any] = {origin.source: target.source}

    def __call__(self, source: Any) -> Any:
        """The source; itself, where it is not below the module."""
        if source not in self._moved:
            self._moved[source] = self._rebased(source)
        return self._moved[source]

    def _rebased(self, source: Any) -> Any:
        if not isinstance(source, ChainedSource):
            return source
        kind: Any = type(source)
        moved = {}
        for name in _fields_of(kind):
            part = getattr(source, name)
            if isinstance(part, Source) and (other := self(part)) is not part:
                moved[name] = other
        return dataclasses.replace(source, **moved) if moved else source


@functools.cache
def _fields_of(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@dataclass
class GuardNote:
    """A guard on a module.

    Attributes:
        guard: the guard.
        spec: what is asked; ``None`` for one that two sources have one object.
        value: what the module has there.
        expected: what must come out.
    """

    guard: Any
    spec: Any
    value: Any = None
    expected: Any = None

    def holds_for(self, call: Call, move: Move) -> bool:
        """Whether another call's module has the same.

        Raises:
            Exception: it has nothing there.
        """
        value = call.value_at(move(self.guard.originating_source))
        if self.spec is None:
            return value is call.value_at(move(self.guard.create_fn.keywords["source_b"]))
        if type(value) is not type(self.value) or not self.spec.eval_fn(value, self.expected):
            return False
        # Numbers of different types are equal: 1, 1.0 and True, also in a tuple.
        return self.guard.create_fn_name() not in _EQUAL or repr(value) == repr(self.value)

    def install(self, call: Call, move: Move) -> None:
        """Guard another call's module, too."""
        source, create = move(self.guard.originating_source), self.guard.create_fn
        if self.guard.create_fn_name() == _TENSOR:  # it keeps sizes and strides of a known input
            VariableTracker.build(call.tx, call.value_at(source), source).realize()
            return
        if self.spec is None:
            create = functools.partial(create.func, source_b=move(create.keywords["source_b"]))
        dynamo_guards.install_guard(source.make_guard(create))


def guard_order(call: Call, move: Move) -> None:
    """Guard the order of keys of another call's dicts, where a trace has gone through them."""
    ordered = call.tx.output.guard_on_key_order
    ordered.update([move(source) for source in ordered])


def guards_on(call: Call) -> Iterator[GuardNote]:
    """The guards on the module of a call and on all that Dynamo has reached through it.

    Our own attributes are left out, as what depends on them is in the call's kind. So is what is
    found in classes, which equal modules share.

    Raises:
        NotRepeatedError: one of them can't be asked of another object.
    """
    for guard in call.tx.output.guards:
        source = guard.originating_source
        if not is_from_source(source, call.source) or _is_left_out(source, call.source):
            continue
        name = guard.create_fn_name()
        spec = SPECS.get(name)
        if name == _SAME:
            yield GuardNote(guard, None)
        elif name != _TENSOR and not _PLAIN.issuperset(getattr(guard.create_fn, "keywords", ())):
            raise NotRepeatedError(f"{source.name} has a guard {name} with values of its own")
        elif spec is None or isinstance(spec, dynamo_guards.UnsupportedGuardCheckSpec):
            raise NotRepeatedError(f"{source.name} has a guard {name}")
        elif spec is not dynamo_guards.SKIP_GUARD:
            yield _noted(call, guard, spec)


def _noted(call: Call, guard: Any, spec: Any) -> GuardNote:
    source = guard.originating_source
    try:
        value = call.value_at(source)
        return GuardNote(guard, spec, value, spec.get_metadata_fn(guard, value))
    except Exception as error:  # of torch's code for this kind of guard and source
        raise NotRepeatedError(f"{source.name} can't be looked up: {error!r}") from error


def _is_left_out(source: Any, module: Any) -> bool:
    name = source.name.removeprefix(module.name)
    if name.startswith("._fsdp_") and not name.startswith(f".{WRAPPED}"):
        return True
    while source != module:
        if isinstance(source, TypeSource):
            return True
        source = source.base
    return False
