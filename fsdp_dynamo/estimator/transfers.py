"""Collectives of a sharding strategy's step: bytes, and milliseconds on a cluster."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch

from fsdp_dynamo.api import CollectivePrecision, ShardingStrategy
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.estimator.inventory import Inventory, Work
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
        param_bytes: unsharded parameters, in all-gathers and compute.
        reduce_bytes: gradients in reductions.
        master_bytes: shards and their gradients.
        optimizer_bytes: the optimizer's state, such as 8 for AdamW in float32.
        precision: wire formats of the collectives.
    """

    param_bytes: int = 2
    reduce_bytes: int = 2
    master_bytes: int = 4
    optimizer_bytes: int = 8
    precision: CollectivePrecision = CollectivePrecision()  # noqa: RUF009  # frozen

    def wire(
        self, kind: Literal["all_gather", "reduce_scatter", "all_reduce"]
    ) -> WireFormat | None:
        """Return the wire format of a collective; ``None``: uncompressed."""
        size = self.param_bytes if kind == "all_gather" else self.reduce_bytes
        return self.precision.wire_of(kind, torch.float32 if size == 4 else torch.bfloat16)

    def without_formats(self) -> ElementSizes:
        """Return the same sizes, all collectives uncompressed."""
        return replace(self, precision=CollectivePrecision())


@dataclass(frozen=True)
class ShardingDegrees:
    """Degrees of sharding and replication of a strategy.

    Attributes:
        ranks: number of ranks that share a flat parameter.
        replicas: number of replicas of each shard.
        reshards: whether parameters are resharded after forward.
        gathers: whether parameters are gathered at all.
        nodes: number of nodes over which ``ranks`` are spread if the strategy gathers on two
            levels (first between nodes, then inside a node); else 1.
    """

    ranks: int
    replicas: int
    reshards: bool
    gathers: bool
    nodes: int = 1

    @property
    def gather_ranks(self) -> int:
        """Number of ranks of the all-gathers in forward and backward."""
        return self.ranks // self.nodes


def sharding_of(strategy: ShardingStrategy, cluster: Cluster) -> ShardingDegrees:
    """Return the degrees of a strategy on a cluster."""
    world, node = cluster.world_size, cluster.node_ranks
    if strategy.is_hierarchical:
        return ShardingDegrees(world, 1, True, True, cluster.num_nodes)
    if strategy is ShardingStrategy.NO_SHARD:
        return ShardingDegrees(1, world, False, False)
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2):
        reshards = strategy is ShardingStrategy.HYBRID_SHARD
        return ShardingDegrees(node, cluster.num_nodes, reshards, True)
    return ShardingDegrees(world, 1, strategy is ShardingStrategy.FULL_SHARD, True)


def without_refused_formats(
    sizes: ElementSizes, sharding: ShardingDegrees, cluster: Cluster
) -> ElementSizes:
    """Return the sizes without the wire formats that the library refuses for this sharding."""
    if sizes.precision.only_where_exposed and sharding.nodes > 1:
        return sizes.without_formats()
    is_flat = cluster.world_size in (sharding.gather_ranks, sharding.replicas)
    if is_flat and cluster.num_nodes > 1 and cluster.node_ranks > 1:
        exact = replace(sizes.precision, reduce_scatter=None, all_reduce=None)
        return replace(sizes, precision=exact)
    return sizes


