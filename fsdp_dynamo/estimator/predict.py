"""Predicted memory, communication and step time of a sharding strategy on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from fsdp_dynamo.config import CollectivePrecision, ShardingStrategy
from fsdp_dynamo.estimator.hardware import Cluster
from fsdp_dynamo.estimator.inventory import Inventory
from graph_passes.limits import Limits
from graph_passes.markers import Mark
from graph_passes.schedule import Options, decide
from graph_passes.scheduling.format_choice import choose_formats, with_formats
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import lower_bound_ms, simulate
from graph_passes.wire_format import (
    Coding,
    WireFormat,
    coding_of_gather,
    coding_of_reduction,
    text_of,
)

CATEGORIES = ("shards", "optimizer", "unsharded", "gradients", "activations")


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

    def wire(self, kind: Literal["all_gather", "reduce_scatter"]) -> WireFormat | None:
        """The format of a collective, if it is not that of its tensors."""
        size = self.param_bytes if kind == "all_gather" else self.reduce_bytes
        return self.precision.wire_of(kind, torch.float32 if size == 4 else torch.bfloat16)

    def without_formats(self) -> ElementSizes:
        """The same with shards that travel as they are."""
        return replace(self, precision=CollectivePrecision())


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of a step with one sharding strategy.

    Attributes:
        strategy: the strategy.
        checkpointing: whether every unit but the root recomputes its forward.
        memory: peak bytes of a rank by category: shards, optimizer, unsharded, gradients,
            activations.
        wire_bytes: bytes that a rank sends per step.
        between_bytes: those of them that go over its link between nodes, where what has come over
            it is passed on inside a node, as times assume.
        compute_ms: compute of forward and backward, with what it encodes and decodes.
        bound_ms: lower bound of the step time over all orders of the collectives.
        step_ms: forward and backward as scheduled, and the update.
        exposed_ms: time of forward and backward in which nothing is computed.
        update_ms: time of the optimizer's update.
        num_formatted: collectives that travel in a format.
        num_collectives: gathers and reductions of a step.
    """

    strategy: ShardingStrategy
    checkpointing: bool
    memory: dict[str, int]
    wire_bytes: int
    between_bytes: int
    compute_ms: float
    bound_ms: float
    step_ms: float
    exposed_ms: float
    update_ms: float
    num_formatted: int = 0
    num_collectives: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class _Sharding:
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


