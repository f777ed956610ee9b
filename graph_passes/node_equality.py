"""Equality of nodes and values: what one graph can stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def value_key(value: Any, is_placed: bool = True) -> Any:
    """Hashable key, equal for values that are the same to a compiled graph.

    Tensors are compared by shape, stride, offset, dtype, device and whether they require a
    gradient; objects that are neither tensors nor plain constants by identity.

    Args:
        value: of a node.
        is_placed: whether it matters where in its memory a tensor begins. That differs between
            ranks whose batches are parts of one tensor.
    """
    if isinstance(value, torch.Tensor):
        return (
            type(value),
            tuple(map(str, value.shape)),
            tuple(map(str, value.stride())),
            str(value.storage_offset()) if is_placed else "",
            value.dtype,
            value.device,
            value.requires_grad,
        )
    if isinstance(value, float):
        return (float, repr(value))  # nan equals itself, 0.0 is not -0.0
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), str(value))
    if value is None or isinstance(
        value, (bool, int, complex, str, bytes, torch.dtype, torch.device, torch.layout)
    ):
        return (type(value), value)
    return (type(value), id(value))


class Numbered:
    """Nodes of a piece of a graph, compared by their place in it.

    Args:
        nodes: its inputs and its nodes, in order.
        stands_for: gives the node of these that another one stands for.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], stands_for: Callable[[fx.Node], fx.Node] = lambda n: n
    ) -> None:
        self._number = {node: position for position, node in enumerate(nodes)}
        self._stands_for = stands_for

    def key_of(self, node: fx.Node) -> Any:
        """Key of what a node does: equal for nodes that do the same with the same."""
        return node.op, value_key(node.target), self.plain(node.args), self.plain(node.kwargs)

    def plain(self, value: Any) -> Any:
        """Key of an argument."""
        if isinstance(value, fx.Node):
            number = self._number.get(value)
            return ("node", self._number[self._stands_for(value)] if number is None else number)
        if isinstance(value, (list, tuple)):
            return (type(value), *map(self.plain, value))
        if isinstance(value, dict):
            return (dict, *((key, self.plain(value[key])) for key in value))
        if isinstance(value, slice):
            return (slice, *map(self.plain, (value.start, value.stop, value.step)))
        return value_key(value)


def body_key(body: fx.GraphModule) -> Any:
    """Key of the body of an operator: equal for bodies that do the same, under any names.

    Args:
        body: as Dynamo or AOTAutograd has made it.
    """
    nodes = list(body.graph.nodes)
    numbered = Numbered(nodes)
    does = [
        (node.op, numbered.plain(node.args))
        if node.op in ("placeholder", "output")
        else attribute_key(body, node)
        if node.op == "get_attr"
        else numbered.key_of(node)
        for node in nodes
    ]
    meta = sorted((name, value_key(value)) for name, value in body.meta.items())
    return ("graph", *does, *meta)


def attribute_key(owner: fx.GraphModule, node: fx.Node) -> Any:
    """Key of an attribute of a graph: bodies of operators are equal if they do the same; all else
    equals only itself.

    Args:
        owner: the module of the graph.
        node: takes the attribute.
    """
    value = operator.attrgetter(str(node.target))(owner)
    return body_key(value) if isinstance(value, fx.GraphModule) else ("attribute", id(value))


__all__ = ["Numbered", "attribute_key", "body_key", "value_key"]