@dataclass(frozen=True)
class StepTransfers:
    """Collectives of one rank's step."""

    inventory: Inventory
    cluster: Cluster
    sharding: ShardingDegrees
    sizes: ElementSizes

    def gather(self, unit: str, direction: str, need: int) -> Transfer:
        """Return a unit's all-gather in forward or backward; segment ``need`` uses it."""
        cluster, sizes, ranks = self.cluster, self.sizes, self.sharding.gather_ranks
        numel = self.inventory.units[unit].numel
        # Hierarchical shards are compressed between nodes only: in ``secondary_gathers``.
        wire = sizes.wire("all_gather") if self.sharding.nodes == 1 else None
        num_bytes = numel * sizes.param_bytes
        message_bytes = _message_bytes(wire, numel, ranks, sizes.param_bytes)
        reshards = self.sharding.reshards
        mark = Mark(unit, "all_gather", direction, 0, reshards)  # type: ignore[arg-type]
        ms = cluster.collective_ms("ring", message_bytes, ranks, _nodes_of(ranks, cluster))
        sent = message_bytes * (ranks - 1) // ranks
        transfer = Transfer(
            mark, "g", ms, cluster.latency_ms, sent, 0, need, num_bytes, wire=text_of(wire)
        )
        if wire is None:
            return transfer
        coding = coding_of_gather(num_bytes, message_bytes / ranks, ranks)
        encode_ms, decode_ms = _coding_ms(coding, cluster)
        if wire.is_optional:  # nodes of the compiled graph encode and decode: compute time
            return replace(transfer, encode_ms=encode_ms, decode_ms=decode_ms)
        return replace(transfer, ms=ms + encode_ms + decode_ms)  # on the all-gathers' stream

    def reduction(self, unit: str, ready: int, end: int) -> Transfer:
        """Return a unit's reduction as one transfer.

        It is a reduce-scatter over ``sharding.gather_ranks`` ranks, followed by a reduce-scatter
        between nodes or an all-reduce over replicas, where the strategy has them.

        Args:
            unit: FQN.
            ready: segment of the backward after which the gradient is complete.
            end: segment at which the result is needed.
        """
        cluster, sharding, sizes = self.cluster, self.sharding, self.sizes
        ranks, nodes, replicas = sharding.gather_ranks, sharding.nodes, sharding.replicas
        numel = self.inventory.units[unit].trained
        num_bytes = numel * sizes.reduce_bytes
        wire = sizes.wire("reduce_scatter") if sharding.ranks > 1 else None
        replica_wire = sizes.wire("all_reduce") if replicas > 1 else None
        replica_bytes = self._replica_bytes(numel)
        inner = wire if nodes == 1 else None
        message_bytes = _message_bytes(inner, numel, ranks, sizes.reduce_bytes)
        on_nodes = _nodes_of(ranks, cluster)
        ms = cluster.collective_ms(_pattern_of(inner), message_bytes, ranks, on_nodes)
        on_nodes = min(replicas, cluster.num_nodes)
        for pattern in (_pattern_of(replica_wire), "ring"):  # reduce-scatter, all-gather
            ms += cluster.collective_ms(pattern, replica_bytes, replicas, on_nodes)
        between = _message_bytes(wire, -(-numel // ranks), nodes, sizes.reduce_bytes)
        ms += cluster.collective_ms(_pattern_of(wire), between, nodes, nodes)
        sent = message_bytes * (ranks - 1) / ranks + self._second_reduction_bytes(numel)
        codings = []  # on the compute stream, which also sums the decoded parts
        if wire is not None:
            encoded, parts = (numel, ranks) if nodes == 1 else (-(-numel // ranks), nodes)
            part_bytes = _message_bytes(wire, encoded, parts, sizes.reduce_bytes) / parts
            codings.append(coding_of_reduction(encoded * sizes.reduce_bytes, part_bytes, parts))
        if replica_wire is not None:
            codings.append(coding_of_all_reduce(num_bytes / sharding.ranks, replica_bytes))
        coding_ms = [_coding_ms(coding, cluster) for coding in codings]
        return Transfer(
            Mark(unit, "reduce_scatter", "backward", 0),
            "g",
            ms,
            cluster.latency_ms,
            round(sent),
            ready,
            end,
            num_bytes,
            wire=text_of(wire or replica_wire),
            encode_ms=sum((encode for encode, _ in coding_ms), 0.0),
            decode_ms=sum((decode for _, decode in coding_ms), 0.0),
        )

    def secondary_gathers(self) -> tuple[int, float]:
        """Return bytes sent per rank and milliseconds to gather all units' secondary shards."""
        cluster, sizes, nodes = self.cluster, self.sizes, self.sharding.nodes
        if nodes == 1:
            return 0, 0.0
        wire, sent, total_ms = sizes.wire("all_gather"), 0, 0.0
        for unit in self.inventory.units.values():
            numel = -(-unit.numel // self.sharding.gather_ranks)
            message_bytes = _message_bytes(wire, numel, nodes, sizes.param_bytes)
            sent += message_bytes * (nodes - 1) // nodes
            total_ms += cluster.collective_ms("ring", message_bytes, nodes, nodes)
            if wire is not None:
                coding = coding_of_gather(numel * sizes.param_bytes, message_bytes / nodes, nodes)
                total_ms += sum(_coding_ms(coding, cluster))
        return sent, total_ms

    def between_nodes(self, sent: int) -> int:
        """Return how many of the ``sent`` bytes a rank sends over the link between nodes."""
        world, nodes = self.cluster.world_size, self.cluster.num_nodes
        if nodes == 1:
            return 0
        if world in (self.sharding.gather_ranks, self.sharding.replicas):  # rings over all ranks
            return sent * (nodes - 1) // (world - 1)
        units = self.inventory.units.values()
        reduced = sum(self._second_reduction_bytes(unit.trained) for unit in units)
        return self.secondary_gathers()[0] + round(reduced)

    def _second_reduction_bytes(self, numel: int) -> float:
        """Bytes that a rank sends in a unit's second reduction: over replicas, or between nodes."""
        nodes, replicas = self.sharding.nodes, self.sharding.replicas
        over_replicas = 2 * self._replica_bytes(numel) * (replicas - 1) / replicas
        wire, shard_numel = (
            self.sizes.wire("reduce_scatter"),
            -(-numel // self.sharding.gather_ranks),
        )
        between = _message_bytes(wire, shard_numel, nodes, self.sizes.reduce_bytes)
        return over_replicas + between * (nodes - 1) / nodes

    def _replica_bytes(self, numel: int) -> float:
        """Bytes of one gradient shard as the all-reduce over replicas sends it."""
        wire = self.sizes.wire("all_reduce") if self.sharding.replicas > 1 else None
        if wire is None:
            return numel * self.sizes.reduce_bytes / self.sharding.ranks
        return wire.num_bytes(-(-numel // self.sharding.ranks))


def _nodes_of(ranks: int, cluster: Cluster) -> int:
    """Number of nodes over which consecutive ranks are spread."""
    return max(1, ranks // cluster.node_ranks)


def _pattern_of(wire: WireFormat | None) -> Pattern:
    """Return the pattern of a reduction; with a wire format, ranks exchange parts directly."""
    return "ring" if wire is None else "all_to_all"


def _message_bytes(wire: WireFormat | None, numel: int, ranks: int, element_bytes: int) -> int:
    """Bytes of the messages of all ranks together."""
    if wire is None or ranks == 1:
        return numel * element_bytes
    return ranks * wire.num_bytes(-(-numel // ranks))


def _coding_ms(coding: Coding, cluster: Cluster) -> tuple[float, float]:
    rate = cluster.memory_bytes_per_ms
    return coding.encode_bytes / rate, coding.decode_bytes / rate


# -- hardware --------------------------------------------------------------------------------------
# Accelerators and clusters, and the notation of sizes and rates.


_PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_PREFIXES |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?(b)", re.IGNORECASE)


def parse_bytes(text: str, where: str = "estimator") -> int:
    """Parse a size such as ``"80GB"`` or ``"24GiB"``; errors name the option ``where``."""
    bits = _bits(text)
    if bits is None or not text.strip().endswith("B"):
        raise _unreadable("a size such as 80GB or 24GiB", text, where)
    return round(bits / 8)


def parse_rate(text: str, where: str = "estimator") -> float:
    """Parse a rate such as ``"400Gb/s"`` (bits) or ``"50GB/s"`` into bytes per second."""
    amount, _, second = text.strip().rpartition("/")
    bits = _bits(amount)
    if bits is None or second.lower() != "s":
        raise _unreadable("a rate such as 400Gb/s (bits) or 50GB/s (bytes)", text, where)
    return bits / 8


def _bits(text: str) -> float | None:
    """Parse a number above 0 with its unit into bits; ``None`` if it is something else."""
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
        name: key in ``ACCELERATORS``.
        flops_per_s: dense 16-bit matrix products.
        bytes_per_s: memory bandwidth.
        memory_bytes: memory size.
        node_bytes_per_s: bandwidth to the other devices of the node, in one direction.
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
    """Bytes that a rank sends inside its node and to other nodes."""

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
        """Number of ranks per node that are in use."""
        return min(self.per_node, self.world_size)

    @property
    def num_nodes(self) -> int:
        """Number of nodes that are in use."""
        return self.world_size // self.node_ranks

    def compute_ms(self, work: Work) -> float:
        """Return the time of operators, each bound by either arithmetic or memory traffic."""
        rates = self.flops_per_ms, self.memory_bytes_per_ms
        return sum(max(flops / rates[0], num_bytes / rates[1]) for flops, num_bytes in work.costs)

    def traffic(self, pattern: Pattern, num_bytes: float, ranks: int, nodes: int) -> Traffic:
        """Return the bytes that each rank sends for a collective.

        In a ring a shard crosses to each other node once and is forwarded inside the node. In an
        all-to-all each message goes directly to its rank.

        Args:
            pattern: ``"ring"`` for an all-gather or a reduce-scatter, or ``"all_to_all"``.
            num_bytes: size of the unsharded tensor, or of all messages.
            ranks: number of ranks that take part.
            nodes: number of nodes over which they are spread.
        """
        shard = num_bytes / ranks
        outside = nodes - 1 if pattern == "ring" else ranks - ranks // nodes
        return Traffic((ranks - 1 - outside) * shard, outside * shard)

    def collective_ms(self, pattern: Pattern, num_bytes: float, ranks: int, nodes: int) -> float:
        """Return the milliseconds of a collective, bound by the slower link.

        ``pattern``, ``num_bytes``, ``ranks`` and ``nodes`` are those of ``traffic``.
        """
        if ranks == 1:
            return 0.0
        traffic = self.traffic(pattern, num_bytes, ranks, nodes)
        over_link = traffic.between_bytes / self.link_bytes_per_ms
        over_node = traffic.inside_bytes / self.node_bytes_per_ms
        return self.latency_ms * math.ceil(math.log2(ranks)) + max(over_link, over_node)
