"""Accelerators and clusters, and the notation of sizes and rates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

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

    def gather_ms(self, num_bytes: float, ranks: int) -> float:
        """Milliseconds of an all-gather or a reduce-scatter among neighbouring ranks.

        Each rank receives the other nodes' shards over the link and meanwhile passes them on
        inside its node: the slower of the two counts.

        Args:
            num_bytes: size of the unsharded tensor.
            ranks: number of ranks that hold a shard.
        """
        if ranks == 1:
            return 0.0
        inside = min(ranks, self.per_node)
        nodes = math.ceil(ranks / inside)
        shard = num_bytes / ranks
        over_link = (nodes - 1) * shard / self.link_bytes_per_ms
        over_node = (ranks - nodes) * shard / self.node_bytes_per_ms
        return self.latency_ms * math.ceil(math.log2(ranks)) + max(over_link, over_node)

    def between_nodes_ms(self, num_bytes: float, nodes: int) -> float:
        """Milliseconds of an all-gather or a reduce-scatter among ranks of different nodes.

        Args:
            num_bytes: size of the gathered tensor.
            nodes: number of ranks, each in a node of its own.
        """
        if nodes == 1:
            return 0.0
        over_link = (nodes - 1) / nodes * num_bytes / self.link_bytes_per_ms
        return self.latency_ms * math.ceil(math.log2(nodes)) + over_link

    def reduce_replicas_ms(self, num_bytes: float, replicas: int) -> float:
        """Milliseconds of an all-reduce among ranks of different nodes.

        Args:
            num_bytes: size of the tensor on each rank.
            replicas: number of ranks.
        """
        if replicas == 1:
            return 0.0
        sent = 2 * (replicas - 1) / replicas * num_bytes
        return 2 * self.latency_ms * math.ceil(math.log2(replicas)) + sent / self.link_bytes_per_ms
