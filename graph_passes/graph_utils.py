"""Predicates and look-ups on FX graphs of collectives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

_C10D = "_c10d_functional::"
_WAIT = "_c10d_functional::wait_tensor"


def op_name(node: fx.Node) -> str:
    """Qualified name of the ATen or c10d operator that a node calls; ``""`` for others."""
    if node.op != "call_function":
        return ""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name()).split(".")[0]
    return ""


def is_wait(node: fx.Node) -> bool:
    """A wait for a functional collective."""
    return op_name(node) == _WAIT


def is_collective(node: fx.Node) -> bool:
    """A functional collective (not its wait)."""
    name = op_name(node)
    return name.startswith(_C10D) and name != _WAIT


def wait_of(node: fx.Node) -> fx.Node:
    """The one wait of a collective; raises ``ValueError`` if it has none or several."""
    waits = [user for user in node.users if is_wait(user)]
    if len(waits) != 1:
        raise ValueError(f"collective {node.name}: expected one wait, got {len(waits)}")
    return waits[0]


def collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """All functional collectives, in graph order."""
    return (node for node in graph.nodes if is_collective(node))


def order_index(graph: fx.Graph) -> dict[fx.Node, int]:
    """Position of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def num_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor, from its metadata."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def is_backward(graph: fx.Graph) -> bool:
    """Whether a partitioned graph is a backward graph (it has tangents among its inputs)."""
    return any(n.op == "placeholder" and "tangents" in n.name for n in graph.nodes)


_VIEWS = """
    view _unsafe_view reshape t transpose permute detach alias expand split split_with_sizes
    slice select unsqueeze squeeze as_strided unbind
"""
_NO_COMPUTE = frozenset(f"aten::{name}" for name in _VIEWS.split())


def is_compute(node: fx.Node) -> bool:
    """A node that computes: neither a collective nor a view."""
    name = op_name(node)
    return bool(name) and not name.startswith(_C10D) and name not in _NO_COMPUTE
