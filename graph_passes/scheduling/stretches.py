"""Cut a scheduled graph at its boundaries into stretches of compute.

Before::

    wait(a) -> split -> view -> mm -> gelu    all_gather(c)    mm -> write(flat)   wait(b) ...

After::

    wait(a)    s0: split, view, mm, gelu    all_gather(c)    s1: mm, write    wait(b)    ...

A stretch takes and returns tensors.

- Views and constants are copied into every stretch that reads them, so that it takes the unsharded
  buffer itself and not its views.
- A write into a flat gradient changes an input of the stretch and is no output.
- Sizes, and flat gradients before their first write, belong to no stretch.
- A stretch takes every symbolic size in its shapes as an input.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils import _pytree as pytree

from graph_passes.gradients.flat_gradient import write_name
from graph_passes.graph_utils import (
    Numbered,
    attribute_key,
    is_alias,
    op_name,
    order_index,
    value_key,
)
from graph_passes.markers import unit_of


@dataclass(eq=False)
class Stretch:
    """Nodes that are computed between two boundaries.

    Attributes:
        nodes: nodes that are computed, in graph order.
        inputs: nodes outside that they read, in order of first use. A flat gradient that is written
            is among them, as the node that made it.
        outputs: nodes that are read elsewhere.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


@dataclass
class Cutting:
    """A graph in parts.

    Attributes:
        parts: boundaries and stretches, in order.
        home: the stretch of every node that is in one.
    """

    parts: list[fx.Node | Stretch]
    home: dict[fx.Node, Stretch]

    def stretches(self) -> list[Stretch]:
        """Return the stretches, in order."""
        return [part for part in self.parts if isinstance(part, Stretch)]


def cut(graph: fx.Graph, is_boundary: Callable[[fx.Node], bool]) -> Cutting:
    """Cut a scheduled graph in the order of its nodes.

    ``is_boundary`` tells whether a node stands between two stretches.
    """
    cutting = _assign(graph, is_boundary)
    read = _read_outside(graph, cutting)
    sizes = _Sizes(graph)
    for stretch in cutting.stretches():
        body = _body(stretch)
        inside = set(body)
        inputs = [root_of(n) for node in body for n in node.all_input_nodes if n not in inside]
        inputs += sizes.read_by([*inputs, *body], before=stretch.nodes[0])
        stretch.nodes = body
        stretch.inputs = list(dict.fromkeys(inputs))
        read.update(stretch.inputs)
    for stretch in cutting.stretches():
        computed = [node for node in stretch.nodes if cutting.home.get(node) is stretch]
        stretch.outputs = [node for node in computed if node in read]
    return cutting


def _assign(graph: fx.Graph, is_boundary: Callable[[fx.Node], bool]) -> Cutting:
    current = Stretch()
    cutting = Cutting([], {})
    for node in graph.nodes:
        if is_boundary(node):
            cutting.parts += [current] if current.nodes else []
            cutting.parts.append(node)
            current = Stretch()
        elif not is_placed_freely(node) and node.op == "call_function":
            home = cutting.home.get(node.all_input_nodes[0]) if _is_item(node) else current
            if home is current and _begins_unit(node, current):
                cutting.parts.append(current)
                home = current = Stretch()
            if home is not None:  # else an item of what a boundary returns
                home.nodes.append(node)
                cutting.home[node] = home
    cutting.parts += [current] if current.nodes else []
    return cutting


def _begins_unit(node: fx.Node, stretch: Stretch) -> bool:
    """Whether a node belongs to another unit than the nodes of a stretch so far."""
    unit = unit_of(node)
    if unit is None or _is_item(node):
        return False
    latest = next((u for n in reversed(stretch.nodes) if (u := unit_of(n)) is not None), unit)
    return unit != latest


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def is_copied(node: fx.Node) -> bool:
    """Whether a node is repeated in every stretch that reads it: it costs nothing there."""
    if node.op == "get_attr" or is_alias(node):
        return True
    return op_name(node) in _CONSTANTS and not node.all_input_nodes


