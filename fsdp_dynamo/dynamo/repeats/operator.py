"""What stands in traced code for a call that is traced once a kind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch._dynamo.utils import counters
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.higher_order_ops import _hop_name_to_variable_class
from torch._ops import HigherOrderOperator

from fsdp_dynamo.dynamo.garbage import collected_seldom
from fsdp_dynamo.dynamo.repeats.calls import Call, Kind
from fsdp_dynamo.dynamo.repeats.changes import NotRepeatedError, watched
from fsdp_dynamo.dynamo.repeats.guards import SPECS
from fsdp_dynamo.dynamo.repeats.notes import Note, note_of, trace_call

COUNTER = "fsdp_dynamo"
"""Group of ``torch._dynamo.utils.counters``; ``repeated_calls`` counts calls not traced."""
_MOST_NOTES = 8
"""Of a key. Calls that equal none of them are traced and not noted."""

_log = logging.getLogger(__name__)

Describe = Callable[[str, str], Kind | None]


class _Operator(HigherOrderOperator):  # type: ignore[misc]
    def __init__(self, label: str, describe: Describe) -> None:
        super().__init__(label)  # type: ignore[no-untyped-call]
        self.describe = describe

    def __call__(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


def traced_each_time(fn: Callable[..., Any], *args: Any) -> Any:
    """The call itself, in place of the operator where no guard can be asked."""
    return fn(*args)


def call_once_a_kind(label: str, describe: Describe) -> Callable[..., Any]:
    """Make what stands in traced code for ``fn(name, module, own, settings, *others)``.

    It is called with ``fn`` before these: a name; the module; inputs of the graph that are the
    module's own; a text; and arguments in which equal calls are equal.

    Args:
        label: its name among the operators that Dynamo knows.
        describe: the kind of a call, by name and settings; ``None`` for one that equals no other.
    """
    if not SPECS:
        return traced_each_time
    _hop_name_to_variable_class[label] = _Variable
    return _Operator(label, describe)


@dataclass
class _Trace:
    """Of one graph of Dynamo's.

    Attributes:
        notes: by key; ``None`` for a key whose calls have to be traced.
        num_calls: how many calls it has met.
        own: ``Changes.own`` of all of them.
    """

    notes: dict[Hashable, list[Note] | None] = field(default_factory=dict)
    num_calls: int = 0
    own: set[Any] = field(default_factory=set)


_traces: WeakKeyDictionary[Any, _Trace] = WeakKeyDictionary()


def _trace_of(output: Any) -> _Trace:
    """What belongs to an ``OutputGraph``. Its notes, which hold the graph, go before the graph is
    compiled."""
    trace = _traces.get(output.tracing_context)
    if trace is None:
        trace = _traces[output.tracing_context] = _Trace()
        output.add_cleanup_hook(trace.notes.clear)
    return trace


class _Variable(VariableTracker):
    """The operator, as Dynamo calls it."""

    def __init__(self, value: _Operator, source: Any = None, **options: Any) -> None:
        super().__init__(source=source, **options)  # type: ignore[no-untyped-call]
        self.value = value

    @collected_seldom()
    def call_function(self, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Dynamo's variable of what the call returns."""
        fn, name, module, own, settings, *others = args
        trace = _trace_of(tx.output)
        trace.num_calls += 1
        kind = self.value.describe(name.as_python_constant(), settings.as_python_constant())

        def run() -> Any:
            return fn.call_function(tx, list(args[1:]), kwargs)

        if kind is None:
            with watched(tx.output, trace.own):
                return run()
        try:
            call = Call.of(tx, kind, module, own, others)
        except NotRepeatedError as error:
            _say_why(kind, error)
            call = None
        return run() if call is None else _repeat_or_trace(trace, call, run)


def _repeat_or_trace(trace: _Trace, call: Call, run: Callable[[], Any]) -> Any:
    notes = trace.notes.setdefault(call.key, [])
    for note in notes or ():
        result = note.repeat(call)
        if result is not None:
            counters[COUNTER]["repeated_calls"] += 1
            return result
    if notes is None or len(notes) == _MOST_NOTES:
        return run()
    num_calls = trace.num_calls
    traced = trace_call(call, run, trace.own)
    try:
        if trace.num_calls > num_calls:
            raise NotRepeatedError("other units are called in it")
        notes.append(note_of(call, traced))
    except NotRepeatedError as error:
        trace.notes[call.key] = None
        _say_why(call.kind, error)
    return traced.result


def _say_why(kind: Kind, error: NotRepeatedError) -> None:
    _log.debug("%s is traced by itself: %s", kind.marks, error)
