"""Collectives of a step of a sharding strategy: bytes, and milliseconds on a cluster."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fsdp_dynamo.config import CollectivePrecision, ShardingStrategy
from fsdp_dynamo.estimator.hardware import Cluster, Pattern
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
        """The same with shards that travel as they are."""
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
    """How a strategy shards on a cluster."""
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
    """Of the bytes that a rank sends, those over the link between nodes."""
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
    """How a reduction sends: in a format, each part goes straight to the rank that sums it."""
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
