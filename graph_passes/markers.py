"""Marks: what a graph knows about its collectives and to which unit its compute belongs.

A mark is put on at birth, as ``torch.fx.traceback.annotate`` does, and reaches
``node.meta["custom"]`` in every later graph. Passes read marks; they never guess.
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
"""``"1"`` on what a unit's module computes with its parameter views, those included."""
VIEWS = "fsdp_views"
"""On the cutting of an unsharded flat parameter into its parameter views."""

NO_VALUE = -0.0
"""Stands for a gradient that a rank does not have.

Adding it changes nothing, and a sum is -0.0 only where all of its terms are (+0.0 is another term).
So the mean over ranks of a parameter's gradient is all ``NO_VALUE`` where no rank has one.
"""


def is_no_value(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are ``NO_VALUE``, which is equal to 0.0."""
    return (tensor == 0) & tensor.signbit()


CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
"""Kind of a collective."""


def encode_name(fqn: str) -> str:
    """An FQN as it stands in a mark, a label, a fingerprint or a listing.

    A module's name may hold any character (a key of a ``ModuleDict`` does): all but letters,
    digits, ``_``, ``.``, ``-`` and ``~`` are percent-encoded, so that the rest can separate.
    """
    return quote(fqn, safe="", errors="surrogatepass")


def decode_name(text: str) -> str:
    """Back from ``encode_name``."""
    return unquote(text, errors="surrogatepass")


@dataclass(frozen=True)
class Mark:
    """Identity of one collective.

    Attributes:
        unit: FQN of the unit, ``""`` for the root.
        kind: what it does.
        direction: the pass in which it was traced. (An all-gather that is recomputed for the
            backward keeps its mark; the graph it is in says the rest.)
        ordinal: which flat parameter of the unit, from 0.
        reshards: for an all-gather, whether the unit is resharded after its forward.
        wire: the format in which shards travel, ``WireFormat.encode()``; ``""``: as they are. (Of
            an optional one, ``wire_of`` says whether it is used.)
    """

    unit: str
    kind: CollectiveKind
    direction: Literal["forward", "backward"]
    ordinal: int
    reshards: bool = False
    wire: str = ""

    @property
    def has_optional_format(self) -> bool:
        """Whether the planner decides if it travels in its format."""
        wire = WireFormat.decode(self.wire)
        return wire is not None and wire.is_optional

    def encode(self) -> str:
        """The mark as a string, which survives tracing and code generation."""
        name = encode_name(self.unit)
        fields = (self.kind, self.direction, self.ordinal, int(self.reshards), self.wire, name)
        return "|".join(map(str, fields))

    @staticmethod
    def decode(text: str) -> Mark:
        """Back from ``encode``.

        Raises:
            ValueError: anything else.
        """
        kind, direction, ordinal, reshards, wire, unit = text.split("|")
        if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            raise ValueError(f"mark: expected a collective's kind, got '{kind}' in '{text}'")
        if direction not in ("forward", "backward"):
            raise ValueError(f"mark: expected a direction, got '{direction}' in '{text}'")
        name = decode_name(unit)
        return Mark(name, kind, direction, int(ordinal), reshards == "1", wire)  # type: ignore[arg-type]


def mark_of(node: torch.fx.Node) -> Mark | None:
    """The mark of a collective node (or of its wait); ``None``: it has none."""
    custom = node.meta.get("custom") or {}
    text = custom.get(COLLECTIVE)
    return None if text is None else Mark.decode(text)


def unit_of(node: torch.fx.Node) -> str | None:
    """FQN of the unit that a node belongs to, in forward or backward; ``None``: of none."""
    custom = node.meta.get("custom") or {}
    unit = custom.get(UNIT)
    return None if unit is None else str(unit)


def is_body(node: torch.fx.Node) -> bool:
    """Whether the node is part of a unit's body: what its module computes, and its views."""
    return (node.meta.get("custom") or {}).get(BODY) == "1"


def cuts_views(node: torch.fx.Node) -> bool:
    """Whether the node cuts an unsharded flat parameter into its parameter views."""
    return VIEWS in (node.meta.get("custom") or {})


_LAUNCH = "fsdp_launch"


def set_launch(node: torch.fx.Node, launch: int | None) -> None:
    """Say that a collective is launched together with all others of this number.

    Args:
        node: the collective.
        launch: the number; ``None``: it is launched alone.
    """
    node.meta[_LAUNCH] = launch


def launch_of(node: torch.fx.Node) -> int | None:
    """The launch that a collective shares with others; ``None``: it is launched alone."""
    launch: int | None = node.meta.get(_LAUNCH)
    return launch


_GRAPH = "fsdp_graph"


def set_graph(node: torch.fx.Node, digest: str) -> None:
    """Say of which planned graph a collective is."""
    node.meta[_GRAPH] = digest


def graph_of(node: torch.fx.Node) -> str:
    """The digest of the planned graph that a collective is of; ``""``: it was not planned."""
    digest: str = node.meta.get(_GRAPH, "")
    return digest


_CHOSEN = "fsdp_format_chosen"


def choose_format(node: torch.fx.Node, chosen: bool) -> None:
    """Say whether a collective with an optional format travels in it."""
    node.meta[_CHOSEN] = chosen


def wire_of(node: torch.fx.Node) -> WireFormat | None:
    """The format in which a collective travels; an optional one only where it was chosen."""
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
