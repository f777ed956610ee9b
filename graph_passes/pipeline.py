"""The ordered passes over a partitioned graph; the spec is verified after each.

A pass is a callable ``pass_(graph) -> None`` that changes the graph in place. It is named in
error messages by its ``__name__``, and explained by the first line of its docstring. It takes part
in the compile-cache key by its source, and by what its method ``cache_key()`` returns, if it has
one.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import fx

from graph_passes.gradients.grad_buffer import grad_buffer, grad_buffer_node_by_node
from graph_passes.gradients.group_writes import group_writes
from graph_passes.scheduling.planner import Planner
from graph_passes.source_digest import source_digest
from graph_passes.spec import inventory, verify_graph
from graph_passes.views.cut_views import cut_views
from graph_passes.views.drop_noop_views import drop_noop_views
from graph_passes.views.sink_views import sink_views

GraphPass = Callable[[fx.Graph], None]
"""Changes a graph in place."""


VIEW_PASSES: tuple[GraphPass, ...] = (drop_noop_views, cut_views)
"""For the body of a region that is run node by node; it holds no collectives."""


def default_passes(
    planner: GraphPass,
    node_by_node: bool = False,
    more: Sequence[GraphPass] = (),
    with_grad_buffer: bool = True,
) -> tuple[GraphPass, ...]:
    """The passes that our backends run.

    Args:
        planner: what places the collectives.
        node_by_node: for a graph that is run as it is, where every node costs host time; a
            compiler does away with views by itself.
        more: a user's own, which run before the collectives are placed.
        with_grad_buffer: whether gradients are written into the flat gradient.

    Returns:
        The passes, in order; the planner last.
    """
    views: tuple[GraphPass, ...] = VIEW_PASSES if node_by_node else ()
    buffers: tuple[GraphPass, ...] = (grad_buffer,)
    if node_by_node:
        buffers = (grad_buffer_node_by_node, group_writes)
    return (*views, *(buffers if with_grad_buffer else ()), *more, sink_views, planner)


def _look_away(graph: fx.Graph, stage: str) -> None:
    """Nobody wants to see it."""


@dataclass
class Pipeline:
    """Passes in order.

    Attributes:
        passes: what runs over every partitioned graph.
        observe: called with the graph and the name of the stage that it has reached:
            ``"partition"``, and ``"after_"`` and the name of each pass (with a number where that
            name has come before).
    """

    passes: Sequence[GraphPass] = field(default_factory=lambda: default_passes(Planner()))
    observe: Callable[[fx.Graph, str], None] = _look_away

    def run(self, graph: fx.Graph) -> None:
        """Run all passes.

        Args:
            graph: partitioned: a forward or a backward; changed in place.

        Raises:
            SpecError: the graph, or what the first pass that is wrong made of it, breaks the spec.
            BudgetError: see ``Planner``.
            PlanError: see ``Planner``.
        """
        verify_graph(graph, "partition")
        before = inventory(graph)
        self.observe(graph, "partition")
        for pass_, stage in zip(self.passes, self._stage_names(), strict=True):
            pass_(graph)
            self.observe(graph, stage)
            verify_graph(graph, pass_name(pass_), before)

    def stages(self) -> dict[str, str]:
        """The stages behind the passes, in order.

        Returns:
            By the name that ``observe`` is given: the first line of the pass's docstring.
        """
        return dict(zip(self._stage_names(), map(pass_summary, self.passes), strict=True))

    def _stage_names(self) -> list[str]:
        seen: Counter[str] = Counter()
        found = []
        for pass_ in self.passes:
            name = pass_name(pass_)
            seen[name] += 1
            found.append(f"after_{name}" + (f"_{seen[name]}" if seen[name] > 1 else ""))
        return found

    def cache_key(self) -> str:
        """Changes when a pass is added, removed, reordered or edited."""
        digest = hashlib.sha256(source_digest(Path(__file__).parent).encode())
        for pass_ in self.passes:
            digest.update(pass_name(pass_).encode())
            digest.update(_source_of(pass_).encode())
            key = getattr(pass_, "cache_key", None)  # of a pass with options
            digest.update(key().encode() if key is not None else b"")
        return digest.hexdigest()


def _source_of(pass_: GraphPass) -> str:
    """What changes when a pass is edited; of one without a file (a notebook's) always another."""
    try:
        return inspect.getsource(inspect.getmodule(pass_) or type(pass_))
    except (OSError, TypeError):
        return uuid4().hex


def pass_name(pass_: GraphPass) -> str:
    """How a pass is called in messages."""
    return str(_named(pass_).__name__)


def pass_summary(pass_: GraphPass) -> str:
    """The first line of a pass's docstring, of an object that of its class; ``""`` without one."""
    named = _named(pass_)
    text = inspect.cleandoc(named.__doc__ or "")
    is_made = text.startswith(f"{named.__name__}(")  # a dataclass gets its signature
    return "" if is_made else text.partition("\n")[0]


def _named(pass_: GraphPass) -> Any:
    """What has the name and the docstring: a partial's function, an object's class."""
    function = getattr(pass_, "func", pass_)
    return function if hasattr(function, "__name__") else type(function)


__all__ = ["VIEW_PASSES", "GraphPass", "Pipeline", "default_passes", "pass_name", "pass_summary"]
