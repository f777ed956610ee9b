"""Ordered passes over a partitioned graph; the specification is verified after each.

::

    node by node   inline_regions  absent_gradients  drop_noop_views  cut_views  grad_buffer  ...
    by a compiler  inline_regions  absent_gradients                              grad_buffer  ...

    ...  group_writes (node by node)  MORE  sink_views  planner

``MORE`` are the user's own: ``GraphPass`` objects, or callables ``pass_(graph) -> None``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from torch import fx

from graph_passes.gradients.grad_buffer import grad_buffer, grad_buffer_node_by_node, group_writes
from graph_passes.gradients.producers import absent_gradients
from graph_passes.graph_pass import GraphPass, PassFunction, as_pass
from graph_passes.graph_utils import source_digest
from graph_passes.regions.outlining import inline_regions
from graph_passes.scheduling.planner import Planner
from graph_passes.spec import inventory, verify_graph
from graph_passes.views import cut_views, drop_noop_views, sink_views

_VIEW_PASSES: tuple[GraphPass, ...] = (drop_noop_views, cut_views)

OPTIONAL_PASSES: tuple[GraphPass, ...] = (*_VIEW_PASSES, grad_buffer, group_writes, sink_views)
"""Passes that can be left out: without them the graph computes the same, only slower."""

REQUIRED_PASSES: dict[str, str] = {
    "planner": Planner.required,
    "absent_gradients": "without it parameters that no loss touches would get gradients of zeros, "
    "and optimizers would move them",
    "tag_reshard_after_forward": "the sharding strategy says which units reshard, and without it "
    "all would stay unsharded until their backward",
    "tidy_region_boundaries": "the unsharded parameters that a region takes would be saved for its "
    "backward, not gathered again",
    "inline_regions": "collectives are placed among the nodes of units, and a region hides them",
}
"""Passes that cannot be left out, with the reason."""


def default_passes(
    planner: GraphPass | PassFunction,
    node_by_node: bool = False,
    more: Sequence[GraphPass | PassFunction] = (),
    disabled: Collection[str] = (),
) -> tuple[GraphPass, ...]:
    """Return the passes that our backends run, in order; the planner is last.

    Args:
        planner: pass that places the collectives.
        node_by_node: whether the graph is run as it is, where every node costs host time; compilers
            remove views by themselves.
        more: a user's own passes, which run before the collectives are placed.
        disabled: names of passes to leave out.
    """
    first: tuple[GraphPass, ...] = (inline_regions, absent_gradients)
    rewrites = (*first, grad_buffer)
    if node_by_node:
        rewrites = (*first, *_VIEW_PASSES, grad_buffer_node_by_node, group_writes)
    passes = (*rewrites, *map(as_pass, more), sink_views)
    return (*(p for p in passes if p.name not in disabled), as_pass(planner))


def _ignore(graph: fx.Graph, stage: str) -> None:
    """Observe nothing."""


class Pipeline:
    """Passes in order.

    Args:
        passes: passes to run over every partitioned graph; by default
            ``default_passes(Planner())``.
        observe: called with the graph and the name of the stage that it has reached:
            ``"partition"``, and ``"after_"`` with the name of each pass (and a number for a
            repeated name).
    """

    def __init__(
        self,
        passes: Sequence[GraphPass | PassFunction] | None = None,
        observe: Callable[[fx.Graph, str], None] = _ignore,
    ) -> None:
        given = default_passes(Planner()) if passes is None else passes
        self.passes: tuple[GraphPass, ...] = tuple(map(as_pass, given))
        self.observe = observe

    def run(self, graph: fx.Graph) -> None:
        """Run all passes.

        Args:
            graph: partitioned forward or backward graph; changed in place.

        Raises:
            SpecError: the graph, or the result of a pass, breaks the specification.
            BudgetError: see ``Planner``.
            PlanError: see ``Planner``.
        """
        verify_graph(graph, "partition")
        before = inventory(graph)
        self.observe(graph, "partition")
        for pass_, stage in zip(self.passes, self._stage_names(), strict=True):
            pass_(graph)
            self.observe(graph, stage)
            verify_graph(graph, pass_.name, before)

    def text(self) -> str:
        """Return a line for each pass: its name, whether it keeps numbers bitwise, its summary."""
        width = max((len(pass_.name) for pass_ in self.passes), default=0)
        return "\n".join(
            f"{p.name:{width}}  {'bitwise' if p.is_bitwise else 'numeric'}  {p.summary}".rstrip()
            for p in self.passes
        )

    def _stage_names(self) -> list[str]:
        seen: Counter[str] = Counter()
        found = []
        for pass_ in self.passes:
            seen[pass_.name] += 1
            number = f"_{seen[pass_.name]}" if seen[pass_.name] > 1 else ""
            found.append(f"after_{pass_.name}{number}")
        return found

    def cache_key(self) -> str:
        """Return a hash that changes when a pass is added, removed, reordered or edited."""
        digest = hashlib.sha256(source_digest(Path(__file__).parent).encode())
        for pass_ in self.passes:
            digest.update(pass_.uuid().encode())
        return digest.hexdigest()


__all__ = [
    "OPTIONAL_PASSES",
    "REQUIRED_PASSES",
    "Pipeline",
    "default_passes",
]