def _sharding(strategy: ShardingStrategy, cluster: Cluster) -> _Sharding:
    world, node = cluster.world_size, min(cluster.per_node, cluster.world_size)
    if strategy.is_hierarchical:
        return _Sharding(world, 1, True, True, world // node)
    if strategy is ShardingStrategy.NO_SHARD:
        return _Sharding(1, world, False, False)
    if strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2):
        reshards = strategy is ShardingStrategy.HYBRID_SHARD
        return _Sharding(node, world // node, reshards, True)
    return _Sharding(world, 1, strategy is ShardingStrategy.FULL_SHARD, True)


def predict(
    inventory: Inventory,
    cluster: Cluster,
    strategy: ShardingStrategy,
    sizes: ElementSizes = ElementSizes(),  # noqa: B008  # frozen
    checkpointing: bool = False,
) -> Prediction:
    """Predict the costs of one step: gathers, forward, backward, reductions, update.

    Args:
        inventory: inventory of the model, for the batch of one rank.
        cluster: the cluster that it runs on.
        strategy: the sharding strategy.
        sizes: bytes per element.
        checkpointing: whether every unit but the root recomputes its forward.

    Returns:
        Memory, bytes sent and times of one rank. Secondary shards of HIERARCHICAL_SHARD count as
        unsharded, and are gathered before the forward, as in graph mode.
    """
    sharding = _sharding(strategy, cluster)
    if sizes.precision.only_where_exposed and sharding.nodes > 1:
        sizes = sizes.without_formats()  # which is refused
    pose = partial(_posed, inventory, cluster, sharding, checkpointing)
    forward, backward = problems = pose(sizes)
    if sizes.precision.only_where_exposed:
        each = zip(pose(sizes.without_formats()), problems, strict=True)
        forward, backward = problems = [_with_chosen(*pair) for pair in each]
    transfers = [transfer for problem in problems for transfer in problem.transfers]
    compute_ms = sum(forward.compute_ms) + sum(backward.compute_ms)
    compute_ms += sum(transfer.encode_ms + transfer.decode_ms for transfer in transfers)
    between_bytes, between_ms = _secondary_gathers(inventory, cluster, sharding, sizes)
    times = [between_ms, *(_scheduled(problem) for problem in problems)]
    sent = between_bytes + sum(transfer.wire_bytes for transfer in transfers)
    an_element = 4 * sizes.master_bytes + 2 * sizes.optimizer_bytes  # read, and written
    touched = inventory.trained / sharding.ranks * an_element
    update_ms = touched / cluster.memory_bytes_per_ms
    return Prediction(
        strategy=strategy,
        checkpointing=checkpointing,
        memory=_memory(inventory, sharding, sizes, checkpointing),
        wire_bytes=sent,
        between_bytes=_between_nodes(inventory, cluster, sharding, sizes, sent),
        compute_ms=compute_ms,
        bound_ms=between_ms + lower_bound_ms(forward) + lower_bound_ms(backward) + update_ms,
        step_ms=sum(times) + update_ms,
        exposed_ms=sum(times) - compute_ms,
        update_ms=update_ms,
        num_formatted=sum(bool(transfer.wire) for transfer in transfers),
        num_collectives=len(transfers),
    )


def _scheduled(problem: Problem) -> float:
    """Time of the planner's schedule, without a limit on memory."""
    schedule, _ = decide(problem, _options(problem))
    return simulate(problem, schedule).total_ms


def _options(problem: Problem) -> Options:
    held = sum(transfer.held_bytes for transfer in problem.transfers)
    return Options(limits=Limits(memory_budget_bytes=max(held, 1)))


def _with_chosen(without: Problem, formatted: Problem) -> Problem:
    """The problem with formats where they make its time shorter."""
    chosen = choose_formats(without, formatted, _options(without)).chosen
    return with_formats(without, formatted, chosen)


def _posed(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    checkpointing: bool,
    sizes: ElementSizes,
) -> list[Problem]:
    """Forward and backward."""
    return [
        _forward(inventory, cluster, sharding, sizes),
        _backward(inventory, cluster, sharding, sizes, checkpointing),
    ]


def _segments_ms(inventory: Inventory, cluster: Cluster) -> list[float]:
    rates = (cluster.flops_per_ms, cluster.memory_bytes_per_ms)
    return [work.ms(*rates) for _, work in inventory.segments]


def _problem(ms: Sequence[float], units: Sequence[str], transfers: list[Transfer]) -> Problem:
    """The scheduling problem without memory, which ``_memory`` adds up."""
    return Problem(tuple(ms), tuple(units), (0,) * len(ms), tuple(transfers))


def _forward(
    inventory: Inventory, cluster: Cluster, sharding: _Sharding, sizes: ElementSizes
) -> Problem:
    units = [unit for unit, _ in inventory.segments]
    gathers = [
        _gather(inventory, cluster, sharding, sizes, unit, "forward", units.index(unit))
        for unit in dict.fromkeys(units)
    ]
    transfers = gathers if sharding.gathers and sharding.gathering > 1 else []
    return _problem(_segments_ms(inventory, cluster), units, transfers)


def _backward(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    sizes: ElementSizes,
    checkpointing: bool,
) -> Problem:
    units = [unit for unit, _ in reversed(inventory.segments)]
    forward_ms = list(reversed(_segments_ms(inventory, cluster)))
    rates = (cluster.flops_per_ms, cluster.memory_bytes_per_ms)
    ratio = inventory.backward.ms(*rates) / max(sum(forward_ms), 1e-12)
    again = [ms if checkpointing and unit else 0.0 for ms, unit in zip(forward_ms, units)]  # noqa: B905
    ms = [own * ratio + more for own, more in zip(forward_ms, again, strict=True)]
    transfers: list[Transfer] = []
    for unit in dict.fromkeys(units):
        last = len(units) - units[::-1].index(unit)
        if unit and sharding.reshards and sharding.gathering > 1:
            first = units.index(unit)
            transfers.append(_gather(inventory, cluster, sharding, sizes, unit, "backward", first))
        if sharding.ranks * sharding.replicas > 1 and inventory.units[unit].trained:
            transfers.append(
                _reduction(inventory, cluster, sharding, sizes, unit, last, len(units))
            )
    transfers.sort(key=lambda t: t.need if t.is_gather else t.ready)
    return _problem(ms, units, transfers)


def _gather(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    sizes: ElementSizes,
    unit: str,
    direction: str,
    need: int,
) -> Transfer:
    numel, ranks = inventory.units[unit].numel, sharding.gathering
    wire = sizes.wire("all_gather") if sharding.nodes == 1 else None  # formats are between nodes
    num_bytes = numel * sizes.param_bytes
    travels = _travels(wire, numel, ranks, sizes.param_bytes)
    mark = Mark(unit, "all_gather", direction, 0, sharding.reshards)  # type: ignore[arg-type]
    ms = cluster.gather_ms(travels, ranks)
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


def _reduction(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    sizes: ElementSizes,
    unit: str,
    ready: int,
    end: int,
) -> Transfer:
    """A reduce-scatter among ranks of a shard, then another between nodes, or an all-reduce."""
    numel, ranks, nodes = inventory.units[unit].trained, sharding.gathering, sharding.nodes
    num_bytes = numel * sizes.reduce_bytes
    shard = num_bytes / sharding.ranks
    wire = sizes.wire("reduce_scatter") if sharding.ranks > 1 else None
    travels = _travels(wire if nodes == 1 else None, numel, ranks, sizes.reduce_bytes)
    ms = cluster.gather_ms(travels, ranks)
    ms += cluster.reduce_replicas_ms(shard, sharding.replicas)
    between = _travels(wire, -(-numel // ranks), nodes, sizes.reduce_bytes)
    ms += cluster.between_nodes_ms(between, nodes)
    sent = travels * (ranks - 1) / ranks + _reduced_between(numel, sharding, sizes)
    mark = Mark(unit, "reduce_scatter", "backward", 0)
    transfer = Transfer(
        mark, "g", ms, cluster.latency_ms, round(sent), ready, end, num_bytes, wire=text_of(wire)
    )
    if wire is None:
        return transfer
    # The stream that computes encodes, and sums what it decodes.
    encoded, parts = _encoded(numel, sharding)
    message = _travels(wire, encoded, parts, sizes.reduce_bytes) / parts
    coding = coding_of_reduction(encoded * sizes.reduce_bytes, message, parts)
    encode_ms, decode_ms = _coding_ms(coding, cluster)
    return replace(transfer, encode_ms=encode_ms, decode_ms=decode_ms)


def _secondary_gathers(
    inventory: Inventory, cluster: Cluster, sharding: _Sharding, sizes: ElementSizes
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
        total_ms += cluster.between_nodes_ms(travels, nodes)
        if wire is not None:
            coding = coding_of_gather(numel * sizes.param_bytes, travels / nodes, nodes)
            total_ms += sum(_coding_ms(coding, cluster))
    return sent, total_ms


def _between_nodes(
    inventory: Inventory, cluster: Cluster, sharding: _Sharding, sizes: ElementSizes, sent: int
) -> int:
    """Of the bytes that a rank sends, those over the link between nodes."""
    world = cluster.world_size
    nodes = world // min(cluster.per_node, world)
    if nodes == 1 or sharding.ranks == 1:
        return 0 if nodes == 1 else sent
    if sharding.gathering == world:
        return sent * (nodes - 1) // (world - 1)
    reduced = sum(_reduced_between(u.trained, sharding, sizes) for u in inventory.units.values())
    return _secondary_gathers(inventory, cluster, sharding, sizes)[0] + round(reduced)


def _reduced_between(numel: int, sharding: _Sharding, sizes: ElementSizes) -> float:
    """Bytes that a rank sends for a unit's second reduction: over replicas, or between nodes."""
    nodes, wire = sharding.nodes, sizes.wire("reduce_scatter")
    shard = numel * sizes.reduce_bytes / sharding.ranks
    over_replicas = 2 * shard * (sharding.replicas - 1) / sharding.replicas
    travels = _travels(wire, -(-numel // sharding.gathering), nodes, sizes.reduce_bytes)
    return over_replicas + travels * (nodes - 1) / nodes


def _encoded(numel: int, sharding: _Sharding) -> tuple[int, int]:
    """Elements of a gradient that is encoded, and the ranks that it is for."""
    if sharding.nodes == 1:
        return numel, sharding.ranks
    return -(-numel // sharding.gathering), sharding.nodes


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


def _memory(
    inventory: Inventory, sharding: _Sharding, sizes: ElementSizes, checkpointing: bool
) -> dict[str, int]:
    """Peak memory of the backward, where activations are freed as gradients accumulate."""
    units = list(inventory.units.values())
    root, blocks = units[0], units[1:]
    largest = sorted((unit.numel for unit in blocks), reverse=True)[:2]
    live = root.numel + sum(largest) if sharding.reshards else inventory.numel
    live += inventory.numel // sharding.gathering if sharding.nodes > 1 else 0  # secondary shards
    casts = sizes.param_bytes != sizes.master_bytes
    fixed = {
        "shards": inventory.numel * sizes.master_bytes // sharding.ranks,
        "optimizer": inventory.trained * sizes.optimizer_bytes // sharding.ranks,
        "unsharded": live * sizes.param_bytes if sharding.ranks > 1 or casts else 0,
    }
    kept = {u.fqn: u.input_bytes if checkpointing and u.fqn else u.saved_bytes for u in units}
    again = max((u.saved_bytes for u in blocks), default=0) if checkpointing else 0
    moments = [(0, sum(kept.values()))]
    done = 0
    for index, unit in enumerate(reversed(blocks)):
        before = blocks[-index].trained if index else 0  # its reduction is under way
        flying = unit.trained + before + root.trained  # the root's is whole until the end
        reduced = done * sizes.master_bytes // sharding.ranks
        moments.append((reduced + flying * sizes.param_bytes, sum(kept.values()) + again))
        done += unit.trained
        kept[unit.fqn] = 0
    moments.append((inventory.trained * sizes.master_bytes // sharding.ranks, 0))
    gradients, activations = max(moments, key=sum)
    worst = {"gradients": gradients, "activations": activations}
    return {name: int({**fixed, **worst}[name]) for name in CATEGORIES}


__all__ = ["ElementSizes", "Prediction", "predict"]
