"""Marks: what a graph knows about its collectives and to which unit its compute belongs.

A mark is put on at birth with ``torch.fx.traceback.annotate`` and reaches
``node.meta["custom"]`` in every later graph. Passes read marks; they never guess.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch.fx
from torch.fx import traceback

COLLECTIVE = "fsdp_collective"
UNIT = "fsdp_unit"

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]


@dataclass(frozen=True)
class Mark:
    """Identity of one collective.

    Attributes:
        unit: FQN of the unit, ``""`` for the root.
        kind: what it does.
        direction: the pass in which it was traced. (An all-gather that is recomputed for the
            backward keeps its mark; the graph it is in says the rest.)
        ordinal: which flat parameter of the unit.
        reshards: for an all-gather, whether the unit is resharded after its forward.
    """

    unit: str
    kind: CollectiveKind
    direction: Literal["forward", "backward"]
    ordinal: int
    reshards: bool = False

    def encode(self) -> str:
        """As a string, which survives tracing and code generation."""
        return f"{self.kind}|{self.direction}|{self.ordinal}|{int(self.reshards)}|{self.unit}"

    @staticmethod
    def decode(text: str) -> Mark:
        """Back from ``encode``; raises ``ValueError`` for anything else."""
        kind, direction, ordinal, reshards, unit = text.split("|", 4)
        if kind not in ("all_gather", "reduce_scatter", "all_reduce"):
            raise ValueError(f"mark: expected a collective's kind, got '{kind}' in '{text}'")
        if direction not in ("forward", "backward"):
            raise ValueError(f"mark: expected a direction, got '{direction}' in '{text}'")
        return Mark(unit, kind, direction, int(ordinal), reshards == "1")  # type: ignore[arg-type]


def mark_of(node: torch.fx.Node) -> Mark | None:
    """The mark of a collective node (or of its wait), if it has one."""
    custom = node.meta.get("custom") or {}
    text = custom.get(COLLECTIVE)
    return None if text is None else Mark.decode(text)


def unit_of(node: torch.fx.Node) -> str | None:
    """FQN of the unit whose module's forward made the node (or whose backward follows it)."""
    custom = node.meta.get("custom") or {}
    unit = custom.get(UNIT)
    return None if unit is None else str(unit)


@contextmanager
def in_unit(fqn: str) -> Iterator[None]:
    """Everything traced inside belongs to the unit."""
    with traceback.annotate({UNIT: fqn}):
        yield


_LAUNCH = "fsdp_launch"


def set_launch(node: torch.fx.Node, launch: int | None) -> None:
    """Say that a collective is launched together with all others of this number."""
    node.meta[_LAUNCH] = launch


def launch_of(node: torch.fx.Node) -> int | None:
    """The launch that a collective shares with others, if it does."""
    launch: int | None = node.meta.get(_LAUNCH)
    return launch
