"""What the trace of a call has found, and copies of it for equal calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from fsdp_dynamo.dynamo.repeats.calls import LEAVES, Call, leaves_of
from fsdp_dynamo.dynamo.repeats.changes import Changes, NotRepeatedError, watched
from fsdp_dynamo.dynamo.repeats.guards import GuardNote, Move, guards_on


@dataclass
class Note:
    """What the trace of a call has found.

    Attributes:
        call: the call.
        nodes: those that it has put into the graph, in order.
        guards: those on its module.
        read: sources of what it has read.
        result: what it has returned.
    """

    call: Call
    nodes: list[fx.Node]
    guards: list[GuardNote]
    read: set[Any]
    result: Any

    def repeat(self, call: Call) -> Any:
        """What another call of the same key returns; ``None`` if it is not equal."""
        move = Move(self.call, call)
        if not self._holds_for(call, move):
            return None
        for guard in self.guards:
            guard.install(call, move)
        made = dict(zip(self.call.nodes, call.leaves, strict=True))
        return _rebuilt(self.result, made | self._copies(call, move))

    def _holds_for(self, call: Call, move: Move) -> bool:
        mutated = call.tx.output.side_effects.mutated_sources
        if not mutated.isdisjoint(map(move, self.read)):
            return False
        try:
            return all(guard.holds_for(call, move) for guard in self.guards)
        except Exception:  # whatever it is that the other module does not have
            return False

    def _copies(self, call: Call, move: Move) -> dict[fx.Node, Any]:
        """Variables of the copies of nodes that are returned."""
        output = call.tx.output
        texts = dict(zip(self.call.kind.texts, call.kind.texts, strict=True))
        copies = dict(zip(self.call.nodes, call.nodes, strict=True))
        returned = {leaf.as_proxy().node for leaf in leaves_of(self.result)}
        variables = {}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:  # an input of the graph
                before = node.meta["grapharg"].source
                copies[node], source = node, move(before)
                if source != before:
                    built = VariableTracker.build(call.tx, call.value_at(source), source)
                    copies[node] = built.as_proxy().node
            return copies[node]

        for node in self.nodes:
            copy = output.graph.node_copy(node, copy_of)
            if not texts.keys().isdisjoint(a for a in node.args if isinstance(a, str)):
                copy.args = tuple([texts.get(a, a) if isinstance(a, str) else a for a in copy.args])
            copy.meta |= self._meta(node, call)
            output.current_tracer._used_names.add(copy.name)
            copies[node] = copy
            if node in returned:
                value = copy.meta.pop("example_value").clone()
                proxy = fx.Proxy(copy, output.current_tracer)
                variables[node] = wrap_fx_proxy(call.tx, proxy, example_value=value)
        return variables

    def _meta(self, node: fx.Node, call: Call) -> dict[str, Any]:
        custom = node.meta.get("custom", {})
        marks = {key: mark for key, mark in call.kind.marks.items() if key in custom}
        changed = {"custom": custom | marks, "creation_timestamp": call.tx.output.timestamp}
        if "nn_module_stack" in node.meta:
            changed["nn_module_stack"] = self._path(node.meta["nn_module_stack"], call)
        return changed

    def _path(self, path: dict[str, Any], call: Call) -> dict[str, Any]:
        origin = [name for name, _ in self.call.path.values()]
        target = [name for name, _ in call.path.values()]
        if not origin or not target:
            return path
        inside = {
            key: (target[-1] + name.removeprefix(origin[-1]), module)
            for key, (name, module) in path.items()
            if key not in self.call.path
        }
        return call.path | inside


class Traced(NamedTuple):
    """A call that was traced.

    Attributes:
        result: what it returns.
        nodes: those that it has put into the graph, in order.
        changes: what it has changed and read.
    """

    result: Any
    nodes: list[fx.Node]
    changes: Changes


def trace_call(call: Call, trace: Callable[[], Any]) -> Traced:
    """Trace a call by ``trace``, and see what that does."""
    output = call.tx.output
    last = output.graph._root.prev
    versions = [*_versions(call.nodes)]
    with watched(output) as changes:
        result = trace()
    if versions != [*_versions(call.nodes)]:
        changes.others.append("an argument")
    return Traced(result, [*_behind(last, output.graph)], changes)


def note_of(call: Call, traced: Traced) -> Note:
    """What is to be known of a call that was traced, to repeat it.

    Raises:
        NotRepeatedError: copies of its nodes would not do for another call.
    """
    traced.changes.check()
    _check_nodes(traced.nodes, call, traced.result)
    return Note(call, traced.nodes, [*guards_on(call)], traced.changes.read, traced.result)


def _behind(last: fx.Node, graph: fx.Graph) -> Iterator[fx.Node]:
    node = last.next
    while node is not graph._root:
        if node.op != "placeholder":
            yield node
        node = node.next


def _versions(nodes: list[fx.Node]) -> Iterator[int]:
    for node in nodes:
        value = node.meta["example_value"]
        if isinstance(value, torch.Tensor):
            yield value._version


def _check_nodes(nodes: list[fx.Node], call: Call, result: Any) -> None:
    """Raise unless copies of the nodes mean for another call what they mean for this one.

    Raises:
        NotRepeatedError: why not.
    """
    known = {*nodes, *call.nodes}
    outside = [n for node in nodes for n in node.all_input_nodes if n not in known]
    values = [value for node in nodes for value in tree_leaves(node.meta.get("example_value"))]
    returned = [leaf.as_proxy().node for leaf in leaves_of(result)]
    if any(node.op not in ("call_function", "call_method") for node in nodes):
        raise NotRepeatedError("it calls an operator with a body (activation checkpointing)")
    if any("grapharg" not in node.meta for node in outside):
        raise NotRepeatedError("it takes a tensor that is not among its arguments")
    if any(_versions(outside)):
        raise NotRepeatedError("it changes a tensor that is not among its arguments")
    if any(not isinstance(node.meta["example_value"], torch.Tensor) for node in outside):
        raise NotRepeatedError("it takes a dynamic size that is not among its arguments")
    if any(isinstance(v, torch.Tensor | torch.SymInt) and free_unbacked_symbols(v) for v in values):
        raise NotRepeatedError("a size depends on data")
    if not known.issuperset(returned):
        raise NotRepeatedError("it returns what it is not given")
    inputs = {_storage(node) for node in (*call.nodes, *outside)}
    own = [_storage(node) for node in dict.fromkeys(returned) if node in {*nodes}]
    if any(_strides(node) != _strides(node, clone=True) for node in returned):
        raise NotRepeatedError("it returns a tensor with gaps")
    if not inputs.isdisjoint(own) or len({*own}) < len(own):
        raise NotRepeatedError("it returns a view of an argument or of another result")


def _storage(node: fx.Node) -> Any:
    value = node.meta["example_value"]
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


def _strides(node: fx.Node, clone: bool = False) -> Any:
    value = node.meta["example_value"]
    if not isinstance(value, torch.Tensor):
        return None
    return (value.clone() if clone else value).stride()


def _rebuilt(variable: Any, made: dict[fx.Node, Any]) -> Any:
    """A result with other tensors in it."""
    variable = variable.realize()
    if type(variable) in LEAVES:
        return made[variable.as_proxy().node]
    if type(variable) is TupleVariable:
        return TupleVariable([_rebuilt(item, made) for item in variable.items])
    if type(variable) is ListVariable:
        items = [_rebuilt(item, made) for item in variable.items]
        return ListVariable(items, mutation_type=ValueMutationNew())
    if type(variable) is ConstDictVariable:
        entries = {key.vt: _rebuilt(value, made) for key, value in variable.items.items()}
        return ConstDictVariable(entries, mutation_type=ValueMutationNew())
    return variable
