"""Wire formats: how elements of a collective travel, if not as in its tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

WireFormatName = Literal["bfloat16", "float8", "int8", "int4"]
"""``float8`` is e4m3. All but ``bfloat16`` have an fp32 scale for each block of elements."""

_BITS: dict[str, int] = {"bfloat16": 16, "float8": 8, "int8": 8, "int4": 4}
WIRE_FORMATS = tuple(_BITS)
SCALE_BYTES = 4
HEADER_SCALES = 4
"""Length of the header before the scales, in scales. Its first number says how to read zeros."""
_ALIGN_BYTES = 16
"""Alignment of scales, codes and messages: the width of a kernel's loads on a device."""


@dataclass(frozen=True)
class WireFormat:
    """Format in which one rank's part of a collective travels.

    Attributes:
        name: format of the elements.
        block_numel: elements that share a scale.
        is_stochastic: whether elements are rounded up or down at random, which keeps the mean
            unbiased.
        is_optional: whether the planner decides for each collective if it is used.
    """

    name: WireFormatName
    block_numel: int = 64
    is_stochastic: bool = False
    is_optional: bool = False

    def chosen(self) -> WireFormat:
        """Return this format, no longer optional."""
        return replace(self, is_optional=False)

    @property
    def has_scales(self) -> bool:
        """Whether there is a scale for each block."""
        return self.name != "bfloat16"

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, of which one means that there is no value."""
        return self.name in ("int8", "int4")

    @property
    def is_packed(self) -> bool:
        """Whether two elements of a block, half a block apart, share a byte."""
        return self.name == "int4"

    def codes_begin(self, numel: int) -> int:
        """Return the byte at which the codes of ``numel`` elements begin, behind the scales."""
        if not self.has_scales:
            return 0
        return _aligned((HEADER_SCALES - (-numel // self.block_numel)) * SCALE_BYTES)

    def num_codes(self, numel: int) -> int:
        """Return the codes in memory for ``numel`` elements of a block, or of whole blocks."""
        return -(-numel // 2) if self.is_packed else numel

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of a message of ``numel`` elements."""
        return _aligned(self.codes_begin(numel) - (-numel * _BITS[self.name] // 8))

    def encode(self) -> str:
        """Return the format as a string, which ``decode`` reads."""
        marks = ("~" if self.is_stochastic else "") + ("?" if self.is_optional else "")
        return f"{self.name}/{self.block_numel}{marks}"

    @staticmethod
    def decode(text: str) -> WireFormat | None:
        """Read what ``encode`` returned; ``None`` for ``""``, which means no format."""
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
    """Return a format as a string, ``""`` for none; ``WireFormat.decode`` reads it."""
    return "" if wire is None else wire.encode()


class Coding(NamedTuple):
    """Bytes that a rank reads and writes to encode what it sends and to decode what arrives."""

    encode_bytes: float
    decode_bytes: float


def coding_of_gather(tensor_bytes: float, message_bytes: float, num_ranks: int) -> Coding:
    """Return the coding of an all-gather: a shard becomes a message, messages the unsharded tensor.

    Args:
        tensor_bytes: bytes of the unsharded tensor.
        message_bytes: bytes of one rank's message.
        num_ranks: ranks that hold a shard.
    """
    shard = tensor_bytes / num_ranks
    return Coding(shard + message_bytes, num_ranks * message_bytes + tensor_bytes)


def coding_of_reduction(tensor_bytes: float, message_bytes: float, num_ranks: int) -> Coding:
    """Return the coding of a reduce-scatter, with the arguments of ``coding_of_gather``.

    All parts but the rank's own become messages; those that arrive are added to the own part.
    """
    others, shard = num_ranks - 1, tensor_bytes / num_ranks
    messages = others * message_bytes
    return Coding(others * shard + messages, messages + 2 * shard)


def coding_of_all_reduce(tensor_bytes: float, message_bytes: float) -> Coding:
    """Return an upper bound of an all-reduce's coding (a graph does not know its ranks).

    Parts become messages, their sums become a message, and the messages of all sums the tensor.
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
