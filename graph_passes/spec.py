"""What must hold of a scheduled graph. Short, executable, checked after every pass."""

from __future__ import annotations

from collections import Counter

from torch import fx

from graph_passes.flat_gradient import misplaced_writes
from graph_passes.graph_utils import collectives, is_collective, is_wait, order_index, wait_of
from graph_passes.markers import mark_of


class SpecError(RuntimeError):
    """A graph that breaks the spec."""


def _fail(stage: str, node: fx.Node, expected: str, got: str) -> None:
    raise SpecError(
        f"graph after '{stage}', node {node.name}: expected {expected}, got {got}. "
        "This is a bug of the pass named; leave it out with pipeline.passes to go on."
    )


def inventory(graph: fx.Graph) -> Counter[str]:
    """How often each marked collective occurs: passes must neither lose nor add any."""
    marks = (mark_of(node) for node in collectives(graph))
    return Counter(mark.encode() for mark in marks if mark is not None)


def verify_graph(graph: fx.Graph, stage: str, before: Counter[str] | None = None) -> None:
    """Check a graph of collectives.

    - every collective has a mark, exactly one wait, and no user but it;
    - every wait follows its collective, every use follows the wait (``lint`` checks that);
    - every element of a flat gradient that is written in slices is written once, then added to;
    - nothing was lost or added, where ``before`` is given.

    Args:
        graph: the graph.
        stage: what was done last, for the message.
        before: ``inventory`` of the graph before that.

    Raises:
        SpecError: naming the stage, the node, what was expected and what came.
    """
    graph.lint()
    index = order_index(graph)
    for node in graph.nodes:
        if is_collective(node):
            if mark_of(node) is None:
                _fail(stage, node, "a mark", "none")
            users = list(node.users)
            if len(users) != 1 or not is_wait(users[0]):
                _fail(stage, node, "one wait as its only user", str(users))
            if index[wait_of(node)] < index[node]:
                _fail(stage, node, "its wait after it", "the wait before it")
    for node, expected, got in misplaced_writes(graph):
        _fail(stage, node, expected, got)
    if before is not None and inventory(graph) != before:
        lost = before - inventory(graph)
        added = inventory(graph) - before
        raise SpecError(
            f"graph after '{stage}': expected the same collectives as before, lost {dict(lost)}, "
            f"added {dict(added)}. This is a bug of the pass named."
        )
