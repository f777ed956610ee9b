"""What a cluster is made of, and how sizes and rates are written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from fsdp_dynamo.errors import FSDPValueError

_SIZES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9.]+)\s*([kmgt]i?)?(b)", re.IGNORECASE)


def bytes_of(text: str, where: str = "planner") -> int:
    """``"80GB"``, ``"24GiB"``: bytes.

    Args:
        text: the size.
        where: it was given, for messages.

    Raises:
        FSDPValueError: not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or not _is_number(found[1]) or found[3] != "B":
        raise _unreadable("a size such as 80GB or 24GiB", text, where)
    return round(float(found[1]) * _factor(found[2]))


def bytes_per_second_of(text: str, where: str = "planner") -> float:
    """``"400Gb/s"`` is bits, ``"50GB/s"`` bytes: bytes a second.

    Args:
        text: the rate.
        where: it was given, for messages.

    Raises:
        FSDPValueError: not a rate.
    """
    amount, slash, second = text.strip().rpartition("/")
    found = _SIZE.fullmatch(amount)
    if found is None or not slash or second.lower() != "s" or not _is_number(found[1]):
        raise _unreadable("a rate such as 400Gb/s (bits) or 50GB/s (bytes)", text, where)
    return float(found[1]) * _factor(found[2]) / (8 if found[3] == "b" else 1)


def _factor(prefix: str | None) -> float:
    prefix = (prefix or "").lower()
    return float(_SIZES.get(prefix) or _BINARY[prefix])


def _is_number(text: str) -> bool:
    return text.count(".") <= 1 and text != "." and float(text) > 0


def _unreadable(expected: str, got: str, where: str) -> FSDPValueError:
    return FSDPValueError(expected=expected, got=repr(got), where=where, fix="")


@dataclass(frozen=True)
class Accelerator:
    """One rank's device; rates are those of data sheets.

    Attributes:
        name: of the device.
        flops_per_s: floating-point operations a second, dense, of 16-bit matrix products.
        bytes_per_s: read and written from its memory.
        memory_bytes: how much it has.
        node_bytes_per_s: to the other devices of its node, in one direction.
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
"""By name. Source: NVIDIA's data sheets of the SXM models."""


@dataclass(frozen=True)
class Cluster:
    """Ranks, spread evenly over nodes.

    Attributes:
        world_size: ranks.
        per_node: ranks of a node.
        flops_per_ms: floating-point operations of a rank, as reached.
        memory_bytes_per_ms: read and written from a rank's memory, as reached.
        link_bytes_per_ms: a rank's share of the link between nodes, in each direction.
        node_bytes_per_ms: the same inside a node.
        latency_ms: of one collective between nodes, for each doubling of the ranks.
        memory_bytes: of a rank.
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
        """Milliseconds of an all-gather, or a reduce-scatter, among neighbouring ranks.

        Each rank receives what other nodes hold over the link, and passes it on inside its node
        meanwhile: the slower one counts.

        Args:
            num_bytes: of the unsharded tensor.
            ranks: how many have a shard of it.
        """
        if ranks == 1:
            return 0.0
        inside = min(ranks, self.per_node)
        nodes = math.ceil(ranks / inside)
        shard = num_bytes / ranks
        over_link = (nodes - 1) * shard / self.link_bytes_per_ms
        over_node = (ranks - nodes) * shard / self.node_bytes_per_ms
        return self.latency_ms * math.ceil(math.log2(ranks)) + max(over_link, over_node)

    def reduce_replicas_ms(self, num_bytes: float, replicas: int) -> float:
        """Milliseconds of an all-reduce among ranks of different nodes.

        Args:
            num_bytes: of the tensor, on each rank.
            replicas: how many ranks.
        """
        if replicas == 1:
            return 0.0
        sent = 2 * (replicas - 1) / replicas * num_bytes
        return 2 * self.latency_ms * math.ceil(math.log2(replicas)) + sent / self.link_bytes_per_ms
