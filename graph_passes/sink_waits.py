"""Sink waits: a reduction is waited for when the next but one has been issued.

Before::

    rs(k) wait(k) compute(k-1) rs(k-1) wait(k-1) compute(k-2) ...

After::

    rs(k) compute(k-1) rs(k-1) compute(k-2) rs(k-2) wait(k) ...

At most ``MAX_IN_FLIGHT`` unsharded gradients are kept alive by reductions in flight. A wait never
sinks below the first use of its result.
"""

from __future__ import annotations

from torch import fx

from graph_passes.graph_utils import collectives, order_index, wait_of
from graph_passes.markers import mark_of

MAX_IN_FLIGHT = 2


def sink_waits(graph: fx.Graph) -> None:
    """Move the wait of every reduction down, with the private chain that hangs on it."""
    reductions = [node for node in collectives(graph) if _is_reduction(node)]
    output = next(node for node in graph.nodes if node.op == "output")
    for position, node in enumerate(reductions):
        later = position + MAX_IN_FLIGHT
        target = reductions[later] if later < len(reductions) else output
        _sink(graph, wait_of(node), target)


def _is_reduction(node: fx.Node) -> bool:
    mark = mark_of(node)
    return mark is not None and mark.kind in ("reduce_scatter", "all_reduce")


def _sink(graph: fx.Graph, wait: fx.Node, target: fx.Node) -> None:
    """Move ``wait`` and what uses its result before ``target`` to just behind ``target``."""
    index = order_index(graph)
    chain: list[fx.Node] = []
    pending = [wait]
    while pending:
        node = pending.pop()
        if node in chain or index[node] > index[target] or node.op == "output":
            continue
        if node is target:
            return  # the later reduction depends on this one
        chain.append(node)
        pending.extend(node.users)
    anchor = target
    for node in sorted(chain, key=lambda n: index[n]):
        if target.op == "output":
            target.prepend(node)
        else:
            anchor.append(node)
            anchor = node
