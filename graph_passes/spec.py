"""Spec of a scheduled graph: short, executable, verified after every pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import fx

from graph_passes.gradients.flat_gradient import misplaced_writes
from graph_passes.graph_utils import (
    collectives,
    is_collective,
    is_wait,
    op_name,
)
from graph_passes.markers import launch_of, mark_of


class SpecError(RuntimeError):
    """A graph that breaks the spec."""


def _fail(stage: str, node: fx.Node, expected: str, got: str) -> None:
    raise SpecError(
        f"graph after '{stage}', node {node.name}: expected {expected}, got {got}. "
        "This is a bug of the pass named; options={'disabled_passes': [name]} leaves it out."
    )


def inventory(graph: fx.Graph) -> Counter[str]:
    """Count of each marked collective: passes must neither lose nor add any."""
    return _inventory(collectives(graph))


def _inventory(found: Iterable[fx.Node]) -> Counter[str]:
    marks = map(mark_of, found)
    return Counter(mark.encode() for mark in marks if mark is not None)


def verify_graph(graph: fx.Graph, stage: str, before: Counter[str] | None = None) -> None:
    """Check a graph of collectives.

    - every marked collective has exactly one wait, and no user but it;
    - every wait follows its collective, every use follows the wait (``lint`` checks that);
    - those of one launch are alike, and between them is nothing but what they send;
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
    found = list(collectives(graph))
    for node in found:
        users = list(node.users)
        if len(users) != 1 or not is_wait(users[0]):
            _fail(stage, node, "one wait as its only user", str(users))
        if users[0] < node:  # nodes compare by their place in the graph
            _fail(stage, node, "its wait after it", "the wait before it")
    if any(launch_of(node) is not None for node in found):
        _verify_launches(graph, stage)
    for node, expected, got in misplaced_writes(found):
        _fail(stage, node, expected, got)
    now = _inventory(found)
    if before is not None and now != before:
        lost, added = before - now, now - before
        raise SpecError(
            f"graph after '{stage}': expected the same collectives as before, lost {dict(lost)}, "
            f"added {dict(added)}. This is a bug of the pass named."
        )


def _verify_launches(graph: fx.Graph, stage: str) -> None:
    """Check launches, backwards, so that the users of a node are seen before it."""
    later: fx.Node | None = None  # of the launch that is going on
    inside: set[fx.Node] = set()  # its collectives, and what leads to them alone
    ended: set[int] = set()
    for node in reversed(graph.nodes):
        launch = launch_of(node) if is_collective(node) else None
        if later is not None and launch is not None and launch == launch_of(later):
            if _alike(node) != _alike(later):
                _fail(stage, node, f"it to be like {later.name}, launched with it", str(node.args))
            inside.add(node)
        elif launch is not None:
            if launch in ended:
                _fail(stage, node, f"the collectives of launch {launch} side by side", "a gap")
            later, inside = node, {node}
            ended.add(launch)
        elif node.users and all(user in inside for user in node.users):
            inside.add(node)
        else:
            later, inside = None, set()


def _alike(node: fx.Node) -> tuple[object, ...]:
    """Kind, dtype and group: what collectives of one launch have in common."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    settings = [arg for arg in node.args[1:] if isinstance(arg, (int, str))]  # not the gather plan
    return (op_name(node), dtype, *settings)


__all__ = ["SpecError", "inventory", "verify_graph"]
