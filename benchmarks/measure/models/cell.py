"""Cells of the campaign: an architecture in a setting and a mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from benchmarks.workloads.architectures.base import SETTINGS, Architecture

MODES = ("eager", "hooks", "graph")
PLAIN = {"hooks": ("plain", "plain_blocks"), "graph": ("plain_whole",)}
"""For each compiled mode, how the plain model is compiled to be compared with it: as it is, its
blocks one by one, or in one graph."""


class Outcome(str, Enum):
    """How a cell ended, from best to worst."""

    EQUAL = "equal"
    """Bitwise, gradients, losses and buffers."""
    CLOSE = "close"
    """Within the tolerance of the setting."""
    ZEROS = "zeros"
    """Equal or close, but some gradients are zeros where DDP has ``None``."""
    DIFFERS = "differs"
    ERROR = "error"
    TIMEOUT = "timeout"
    PLAIN = "plain"
    """Not equal or close, and neither is the plain model compiled with the same backend."""
    NO_REFERENCE = "no reference"
    """DDP cannot train the model in this setting either."""


GOOD = (Outcome.EQUAL, Outcome.CLOSE)


@dataclass(frozen=True)
class Cell:
    """One measurement; ``mode`` is one of ``MODES`` or of the values of ``PLAIN``."""

    architecture: str
    setting: str
    mode: str

    @property
    def key(self) -> str:
        """Its name in the record."""
        return f"{self.architecture}/{self.setting}/{self.mode}"

    @property
    def backend(self) -> str | None:
        """The backend of ``torch.compile``; ``None`` for eager mode."""
        inductor = self.setting == "inductor"
        if self.mode == "graph":
            return "fsdp_dynamo" if inductor else "fsdp_dynamo_aot_eager"
        if self.mode == "eager":
            return None
        return "inductor" if inductor else "aot_eager"

    @property
    def is_whole(self) -> bool:
        """Whether one graph is asked for."""
        return self.mode in ("graph", "plain_whole")

    def plain(self) -> list[Cell]:
        """The plain model, compiled alike; none in eager mode."""
        modes = PLAIN.get(self.mode, ())
        return [Cell(self.architecture, self.setting, mode) for mode in modes]


@dataclass(frozen=True)
class Result:
    """Outcome of a cell.

    Attributes:
        outcome: how it ended.
        reason: why it is not equal or close.
        largest: largest relative difference, ``None`` where there is none to measure.
        worst: the value that differs most.
        where: line of this project that raised.
        plain: for ``Outcome.PLAIN``, the reason of the plain model.
    """

    outcome: Outcome
    reason: str = ""
    largest: float | None = None
    worst: str = ""
    where: str = ""
    plain: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Fields that say something."""
        given = asdict(self)
        given["outcome"] = self.outcome.value
        return {name: value for name, value in given.items() if value not in ("", None)}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Result:
        """The reverse of ``as_dict``; unknown fields are left out."""
        known = {name: data[name] for name in Result.__dataclass_fields__ if name in data}
        return Result(**{**known, "outcome": Outcome(known["outcome"])})


def cells_of(
    architecture: Architecture,
    settings: Sequence[str] = tuple(SETTINGS),
    modes: Sequence[str] = MODES,
) -> list[Cell]:
    """The cells that apply; Inductor has no eager mode."""
    return [
        Cell(architecture.name, setting, mode)
        for setting in settings
        if setting in architecture.settings
        for mode in modes
        if not (setting == "inductor" and mode == "eager")
    ]
