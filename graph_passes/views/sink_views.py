"""Sink views: a view of an unsharded flat parameter stands where it is first used.

Before::

    wait -> norm_weight = as_strided(wait)   embedding   ...   mul(x, norm_weight)

After::

    wait   embedding   ...   norm_weight = as_strided(wait)   mul(x, norm_weight)

Tracing makes all views of a unit at the start of its forward. A gather is needed when the first
node behind its wait runs; so, where that is a view, it would be needed long before anything is
computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import is_alias, is_wait
from graph_passes.markers import mark_of


@graph_pass(is_bitwise=True)
def sink_views(graph: fx.Graph) -> None:
    """Move all views of gathered tensors down to their first users; values stay the same."""
    for view in reversed(list(_views_of_gathers(graph))):
        if view.users:
            min(view.users).prepend(view)  # nodes compare by their place in the graph


def _views_of_gathers(graph: fx.Graph) -> Iterator[fx.Node]:
    """Views of gathered tensors, and views of these, in graph order."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_wait(node):
            mark = mark_of(node.all_input_nodes[0])
            if mark is not None and mark.kind == "all_gather":
                found.add(node)
        elif is_alias(node) and found.issuperset(node.all_input_nodes):
            found.add(node)
            yield node


__all__ = ["sink_views"]
