"""Copies of what a call has put into the graph, for another call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._dynamo.variables.base import ValueMutationNew, VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch.fx import traceback

from fsdp_dynamo.dynamo.repeats.calls import LEAVES, Call
from fsdp_dynamo.dynamo.repeats.guards import Move


@dataclass
class Copies:
    """What makes copies.

    Attributes:
        origin: the call that was traced.
        target: the one that equals it.
        move: sources of the first as sources of the second.
    """

    origin: Call
    target: Call
    move: Move

    def of(self, nodes: list[fx.Node], returned: set[fx.Node]) -> dict[fx.Node, Any]:
        """Put copies of nodes into the graph.

        Fake values inside are those of the originals: what is returned has its own, as if computed.

        Args:
            nodes: in the order of the graph.
            returned: those whose variables are wanted.

        Returns:
            by node of ``origin``, the variable of its counterpart: of what both are given, and of
            ``returned``.
        """
        tracer = self.target.tx.output.current_tracer
        copies = dict(zip(self.origin.nodes, self.target.nodes, strict=True))
        variables = dict(zip(self.origin.nodes, self.target.leaves, strict=True))
        texts = dict(zip(self.origin.kind.texts, self.target.kind.texts, strict=True))

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = self._input(node)
            return copies[node]

        for node in nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copy_of)
            args = tuple([texts.get(a, a) if isinstance(a, str) else a for a in args])
            target = self._body(str(node.target)) if node.op == "get_attr" else node.target
            copy = tracer.create_node(node.op, target, args, kwargs, node.name, node.type)
            copy.meta |= self._meta(node)
            copies[node] = copy
            if node in returned:
                value = copy.meta.pop("example_value").clone()
                proxy = fx.Proxy(copy, tracer)
                variables[node] = wrap_fx_proxy(self.target.tx, proxy, example_value=value)
        return variables

    def _input(self, node: fx.Node) -> fx.Node:
        """The counterpart of an input of the graph that is no argument: below the module, or shared
        by all."""
        before = node.meta["grapharg"].source
        source = self.move(before)
        if source == before:
            return node
        value = self.target.value_at(source)
        with traceback.annotate(self._meta(node).get("custom", {})):
            proxy = VariableTracker.build(self.target.tx, value, source).as_proxy()
        counterpart: fx.Node = proxy.node
        return counterpart

    def _body(self, name: str) -> str:
        """The name of a copy of the body of an operator."""
        output = self.target.tx.output
        body = output.nn_modules[name]
        copies: dict[fx.Node, fx.Node] = {}
        copied = fx.GraphModule(body, fx.Graph())
        for node in body.graph.nodes:
            copies[node] = copied.graph.node_copy(node, copies.__getitem__)
            copies[node].meta = self._meta(node)
        copied.meta |= body.meta
        copied.recompile()
        installed: str = output.install_subgraph(name.rstrip("0123456789").rstrip("_"), copied)
        return installed

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        """What a copy of a node has in its ``meta``."""
        meta = {key: value for key, value in node.meta.items() if key != "creation_timestamp"}
        if "custom" in meta:
            marks = self.target.kind.marks
            meta["custom"] = meta["custom"] | {k: marks[k] for k in marks if k in meta["custom"]}
        if "nn_module_stack" in meta:
            inside = {
                key: (self._name(name), module)
                for key, (name, module) in meta["nn_module_stack"].items()
                if key not in self.origin.path
            }
            meta["nn_module_stack"] = self.target.path | inside
        return meta

    def _name(self, name: str) -> str:
        """A name in ``nn_module_stack``, of the target's module in place of the origin's."""
        before, after = _path_of(self.origin.source), _path_of(self.target.source)
        return after + name.removeprefix(before) if name.startswith(before) else name


def _path_of(source: Any) -> str:
    """Where a module is, as it stands in ``nn_module_stack``."""
    return re.sub(r"\.(?:_modules|__dict__\['_modules'\])\['([^']*)'\]", r".\1", source.name)


def rebuilt(variable: Any, made: dict[fx.Node, Any]) -> Any:
    """A result with other tensors in it.

    Args:
        variable: the result.
        made: by node of its tensors, the variables in their place.
    """
    variable = variable.realize()
    if type(variable) in LEAVES:
        return made[variable.as_proxy().node]
    if type(variable) is TupleVariable:
        return TupleVariable([rebuilt(item, made) for item in variable.items])
    if type(variable) is ListVariable:
        items = [rebuilt(item, made) for item in variable.items]
        return ListVariable(items, mutation_type=ValueMutationNew())
    if type(variable) is ConstDictVariable:
        entries = {key.vt: rebuilt(value, made) for key, value in variable.items.items()}
        return ConstDictVariable(entries, mutation_type=ValueMutationNew())
    return variable
