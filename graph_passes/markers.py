"""Marks: which unit a node belongs to, and what its collective is.

A mark is set where a node is made, as ``torch.fx.traceback.annotate`` does, and is in
``node.meta["custom"]`` of every later graph. Passes read marks and never guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, unquote

import torch.fx

from graph_passes.wire_format import WireFormat

COLLECTIVE = "fsdp_collective"
"""Key in ``node.meta["custom"]``: an encoded ``Mark``, on a collective and its wait."""
UNIT = "fsdp_unit"
"""FQN of the unit that a node belongs to."""
BODY = "fsdp_body"
"""``"1"`` on the nodes that a unit's module computes, its parameter views included."""
VIEWS = "fsdp_views"
"""On the nodes that divide an unsharded buffer into parameter views."""

NO_VALUE = -0.0
"""Stands for a gradient that a rank does not have.

Adding it changes nothing, and a sum is -0.0 only if all of its terms are (+0.0 is not). So the mean
over ranks of a gradient is all ``NO_VALUE`` iff no rank has that gradient.
"""


def is_no_value(tensor: torch.Tensor) -> torch.Tensor:
    """Return which elements are ``NO_VALUE``, which compares equal to 0.0."""
    return (tensor == 0) & tensor.signbit()


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""Kind of a collective."""


def encode_name(fqn: str) -> str:
    """Return an FQN as it stands in a mark, a label, a fingerprint or a listing.

    Module names may hold any character (keys of a ``ModuleDict``). All but letters, digits, ``_``,
    ``.``, ``-`` and ``~`` are percent-encoded, so the others can be separators.
    """
    return quote(fqn, safe="", errors="surrogatepass")


def decode_name(text: str) -> str:
    """Read what ``encode_name`` returned."""
    return unquote(text, errors="surrogatepass")


@dataclass(frozen=True)
class Mark:
    """Identity of one collective.

    Attributes:
        unit: FQN of the unit, ``""`` for the root.
        kind: what the collective does.
        direction: pass in which it was traced. An all-gather that is recomputed for the backward
            keeps its mark; ``graph_utils.is_backward`` tells the graphs apart.
        ordinal: index of the flat parameter in the unit.
        reshards: for an all-gather, whether the unit is resharded after its forward.
        wire: format in which shards travel (``WireFormat.encode``), ``""`` for none; ``wire_of``
            says whether an optional one is used.
    """

    unit: str
    kind: CollectiveKind
    direction: Literal["forward", "backward"]
    ordinal: int
    reshards: bool = False
    wire: str = ""

    @property
    def has_optional_format(self) -> bool:
        """Whether the planner decides if the collective travels in its format."""
        wire = WireFormat.decode(self.wire)
        return wire is not None and wire.is_optional

    def encode(self) -> str:
        """Return the mark as a string, which survives tracing and code generation."""
        name = encode_name(self.unit)
        fields = (self.kind, self.direction, self.ordinal, int(self.reshards), self.wire, name)
        return "|".join(map(str, fields))

    @staticmethod
    def decode(text: str) -> Mark:
        """Read what ``encode`` returned.

        Raises:
            ValueError: the text is no mark.
        """
        kind, direction, ordinal, reshards, wire, unit = text.split("|")
        if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            raise ValueError(f"mark: expected a collective's kind, got '{kind}' in '{text}'")
        if direction not in ("forward", "backward"):
            raise ValueError(f"mark: expected a direction, got '{direction}' in '{text}'")
        name = decode_name(unit)
        return Mark(name, kind, direction, int(ordinal), reshards == "1", wire)  # type: ignore[arg-type]


def mark_of(node: torch.fx.Node) -> Mark | None:
    """Return the mark of a collective or its wait, if it has one."""
    custom = node.meta.get("custom") or {}
    text = custom.get(COLLECTIVE)
    return None if text is None else Mark.decode(text)


def unit_of(node: torch.fx.Node) -> str | None:
    """Return the FQN of the unit that a node belongs to, in forward or backward, if any."""
    custom = node.meta.get("custom") or {}
    unit = custom.get(UNIT)
    return None if unit is None else str(unit)


def is_body(node: torch.fx.Node) -> bool:
    """Whether a node is part of a unit's body: what its module computes, and its views."""
    return (node.meta.get("custom") or {}).get(BODY) == "1"


def cuts_views(node: torch.fx.Node) -> bool:
    """Whether a node divides an unsharded buffer into parameter views."""
    return VIEWS in (node.meta.get("custom") or {})


_LAUNCH = "fsdp_launch"


def set_launch(node: torch.fx.Node, launch: int | None) -> None:
    """Record that a collective is launched with all others of this number; ``None``: alone."""
    node.meta[_LAUNCH] = launch


def launch_of(node: torch.fx.Node) -> int | None:
    """Return the number of the launch that a collective shares, if any."""
    launch: int | None = node.meta.get(_LAUNCH)
    return launch


_GRAPH = "fsdp_graph"


def set_graph(node: torch.fx.Node, digest: str) -> None:
    """Record the digest of the planned graph that a collective is in."""
    node.meta[_GRAPH] = digest


def graph_of(node: torch.fx.Node) -> str:
    """Return the digest of the planned graph that a collective is in; ``""``: not planned."""
    digest: str = node.meta.get(_GRAPH, "")
    return digest


_CHOSEN = "fsdp_format_chosen"


def choose_format(node: torch.fx.Node, chosen: bool) -> None:
    """Record whether a collective with an optional format travels in it."""
    node.meta[_CHOSEN] = chosen


def wire_of(node: torch.fx.Node) -> WireFormat | None:
    """Return the format in which a collective travels, if any."""
    mark = mark_of(node)
    wire = None if mark is None else WireFormat.decode(mark.wire)
    if wire is None or not wire.is_optional:
        return wire
    return wire.chosen() if node.meta.get(_CHOSEN) else None


def has_optional_format(node: torch.fx.Node) -> bool:
    """Whether the planner decides if a collective travels in its format."""
    mark = mark_of(node)
    return mark is not None and mark.has_optional_format


__all__ = [
    "BODY",
    "COLLECTIVE",
    "UNIT",
    "VIEWS",
    "CollectiveKind",
    "Mark",
    "choose_format",
    "cuts_views",
    "decode_name",
    "encode_name",
    "graph_of",
    "has_optional_format",
    "is_body",
    "is_no_value",
    "launch_of",
    "mark_of",
    "set_graph",
    "set_launch",
    "unit_of",
    "wire_of",
]
