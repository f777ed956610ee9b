"""Accelerators and clusters, and the notation of sizes and rates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fsdp_dynamo.errors import FSDPValueError

_PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?(b)", re.IGNORECASE)


def parse_bytes(text: str, where: str = "estimator") -> int:
    """Bytes of a size such as ``"80GB"`` or ``"24GiB"``.

    Args:
        text: the size.
        where: its option, for errors.

    Raises:
        FSDPValueError: not a size.
    """
    bits = _bits(text)
    if bits is None or not text.strip().endswith("B"):
        raise _unreadable("a size such as 80GB or 24GiB", text, where)
    return round(bits / 8)


def parse_rate(text: str, where: str = "estimator") -> float:
    """Bytes per second of a rate such as ``"400Gb/s"`` (bits) or ``"50GB/s"`` (bytes).

    Args:
        text: the rate.
        where: its option, for errors.

    Raises:
        FSDPValueError: not a rate.
    """
    amount, _, second = text.strip().rpartition("/")
    bits = _bits(amount)
    if bits is None or second.lower() != "s":
        raise _unreadable("a rate such as 400Gb/s (bits) or 50GB/s (bytes)", text, where)
    return bits / 8


def _bits(text: str) -> float | None:
    """The number of bits; ``None`` if it is not a number above 0 with its unit."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        return None
    number, prefix, unit = match.groups()
    return float(number) * _PREFIXES[(prefix or "").lower()] * (8 if unit == "B" else 1)


def _unreadable(expected: str, got: str, where: str) -> FSDPValueError:
    fix = "Write a number above 0 with its unit."
    return FSDPValueError(expected=expected, got=repr(got), where=where, fix=fix)


@dataclass(frozen=True)
class Accelerator:
    """Data-sheet rates of one rank's device.

    Attributes:
        name: name of the device.
        flops_per_s: floating-point operations per second of dense 16-bit matrix products.
        bytes_per_s: memory bandwidth, in bytes per second.
        memory_bytes: size of its memory.
        node_bytes_per_s: bandwidth to the other devices of its node, in one direction.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    node_bytes_per_s: float


ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("a100", 312e12, 2.04e12, 80 * 10**9, 300e9),
        Accelerator("h100", 989e12, 3.35e12, 80 * 10**9, 450e9),
        Accelerator("h200", 989e12, 4.8e12, 141 * 10**9, 450e9),
        Accelerator("b200", 2250e12, 8e12, 180 * 10**9, 900e9),
    )
}
"""Accelerators by name. Source: NVIDIA's data sheets of the SXM models."""


Pattern = Literal["ring", "all_to_all"]


class Traffic(NamedTuple):
    """Bytes that a rank sends inside its node, and to other nodes."""

    inside_bytes: float
    between_bytes: float


@dataclass(frozen=True)
class Cluster:
    """Ranks, spread evenly over nodes; rates per rank and millisecond.

    Attributes:
        world_size: number of ranks.
        per_node: number of ranks per node.
        flops_per_ms: achieved floating-point operations.
        memory_bytes_per_ms: achieved memory bandwidth.
        link_bytes_per_ms: share of the link between nodes, in each direction.
        node_bytes_per_ms: share of the link inside a node, in each direction.
        latency_ms: latency of a collective for each doubling of the ranks.
        memory_bytes: memory of a rank.
    """

    world_size: int
    per_node: int
    flops_per_ms: float
    memory_bytes_per_ms: float
    link_bytes_per_ms: float
    node_bytes_per_ms: float
    latency_ms: float
    memory_bytes: int

    @property
    def node_ranks(self) -> int:
        """Ranks on a node that are in use."""
        return min(self.per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Nodes that are in use."""
        return self.world_size // self.node_ranks

    def traffic(self, pattern: Pattern, num_bytes: float, ranks: int, nodes: int) -> Traffic:
        """Bytes that each rank sends for a collective.

        A ring receives the other nodes' shards over the link and passes them on inside its node.
        An all-to-all sends each message straight to its rank.

        Args:
            pattern: ``"ring"`` for an all-gather or a reduce-scatter, or ``"all_to_all"``.
            num_bytes: size of the unsharded tensor, or of all messages.
            ranks: number of ranks that hold a shard.
            nodes: number of nodes that these ranks are spread over.
        """
        shard = num_bytes / ranks
        outside = nodes - 1 if pattern == "ring" else ranks - ranks // nodes
        return Traffic((ranks - 1 - outside) * shard, outside * shard)

    def collective_ms(self, pattern: Pattern, num_bytes: float, ranks: int, nodes: int) -> float:
        """Milliseconds of a collective: the slower link counts.

        Args:
            pattern: as that of ``traffic``.
            num_bytes: as that of ``traffic``.
            ranks: number of ranks that hold a shard.
            nodes: number of nodes that these ranks are spread over.
        """
        if ranks == 1:
            return 0.0
        traffic = self.traffic(pattern, num_bytes, ranks, nodes)
        over_link = traffic.between_bytes / self.link_bytes_per_ms
        over_node = traffic.inside_bytes / self.node_bytes_per_ms
        return self.latency_ms * math.ceil(math.log2(ranks)) + max(over_link, over_node)
