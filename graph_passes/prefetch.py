"""Prefetch: issue each all-gather one unit early.

Before::

    ag(k) wait(k) compute(k) ag(k+1) wait(k+1) compute(k+1)

After::

    ag(k) wait(k) ag(k+1) compute(k) wait(k+1) compute(k+1)

An all-gather moves up to just behind the wait of the all-gather before it, so that at most one
unit is gathered ahead. It takes along what it alone depends on (the cast of its shard).
"""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from graph_passes.graph_utils import collectives, is_collective, is_wait, order_index, wait_of
from graph_passes.markers import mark_of


def prefetch_all_gathers(graph: fx.Graph) -> None:
    """Move every all-gather behind the wait of the unit gathered before the previous one ended.

    All-gathers of one unit (several flat parameters) move together.
    """
    units: list[tuple[str, list[fx.Node]]] = []
    for node in collectives(graph):
        mark = mark_of(node)
        if mark is None or mark.kind != "all_gather":
            continue
        if units and units[-1][0] == mark.unit:
            units[-1][1].append(node)
        else:
            units.append((mark.unit, [node]))
    for (_, previous), (_, current) in pairwise(units):
        index = order_index(graph)
        anchor = max((wait_of(node) for node in previous), key=lambda n: index[n])
        for node in current:
            anchor = _move_behind(graph, node, anchor)


def _move_behind(graph: fx.Graph, node: fx.Node, anchor: fx.Node) -> fx.Node:
    """Move ``node`` and the private chain it hangs on; returns the new anchor."""
    index = order_index(graph)
    chain: list[fx.Node] = []
    pending = [node]
    while pending:
        current = pending.pop()
        if index[current] <= index[anchor] or current.op == "placeholder":
            continue
        if is_wait(current) or (is_collective(current) and current is not node):
            return anchor  # it depends on another collective: leave it where it is
        if current not in chain:
            chain.append(current)
        pending.extend(current.all_input_nodes)
    for moved in sorted(chain, key=lambda n: index[n]):
        anchor.append(moved)
        anchor = moved
    return anchor
