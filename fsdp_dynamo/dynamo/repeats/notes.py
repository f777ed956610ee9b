"""What the trace of a call has found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from fsdp_dynamo.dynamo.repeats.calls import Call, found_in
from fsdp_dynamo.dynamo.repeats.changes import Changes, NotRepeatedError, watched
from fsdp_dynamo.dynamo.repeats.copies import Copies, rebuilt
from fsdp_dynamo.dynamo.repeats.guards import GuardNote, Move, guard_order, guards_on
from graph_passes.graph_utils import is_checkpointed


@dataclass
class Note:
    """What the trace of a call has found.

    Attributes:
        call: the call.
        nodes: those that it has put into the graph, in order.
        guards: those on its module.
        changes: what it has read.
        result: what it has returned.
    """

    call: Call
    nodes: list[fx.Node]
    guards: list[GuardNote]
    changes: Changes
    result: Any

    def repeat(self, call: Call) -> Any:
        """What another call of the same key returns; ``None`` if it is not equal."""
        move = Move(self.call, call)
        if not self._holds_for(call, move):
            return None
        returned = {leaf.as_proxy().node for leaf in found_in(self.result).leaves}
        made = Copies(self.call, call, move).of(self.nodes, returned)
        for guard in self.guards:
            guard.install(call, move)
        guard_order(call, move)
        return rebuilt(self.result, made)

    def _holds_for(self, call: Call, move: Move) -> bool:
        changed = {*call.tx.output.side_effects.mutated_sources} - self.changes.own
        if not changed.isdisjoint(map(move, self.changes.read)):
            return False
        try:
            return all(guard.holds_for(call, move) for guard in self.guards)
        except Exception:  # whatever it is that the other module does not have
            return False


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


def trace_call(call: Call, trace: Callable[[], Any], own: set[Any]) -> Traced:
    """Trace a call by ``trace``, and see what that does.

    Args:
        call: the call.
        trace: traces it.
        own: see ``Changes``.
    """
    output = call.tx.output
    last = output.graph._root.prev
    versions = [*_versions(call.nodes)]
    with watched(output, own, call.containers) as changes:
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
    return Note(call, traced.nodes, [*guards_on(call)], traced.changes, traced.result)


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
    found = found_in(result)
    returned = [leaf.as_proxy().node for leaf in found.leaves]
    for node in nodes:
        if node.op == "get_attr":
            if not is_checkpointed(node, call.tx.output.nn_modules[node.target]):
                raise NotRepeatedError("it calls an operator with a body")
        elif node.op not in ("call_function", "call_method"):
            raise NotRepeatedError(f"it has a node {node.op}")
    if any("grapharg" not in node.meta for node in outside):
        raise NotRepeatedError("it takes a tensor that is not among its arguments")
    if any(_versions(outside)):
        raise NotRepeatedError("it changes a tensor that is not among its arguments")
    if any(not isinstance(node.meta["example_value"], torch.Tensor) for node in outside):
        raise NotRepeatedError("it takes a dynamic size that is not among its arguments")
    if any(isinstance(v, torch.Tensor | torch.SymInt) and free_unbacked_symbols(v) for v in values):
        raise NotRepeatedError("a size depends on data")
    if not known.issuperset(returned):
        raise NotRepeatedError("it returns a tensor that it has not made")
    if any(one.source or any(one is g for g in call.containers) for one in found.containers):
        raise NotRepeatedError("it returns a list or a dict that it has not made")
    if not call.tx.output.side_effects.store_attr_mutations.keys().isdisjoint(found.leaves):
        raise NotRepeatedError("it returns a tensor to which it has given an attribute")
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
