"""Specification of a graph of collectives, verified after every pass."""

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
    """A graph that breaks the specification."""


def _fail(stage: str, node: fx.Node, expected: str, got: str) -> None:
    raise SpecError(
        f"graph after '{stage}', node {node.name}: expected {expected}, got {got}. "
        "This is a bug of the pass named; options={'disabled_passes': [name]} leaves it out."
    )


def inventory(graph: fx.Graph) -> Counter[str]:
    """Count each marked collective: passes must neither lose nor add any."""
    return _inventory(collectives(graph))


def _inventory(found: Iterable[fx.Node]) -> Counter[str]:
    marks = map(mark_of, found)
    return Counter(mark.encode() for mark in marks if mark is not None)


def verify_graph(graph: fx.Graph, stage: str, before: Counter[str] | None = None) -> None:
    """Check a graph of collectives.

    - Every marked collective has exactly one user, its wait.
    - Every wait follows its collective; every use follows the wait (``lint`` checks that).
    - Collectives of one launch are alike; between them stand only nodes that they need.
    - Every element of a flat gradient that is written in slices is written once, then added to.
    - If ``before`` is given, no collective was lost or added.

    Args:
        graph: the graph.
        stage: name of the last stage, for the message.
        before: ``inventory`` of the graph before that stage.

    Raises:
        SpecError: names the stage, the node, what was expected and what was found.
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
    """Check launches from the end of the graph, so that users are seen before what they use."""
    later: fx.Node | None = None  # the next collective of the current launch
    inside: set[fx.Node] = set()  # collectives of the launch, and nodes that only they need
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
    """Return kind, dtype and group, which collectives of one launch have in common."""
    dtype = getattr(node.meta.get("val"), "dtype", None)
    settings = [arg for arg in node.args[1:] if isinstance(arg, (int, str))]  # not the gather plan
    return (op_name(node), dtype, *settings)


__all__ = ["SpecError", "inventory", "verify_graph"]
