"""Stretches as graphs by themselves; equal ones have equal keys."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graph_passes.gradients.flat_gradient import write_name
from graph_passes.graph_utils import op_name
from graph_passes.node_equality import Numbered, attribute_key, value_key
from graph_passes.stretches.cutting import Stretch, is_copied, root_of


def key_of(stretch: Stretch, owner: fx.GraphModule) -> Any:
    """Hashable key, equal for two stretches exactly if one graph can stand for both.

    Args:
        stretch: of a graph.
        owner: the module of that graph.
    """
    numbered = Numbered([*stretch.inputs, *stretch.nodes], root_of)
    inputs = tuple(value_key(node.meta.get("val")) for node in stretch.inputs)
    nodes = tuple(
        attribute_key(owner, node) if node.op == "get_attr" else numbered.key_of(node)
        for node in stretch.nodes
    )
    return inputs, nodes, numbered.plain(stretch.outputs)


_TUNED = ("mm", "conv", "attention")
"""Parts of the names of operators for which a compiler has a choice of kernels."""


def is_one_operator(stretch: Stretch) -> bool:
    """Whether there is nothing to compile: one plain operator, and views of what it reads."""
    computed = [
        node
        for node in stretch.nodes
        if not is_copied(node) and node.target is not operator.getitem
    ]
    if len(computed) != 1 or not isinstance(computed[0].target, torch._ops.OpOverload):
        return False
    if write_name(computed[0]):
        return True
    name = op_name(computed[0])
    return name.startswith("aten::") and not any(part in name for part in _TUNED)


def graph_of(stretch: Stretch, owner: fx.GraphModule) -> fx.GraphModule:
    """A stretch as a graph: ``outputs = graph(*inputs)``. Names in it do not depend on its place.

    Args:
        stretch: of a graph.
        owner: the module of that graph.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(stretch.inputs):
        copies[node] = graph.placeholder(f"arg{position}")
        copies[node].meta["val"] = node.meta["val"]

    def copied(node: fx.Node) -> fx.Node:
        return copies[node] if node in copies else copies[root_of(node)]

    for node in stretch.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), copied)
        copy = graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
        copy.meta = dict(node.meta)
        copies[node] = copy
    outputs = tuple(copies[node] for node in stretch.outputs)
    graph.output(outputs)
    return fx.GraphModule(owner, graph)


def example_inputs(stretch: Stretch) -> list[Any]:
    """Fake tensors, and sizes, that a stretch is compiled with."""
    return [node.meta["val"] for node in stretch.inputs]


__all__ = ["example_inputs", "graph_of", "is_one_operator", "key_of"]
