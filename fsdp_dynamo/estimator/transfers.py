"""Collectives of a step of a sharding strategy: bytes, and milliseconds on a cluster."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from fsdp_dynamo.api import CollectivePrecision, ShardingStrategy
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.estimator.inventory import Inventory
from graph_passes.markers import Mark
from graph_passes.scheduling.problem import Transfer
from graph_passes.wire_format import (
    Coding,
    WireFormat,
    coding_of_all_reduce,
    coding_of_gather,
    coding_of_reduction,
    text_of,
)


@dataclass(frozen=True)
class ElementSizes:
    """Bytes per element of the tensors of a step.

    Attributes:
        param_bytes: of unsharded parameters, in all-gathers and compute.
        reduce_bytes: of gradients in reductions.
        master_bytes: of shards and their gradients.
        optimizer_bytes: of the optimizer's state, such as 8 for AdamW in float32.
        precision: formats in which shards travel.
    """

    param_bytes: int = 2
    reduce_bytes: int = 2
    master_bytes: int = 4
    optimizer_bytes: int = 8
    precision: CollectivePrecision = CollectivePrecision()  # noqa: RUF009  # frozen

    def wire(
        self, kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    ) -> WireFormat | None:
        """The format of a collective, if it is not that of its tensors."""
        size = self.param_bytes if kind == "all_gather" else self.reduce_bytes
        return self.precision.wire_of(kind, torch.float32 if size == 4 else torch.bfloat16)

    def without_formats(self) -> ElementSizes:
        """Sizes with shards that travel as they are."""
        return replace(self, precision=CollectivePrecision())


@dataclass(frozen=True)
class Sharding:
    """Number of ranks that share a flat parameter, and of replicas.

    ``nodes``: of these ranks, where they gather on two levels; else 1.
    """

    ranks: int
    replicas: int
    reshards: bool
    gathers: bool
    nodes: int = 1

    @property
    def gathering(self) -> int:
        """Number of ranks that gather a flat parameter in forward and backward."""
        return self.ranks // self.nodes


def sharding_of(strategy: ShardingStrategy, cluster: Cluster) -> Sharding:
    """Sharding of a strategy on a cluster."""
    world, node = cluster.world_size, cluster.node_ranks
    if strategy.is_hierarchical:
        return Sharding(world, 1, True, True, cluster.num_nodes)
    if strategy is ShardingStrategy.NO_SHARD:
        return Sharding(1, world, False, False)
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2):
        reshards = strategy is ShardingStrategy.HYBRID_SHARD
        return Sharding(node, cluster.num_nodes, reshards, True)
    return Sharding(world, 1, strategy is ShardingStrategy.FULL_SHARD, True)


def accepted(sizes: ElementSizes, sharding: Sharding, cluster: Cluster) -> ElementSizes:
    """The sizes without formats that are refused on these ranks."""
    if sizes.precision.only_where_exposed and sharding.nodes > 1:
        return sizes.without_formats()
    is_flat = cluster.world_size in (sharding.gathering, sharding.replicas)
    if is_flat and cluster.num_nodes > 1 and cluster.node_ranks > 1:
        exact = replace(sizes.precision, reduce_scatter=None, all_reduce=None)
        return replace(sizes, precision=exact)
    return sizes


def gather_of(
    inventory: Inventory,
    cluster: Cluster,
    sharding: Sharding,
    sizes: ElementSizes,
    unit: str,
    direction: str,
    need: int,
) -> Transfer:
    """A unit's all-gather, among the ranks that gather it for forward and backward."""
    numel, ranks = inventory.units[unit].numel, sharding.gathering
    wire = sizes.wire("all_gather") if sharding.nodes == 1 else None  # formats are between nodes
    num_bytes = numel * sizes.param_bytes
    travels = _travels(wire, numel, ranks, sizes.param_bytes)
    mark = Mark(unit, "all_gather", direction, 0, sharding.reshards)  # type: ignore[arg-type]
    ms = cluster.collective_ms("ring", travels, ranks, _nodes_of(ranks, cluster))
    sent = travels * (ranks - 1) // ranks
    transfer = Transfer(
        mark, "g", ms, cluster.latency_ms, sent, 0, need, num_bytes, wire=text_of(wire)
    )
    if wire is None:
        return transfer
    encode_ms, decode_ms = _coding_ms(coding_of_gather(num_bytes, travels / ranks, ranks), cluster)
    if wire.is_optional:  # in a compiled graph, what computes does it
        return replace(transfer, encode_ms=encode_ms, decode_ms=decode_ms)
    return replace(transfer, ms=ms + encode_ms + decode_ms)  # on the stream of gathers


