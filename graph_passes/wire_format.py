"""Formats in which a collective's elements travel, where they are not those of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

WireFormatName = Literal["bfloat16", "float8", "int8", "int4"]
"""``float8`` is e4m3. All but ``bfloat16`` have an fp32 scale for each block of elements."""

_BITS: dict[str, int] = {"bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
WIRE_FORMATS = tuple(_BITS)
"""All names."""
SCALE_BYTES = 4
HEADER_SCALES = 4
"""Header before the scales, in their size; its first number says how zeros are to be read."""
_ALIGN_BYTES = 16
"""Scales, codes and messages begin at multiples of it: a kernel's loads on a device are so wide."""


@dataclass(frozen=True)
class WireFormat:
    """Format in which one rank's part of a collective travels.

    Attributes:
        name: of its elements.
        block_numel: elements that share a scale.
        is_stochastic: whether they are rounded up or down at random, so that the mean is right.
        is_optional: whether the planner decides for each collective if it is used.
    """

    name: WireFormatName
    block_numel: int = 64
    is_stochastic: bool = False
    is_optional: bool = False

    def chosen(self) -> WireFormat:
        """This format, no longer optional."""
        return replace(self, is_optional=False)

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

    def codes_begin(self, numel: int) -> int:
        """Byte of a message of ``numel`` elements where their codes begin, behind the scales."""
        if not self.has_scales:
            return 0
        return _aligned((HEADER_SCALES - (-numel // self.block_numel)) * SCALE_BYTES)

    def num_codes(self, numel: int) -> int:
        """Codes of ``numel`` elements of a block, or of whole blocks, in memory."""
        return -(-numel // 2) if self.is_packed else numel

    def num_bytes(self, numel: int) -> int:
        """Bytes of one message with ``numel`` elements."""
        return _aligned(self.codes_begin(numel) - (-numel * _BITS[self.name] // 8))

    def encode(self) -> str:
        """The format as a string; ``decode`` reads it."""
        marks = ("~" if self.is_stochastic else "") + ("?" if self.is_optional else "")
        return f"{self.name}/{self.block_numel}{marks}"

    @staticmethod
    def decode(text: str) -> WireFormat | None:
        """Back from ``encode``; ``None`` for ``""``: elements travel as they are."""
        if not text:
            return None
        name, _, block = text.partition("/")
        return WireFormat(
            name,  # type: ignore[arg-type]
            int(block.rstrip("~?")),
            "~" in block,
            "?" in block,
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def text_of(wire: WireFormat | None) -> str:
    """A format, or none, as a string; ``WireFormat.decode`` reads it."""
    return "" if wire is None else wire.encode()


class Coding(NamedTuple):
    """Bytes that a rank reads and writes to encode what it sends, and to decode what arrives."""

    encode_bytes: float
    decode_bytes: float


def coding_of_gather(tensor_bytes: float, message_bytes: float, num_ranks: int) -> Coding:
    """A shard becomes a message; all messages become the unsharded tensor.

    Args:
        tensor_bytes: of the unsharded tensor.
        message_bytes: of one rank's message.
        num_ranks: ranks that hold a shard.
    """
    shard = tensor_bytes / num_ranks
    return Coding(shard + message_bytes, num_ranks * message_bytes + tensor_bytes)


def coding_of_reduction(tensor_bytes: float, message_bytes: float, num_ranks: int) -> Coding:
    """All parts but one's own become messages; those of the others are added to one's own part.

    For the arguments see ``coding_of_gather``.
    """
    others, shard = num_ranks - 1, tensor_bytes / num_ranks
    messages = others * message_bytes
    return Coding(others * shard + messages, messages + 2 * shard)


def coding_of_all_reduce(tensor_bytes: float, message_bytes: float) -> Coding:
    """Coding of an all-reduce: parts become messages, their sums one, and those of all the tensor.

    With any number of ranks, as graphs do not know it: no more than this.

    Args:
        tensor_bytes: of the tensor.
        message_bytes: of a message that has all of it.
    """
    once = tensor_bytes + message_bytes
    return Coding(once, 3 * once)


__all__ = [
    "HEADER_SCALES",
    "SCALE_BYTES",
    "WIRE_FORMATS",
    "Coding",
    "WireFormat",
    "WireFormatName",
    "coding_of_all_reduce",
    "coding_of_gather",
    "coding_of_reduction",
    "text_of",
]
