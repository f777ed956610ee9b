"""Formats in which a collective's elements travel, where they are not those of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WireFormatName = Literal["bfloat16", "float8", "int8", "int4"]
"""``float8`` is e4m3. All but ``bfloat16`` have an fp32 scale for each block of elements."""

_BITS: dict[str, int] = {"bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
WIRE_FORMATS = tuple(_BITS)
"""All names."""
SCALE_BYTES = 4
_ALIGN_BYTES = 8
"""Messages of one collective lie side by side; their scales are read in place."""


@dataclass(frozen=True)
class WireFormat:
    """How one rank's part of a collective travels.

    Attributes:
        name: of its elements.
        block_numel: elements that share a scale.
        is_stochastic: whether they are rounded up or down at random, so that the mean is right.
    """

    name: WireFormatName
    block_numel: int = 64
    is_stochastic: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether there is a scale for each block."""
        return self.name != "bfloat16"

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, of which one says that there is no value."""
        return self.name in ("int8", "int4")

    @property
    def is_packed(self) -> bool:
        """Whether two elements of a block, half of it apart, share a byte."""
        return self.name == "int4"

    def num_scales(self, numel: int) -> int:
        """Scales of ``numel`` elements, and one more that says how zeros are to be read."""
        return 1 - (-numel // self.block_numel) if self.has_scales else 0

    def num_codes(self, numel: int) -> int:
        """Codes of ``numel`` elements of a block, or of whole blocks, in memory."""
        return -(-numel // 2) if self.is_packed else numel

    def num_bytes(self, numel: int) -> int:
        """Bytes of one message with ``numel`` elements."""
        exact = self.num_scales(numel) * SCALE_BYTES - (-numel * _BITS[self.name] // 8)
        return -(-exact // _ALIGN_BYTES) * _ALIGN_BYTES

    def encode(self) -> str:
        """The format as a string; ``decode`` reads it."""
        return f"{self.name}/{self.block_numel}{'~' if self.is_stochastic else ''}"

    @staticmethod
    def decode(text: str) -> WireFormat | None:
        """Back from ``encode``; ``None`` for ``""``: elements travel as they are."""
        if not text:
            return None
        name, _, block = text.partition("/")
        return WireFormat(name, int(block.rstrip("~")), block.endswith("~"))  # type: ignore[arg-type]


def text_of(wire: WireFormat | None) -> str:
    """A format, or none, as a string; ``WireFormat.decode`` reads it."""
    return "" if wire is None else wire.encode()


__all__ = ["SCALE_BYTES", "WIRE_FORMATS", "WireFormat", "WireFormatName", "text_of"]
