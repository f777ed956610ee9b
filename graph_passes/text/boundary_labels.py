"""Labels of collectives and waits in a *final* graph, as strings that survive code generation.

A label tells what its collective is, and which units compute next to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import fx

from graph_passes.graph_utils import (
    is_backward,
    is_collective,
    is_compute,
    is_wait,
    op_name,
)
from graph_passes.markers import (
    CollectiveKind,
    decode_name,
    encode_name,
    graph_of,
    mark_of,
    unit_of,
    wire_of,
)
from graph_passes.wire_format import text_of

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Label:
    """One boundary of compute in a final graph.

    Attributes:
        unit: FQN of the collective's unit.
        kind: what the collective does.
        phase: the graph it is in.
        before: units that compute before it, where it is the first boundary of its graph.
        after: units that compute between it and the next boundary, in order.
        ordinal: which flat parameter of the unit.
        absent: ranges of elements of a gradient that is reduced of which this rank has none.
        wire: the format in which shards travel, ``WireFormat.encode()``; ``""``: as they are.
        graph: ``GraphPlan.short_digest`` of the graph it is in; ``""`` without a plan.
    """

    unit: str
    kind: CollectiveKind
    phase: Phase
    before: tuple[str, ...]
    after: tuple[str, ...]
    ordinal: int = 0
    absent: tuple[tuple[int, int], ...] = ()
    wire: str = ""
    graph: str = ""

    def encode(self) -> str:
        """The label as a string."""
        lists = [
            "".join(f"{encode_name(name)}," for name in names)
            for names in (self.before, self.after)
        ]
        absent = "".join(f"{begin}-{end}," for begin, end in self.absent)
        fields = [self.kind, self.phase, encode_name(self.unit), *lists]
        return "|".join([*fields, str(self.ordinal), absent, self.wire, self.graph])

    @staticmethod
    def decode(text: str) -> Label:
        """Back from ``encode``."""
        kind, phase, unit, before, after, ordinal, absent, wire, graph = text.split("|")
        names = [tuple(map(decode_name, part.split(",")[:-1])) for part in (before, after)]
        spans = [span.split("-") for span in absent.split(",")[:-1]]
        return Label(
            decode_name(unit),
            kind,  # type: ignore[arg-type]
            phase,  # type: ignore[arg-type]
            names[0],
            names[1],
            int(ordinal),
            tuple((int(begin), int(end)) for begin, end in spans),
            wire,
            graph,
        )


def label_boundaries(graph: fx.Graph) -> dict[fx.Node, Label]:
    """Labels of all collectives and waits of a scheduled graph."""
    phase: Phase = "backward" if is_backward(graph) else "forward"
    boundaries: list[tuple[fx.Node, list[fx.Node]]] = []
    before: list[fx.Node] = []
    current = before
    reduced: set[fx.Node] = set()
    for node in graph.nodes:
        if is_collective(node) or is_wait(node):
            current = []
            boundaries.append((node, current))
            mark = mark_of(node)
            if mark is not None and mark.kind != "all_gather":
                reduced.add(node)
        elif node.all_input_nodes and all(n in reduced for n in node.all_input_nodes):
            reduced.add(node)  # a cast or a division of a reduced gradient: no unit's compute
        elif is_compute(node) and not _feeds_a_gather(node):
            current.append(node)
    labels: dict[fx.Node, Label] = {}
    for position, (node, after) in enumerate(boundaries):
        mark = mark_of(node) or mark_of(node.all_input_nodes[0])
        if mark is None:
            continue
        first = _units(before) if position == 0 else ()
        collective = node if is_collective(node) else node.all_input_nodes[0]
        labels[node] = Label(
            mark.unit,
            mark.kind,
            phase,
            first,
            _units(after),
            ordinal=mark.ordinal,
            wire=text_of(wire_of(collective)),
            graph=graph_of(collective),
        )
    return labels


def _feeds_a_gather(node: fx.Node) -> bool:
    """The cast of a shard: it belongs to its all-gather, not to the unit's compute."""
    return (
        bool(node.users)
        and all(is_collective(user) for user in node.users)
        and all(source.op == "placeholder" for source in node.all_input_nodes)
    )


_HEAVY = ("mm", "linear", "conv", "attention", "embedding", "einsum")


def _units(nodes: list[fx.Node]) -> tuple[str, ...]:
    """Units in the order in which they compute; where there is heavy compute, of that alone."""
    heavy = [node for node in nodes if _is_heavy(node)]
    units: list[str] = []
    for node in heavy or nodes:
        unit = unit_of(node)
        if unit is not None and (not units or units[-1] != unit):
            units.append(unit)
    return tuple(units)


def _is_heavy(node: fx.Node) -> bool:
    return any(part in op_name(node) for part in _HEAVY)