_CONSTANTS = frozenset({"aten::full", "aten::scalar_tensor", "aten::arange", "prims::iota"})


def is_placed_freely(node: fx.Node) -> bool:
    """Whether a node belongs to no stretch by itself: views, constants, sizes, flat gradients."""
    return is_copied(node) or write_name(node) == "new_flat" or _is_size(node)


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int))


def root_of(node: fx.Node) -> fx.Node:
    """Return the flat gradient behind a write, and any other node itself."""
    while write_name(node) not in ("", "new_flat"):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _body(stretch: Stretch) -> list[fx.Node]:
    """Return the nodes of a stretch, and the views and constants that they read, in order.

    Sizes of values computed here are included as well; other sizes are inputs.
    """
    body: dict[fx.Node, None] = {}
    follows = dict.fromkeys(stretch.nodes, True)

    def is_made_here(node: fx.Node) -> bool:
        if node not in follows:
            looks_through = is_copied(node) or (_is_size(node) and node.op != "placeholder")
            follows[node] = looks_through and any(map(is_made_here, node.all_input_nodes))
        return follows[node]

    def include(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in body and (is_copied(source) or is_made_here(source)):
                include(source)
        body[node] = None

    for node in stretch.nodes:
        include(node)
    return list(body)


class _Sizes:
    """Symbolic sizes, and the node that introduces each into a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._position = order_index(graph)
        self._brought_by: dict[Any, fx.Node] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
                self._brought_by.setdefault(value.node.expr, node)

    def read_by(self, nodes: Sequence[fx.Node], before: fx.Node) -> Iterator[fx.Node]:
        """Yield the nodes that introduce sizes in shapes: for ``(a * b, 8)`` both ``a`` and ``b``.

        Args:
            nodes: nodes of a stretch, with its inputs.
            before: its first node. Sizes that the stretch itself introduces are left out.
        """
        if not self._brought_by:
            return
        symbols = free_symbols(pytree.tree_leaves([node.meta.get("val") for node in nodes]))
        for symbol in sorted(symbols, key=str):
            node = self._brought_by.get(symbol)
            if node is not None and self._position[node] < self._position[before]:
                yield node


def _read_outside(graph: fx.Graph, cutting: Cutting) -> set[fx.Node]:
    """Return the nodes that boundaries, sizes or the graph's output read, also through views.

    (Inputs of stretches are added by ``cut``.)
    """
    read: set[fx.Node] = set()
    waiting = [
        node
        for node in graph.nodes
        if node not in cutting.home and not is_copied(node) and node.op != "placeholder"
    ]
    while waiting:
        for source in map(root_of, waiting.pop().all_input_nodes):
            if source not in read:
                read.add(source)
                if is_copied(source):
                    waiting.append(source)
    return read


# -- bodies ----------------------------------------------------------------------------------------
# Stretches as graphs of their own.


def key_of(stretch: Stretch, owner: fx.GraphModule) -> Any:
    """Return a hashable key, equal for two stretches iff one graph can replace both.

    ``owner`` is the module of the graph.
    """
    numbered = Numbered([*stretch.inputs, *stretch.nodes], root_of)
    inputs = tuple(value_key(node.meta.get("val")) for node in stretch.inputs)
    nodes = tuple(
        attribute_key(owner, node) if node.op == "get_attr" else numbered.key_of(node)
        for node in stretch.nodes
    )
    return inputs, nodes, numbered.plain(stretch.outputs)


_TUNED = ("mm", "conv", "attention")
"""Parts of the names of operators for which a compiler can choose among kernels."""


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
    """Return a stretch as a graph, ``outputs = graph(*inputs)``; names ignore its place."""
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
    """Return the fake tensors and sizes with which a stretch is compiled."""
    return [node.meta["val"] for node in stretch.inputs]


__all__ = [
    "Cutting",
    "Stretch",
    "cut",
    "example_inputs",
    "graph_of",
    "is_copied",
    "is_one_operator",
    "is_placed_freely",
    "key_of",
    "root_of",
]