def reduction_of(
    inventory: Inventory,
    cluster: Cluster,
    sharding: Sharding,
    sizes: ElementSizes,
    unit: str,
    ready: int,
    end: int,
) -> Transfer:
    """A reduce-scatter among ranks of a shard, then another between nodes, or an all-reduce."""
    numel, ranks, nodes = inventory.units[unit].trained, sharding.gathering, sharding.nodes
    num_bytes = numel * sizes.reduce_bytes
    wire = sizes.wire("reduce_scatter") if sharding.ranks > 1 else None
    of_replicas = sizes.wire("all_reduce") if sharding.replicas > 1 else None
    message_of_replicas = _message_of_replicas(numel, sharding, sizes)
    inner = wire if nodes == 1 else None
    travels = _travels(inner, numel, ranks, sizes.reduce_bytes)
    ms = cluster.collective_ms(_pattern_of(inner), travels, ranks, _nodes_of(ranks, cluster))
    on_nodes = min(sharding.replicas, cluster.num_nodes)
    for pattern in (_pattern_of(of_replicas), "ring"):  # an all-reduce
        ms += cluster.collective_ms(pattern, message_of_replicas, sharding.replicas, on_nodes)
    between = _travels(wire, -(-numel // ranks), nodes, sizes.reduce_bytes)
    ms += cluster.collective_ms(_pattern_of(wire), between, nodes, nodes)
    sent = travels * (ranks - 1) / ranks + _reduced_between(numel, sharding, sizes)
    mark = Mark(unit, "reduce_scatter", "backward", 0)
    text = text_of(wire or of_replicas)
    transfer = Transfer(
        mark, "g", ms, cluster.latency_ms, round(sent), ready, end, num_bytes, wire=text
    )
    codings = []  # the stream that computes encodes, and sums what it decodes
    if wire is not None:
        encoded, parts = _encoded(numel, sharding)
        message = _travels(wire, encoded, parts, sizes.reduce_bytes) / parts
        codings.append(coding_of_reduction(encoded * sizes.reduce_bytes, message, parts))
    if of_replicas is not None:
        codings.append(coding_of_all_reduce(num_bytes / sharding.ranks, message_of_replicas))
    for coding in codings:
        encode_ms, decode_ms = _coding_ms(coding, cluster)
        transfer = replace(
            transfer,
            encode_ms=transfer.encode_ms + encode_ms,
            decode_ms=transfer.decode_ms + decode_ms,
        )
    return transfer


def secondary_gathers(
    inventory: Inventory, cluster: Cluster, sharding: Sharding, sizes: ElementSizes
) -> tuple[int, float]:
    """Bytes that a rank sends for the secondary shards of all units, and milliseconds."""
    nodes, wire = sharding.nodes, sizes.wire("all_gather")
    if nodes == 1:
        return 0, 0.0
    sent, total_ms = 0, 0.0
    for unit in inventory.units.values():
        numel = -(-unit.numel // sharding.gathering)
        travels = _travels(wire, numel, nodes, sizes.param_bytes)
        sent += travels * (nodes - 1) // nodes
        total_ms += cluster.collective_ms("ring", travels, nodes, nodes)
        if wire is not None:
            coding = coding_of_gather(numel * sizes.param_bytes, travels / nodes, nodes)
            total_ms += sum(_coding_ms(coding, cluster))
    return sent, total_ms


def between_nodes(
    inventory: Inventory, cluster: Cluster, sharding: Sharding, sizes: ElementSizes, sent: int
) -> int:
    """Bytes that a rank sends over the link between nodes."""
    world, nodes = cluster.world_size, cluster.num_nodes
    if nodes == 1:
        return 0
    if world in (sharding.gathering, sharding.replicas):  # rings over all ranks
        return sent * (nodes - 1) // (world - 1)
    reduced = sum(_reduced_between(u.trained, sharding, sizes) for u in inventory.units.values())
    return secondary_gathers(inventory, cluster, sharding, sizes)[0] + round(reduced)


def _reduced_between(numel: int, sharding: Sharding, sizes: ElementSizes) -> float:
    """Bytes that a rank sends for a unit's second reduction: over replicas, or between nodes."""
    nodes, wire = sharding.nodes, sizes.wire("reduce_scatter")
    message = _message_of_replicas(numel, sharding, sizes)
    over_replicas = 2 * message * (sharding.replicas - 1) / sharding.replicas
    travels = _travels(wire, -(-numel // sharding.gathering), nodes, sizes.reduce_bytes)
    return over_replicas + travels * (nodes - 1) / nodes


def _message_of_replicas(numel: int, sharding: Sharding, sizes: ElementSizes) -> float:
    """Bytes of a unit's gradient as replicas reduce it: a shard's, or a message with as many."""
    wire = sizes.wire("all_reduce") if sharding.replicas > 1 else None
    if wire is None:
        return numel * sizes.reduce_bytes / sharding.ranks
    return wire.num_bytes(-(-numel // sharding.ranks))


def _encoded(numel: int, sharding: Sharding) -> tuple[int, int]:
    """Elements of a gradient that is encoded, and the ranks that it is for."""
    if sharding.nodes == 1:
        return numel, sharding.ranks
    return -(-numel // sharding.gathering), sharding.nodes


def _nodes_of(ranks: int, cluster: Cluster) -> int:
    """Nodes of neighbouring ranks."""
    return max(1, ranks // cluster.node_ranks)


def _pattern_of(wire: WireFormat | None) -> Pattern:
    """Pattern of a reduction: in a format, each part goes straight to the rank that sums it."""
    return "ring" if wire is None else "all_to_all"


def _travels(wire: WireFormat | None, numel: int, ranks: int, element_bytes: int) -> int:
    """Bytes of the messages of all ranks' parts."""
    if wire is None or ranks == 1:
        return numel * element_bytes
    return ranks * wire.num_bytes(-(-numel // ranks))


def _coding_ms(coding: Coding, cluster: Cluster) -> tuple[float, float]:
    return (
        coding.encode_bytes / cluster.memory_bytes_per_ms,
        coding.decode_bytes / cluster.memory_bytes_per_ms,
    )


# -- hardware --------------------------------------------------------------------------------------
# Accelerators and clusters, and the notation of sizes and rates.


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
    return FSDPValueError(f"{where}: expected {expected}, got {got!r}. {fix}")


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


__all__ = [
    "ElementSizes",
    "Sharding",
    "accepted",
    "between_nodes",
    "gather_of",
    "reduction_of",
    "secondary_gathers",
    "sharding_of",
]
