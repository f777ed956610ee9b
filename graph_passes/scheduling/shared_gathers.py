"""One all-gather for all calls of a unit in a graph.

In the joint graph of a unit that is called twice, in checkpointed code, before the partition::

    shard -> all_gather -> wait -> first call
    shard -> all_gather -> wait -> second call

and after it::

    shard -> all_gather -> wait -> first call, second call

Torch's elimination of common subexpressions merges the all-gathers only, as a wait has an effect
(since torch 2.14; before, it merged both): one collective would be waited for twice.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from graph_passes.graph_utils import is_collective, is_wait
from graph_passes.markers import mark_of


def share_gathers(graph: fx.Graph) -> None:
    """Merge equal all-gathers, with the casts before them and their waits.

    Args:
        graph: a joint graph; changed in place.
    """
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _leads_to_parameters(node):
            continue
        key = (node.target, node.args, tuple(sorted(node.kwargs.items())))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _leads_to_parameters(node: fx.Node) -> bool:
    """Whether it is an all-gather, its wait, or what is computed for it."""
    if node.op != "call_function":
        return False
    source = node.args[0] if is_wait(node) else node
    return _is_gather(source) or any(map(_is_gather, node.users))


def _is_gather(node: Any) -> bool:
    mark = mark_of(node) if is_collective(node) else None
    return mark is not None and mark.kind == "all_gather"
