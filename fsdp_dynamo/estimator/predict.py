"""Memory, communication and step time of one way to shard, from an inventory and a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_dynamo.config import ShardingStrategy
from fsdp_dynamo.estimator.hardware import Cluster
from fsdp_dynamo.estimator.inventory import Inventory
from graph_passes.limits import Limits
from graph_passes.markers import Mark
from graph_passes.schedule import Options, decide
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.simulation import lower_bound_ms, simulate

CATEGORIES = ("shards", "optimizer", "unsharded", "gradients", "activations")


@dataclass(frozen=True)
class Setup:
    """What a step is besides the model: bytes of an element.

    Attributes:
        param_bytes: of a parameter while it is gathered and computes.
        reduce_bytes: of a gradient that is reduced.
        master_bytes: of a shard and of its gradient.
        optimizer_bytes: of the optimizer's state: 8 for AdamW in float32.
    """

    param_bytes: int = 2
    reduce_bytes: int = 2
    master_bytes: int = 4
    optimizer_bytes: int = 8


@dataclass(frozen=True)
class Prediction:
    """One way to shard, and what a step takes then.

    Attributes:
        strategy: how.
        checkpointing: whether every unit but the root computes its forward again.
        memory: bytes of a rank at the worst moment, by category: shards, optimizer, unsharded,
            gradients, activations.
        wire_bytes: what a rank sends in a step.
        compute_ms: forward and backward.
        bound_ms: no order of the collectives is faster, the update included.
        step_ms: forward and backward as scheduled, and the update.
        exposed_ms: of forward and backward, in which nothing is computed.
        update_ms: of the optimizer.
    """

    strategy: ShardingStrategy
    checkpointing: bool
    memory: dict[str, int]
    wire_bytes: int
    compute_ms: float
    bound_ms: float
    step_ms: float
    exposed_ms: float
    update_ms: float

    @property
    def total_bytes(self) -> int:
        """Bytes of all categories."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class _Sharding:
    """Ranks that share a shard, and how often that is repeated."""

    ranks: int
    replicas: int
    reshards: bool
    gathers: bool


def _sharding(strategy: ShardingStrategy, cluster: Cluster) -> _Sharding:
    world, node = cluster.world_size, min(cluster.per_node, cluster.world_size)
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
    setup: Setup = Setup(),  # noqa: B008  # frozen
    checkpointing: bool = False,
) -> Prediction:
    """What one step takes: gathers, forward, backward, reductions, update.

    Args:
        inventory: of the model, for the batch of one rank.
        cluster: what it runs on.
        strategy: which ranks share what.
        setup: sizes of elements.
        checkpointing: of every unit but the root.

    Returns:
        Memory, bytes sent and times, of one rank.
    """
    sharding = _sharding(strategy, cluster)
    forward = _forward(inventory, cluster, sharding, setup)
    backward = _backward(inventory, cluster, sharding, setup, checkpointing)
    times = [_scheduled(problem) for problem in (forward, backward)]
    an_element = 4 * setup.master_bytes + 2 * setup.optimizer_bytes  # read, and written
    touched = inventory.trained / sharding.ranks * an_element
    update_ms = touched / cluster.memory_bytes_per_ms
    return Prediction(
        strategy=strategy,
        checkpointing=checkpointing,
        memory=_memory(inventory, sharding, setup, checkpointing),
        wire_bytes=sum(t.wire_bytes for p in (forward, backward) for t in p.transfers),
        compute_ms=sum(forward.compute_ms) + sum(backward.compute_ms),
        bound_ms=lower_bound_ms(forward) + lower_bound_ms(backward) + update_ms,
        step_ms=sum(times) + update_ms,
        exposed_ms=sum(times) - sum(forward.compute_ms) - sum(backward.compute_ms),
        update_ms=update_ms,
    )


def _scheduled(problem: Problem) -> float:
    """With room for what is in flight at most: a cluster short of memory is another question."""
    held = sum(transfer.held_bytes for transfer in problem.transfers)
    limits = Limits(memory_budget_bytes=max(held, 1))
    schedule, _ = decide(problem, Options(limits=limits))
    return simulate(problem, schedule).total_ms


def _segments_ms(inventory: Inventory, cluster: Cluster) -> list[float]:
    rates = (cluster.flops_per_ms, cluster.memory_bytes_per_ms)
    return [work.ms(*rates) for _, work in inventory.segments]


def _problem(ms: Sequence[float], units: Sequence[str], transfers: list[Transfer]) -> Problem:
    """Without memory: what is alive is added up in ``_memory``."""
    return Problem(tuple(ms), tuple(units), (0,) * len(ms), tuple(transfers))


def _forward(inventory: Inventory, cluster: Cluster, sharding: _Sharding, setup: Setup) -> Problem:
    units = [unit for unit, _ in inventory.segments]
    gathers = [
        _gather(inventory, cluster, sharding, setup, unit, "forward", units.index(unit))
        for unit in dict.fromkeys(units)
    ]
    transfers = gathers if sharding.gathers and sharding.ranks > 1 else []
    return _problem(_segments_ms(inventory, cluster), units, transfers)


def _backward(
    inventory: Inventory, cluster: Cluster, sharding: _Sharding, setup: Setup, checkpointing: bool
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
        if unit and sharding.reshards and sharding.ranks > 1:
            first = units.index(unit)
            transfers.append(_gather(inventory, cluster, sharding, setup, unit, "backward", first))
        if sharding.ranks * sharding.replicas > 1 and inventory.units[unit].trained:
            transfers.append(
                _reduction(inventory, cluster, sharding, setup, unit, last, len(units))
            )
    transfers.sort(key=lambda t: t.need if t.is_gather else t.ready)
    return _problem(ms, units, transfers)


def _gather(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    setup: Setup,
    unit: str,
    direction: str,
    need: int,
) -> Transfer:
    num_bytes = inventory.units[unit].numel * setup.param_bytes
    mark = Mark(unit, "all_gather", direction, 0, sharding.reshards)  # type: ignore[arg-type]
    ms = cluster.gather_ms(num_bytes, sharding.ranks)
    sent = num_bytes * (sharding.ranks - 1) // sharding.ranks
    return Transfer(mark, "g", ms, cluster.latency_ms, sent, 0, need, num_bytes)


def _reduction(
    inventory: Inventory,
    cluster: Cluster,
    sharding: _Sharding,
    setup: Setup,
    unit: str,
    ready: int,
    end: int,
) -> Transfer:
    """Scattered among the ranks of a shard, then summed over its replicas."""
    num_bytes = inventory.units[unit].trained * setup.reduce_bytes
    shard = num_bytes / sharding.ranks
    ms = cluster.gather_ms(num_bytes, sharding.ranks)
    ms += cluster.reduce_replicas_ms(shard, sharding.replicas)
    sent = num_bytes * (sharding.ranks - 1) / sharding.ranks
    sent += 2 * shard * (sharding.replicas - 1) / sharding.replicas
    mark = Mark(unit, "reduce_scatter", "backward", 0)
    return Transfer(mark, "g", ms, cluster.latency_ms, round(sent), ready, end, num_bytes)


def _memory(
    inventory: Inventory, sharding: _Sharding, setup: Setup, checkpointing: bool
) -> dict[str, int]:
    """At the worst moment of the backward: activations go as gradients come."""
    units = list(inventory.units.values())
    root, blocks = units[0], units[1:]
    sizes = sorted((unit.numel for unit in blocks), reverse=True)
    live = root.numel + sum(sizes[:2]) if sharding.reshards else inventory.numel
    casts = setup.param_bytes != setup.master_bytes
    fixed = {
        "shards": inventory.numel * setup.master_bytes // sharding.ranks,
        "optimizer": inventory.trained * setup.optimizer_bytes // sharding.ranks,
        "unsharded": live * setup.param_bytes if sharding.ranks > 1 or casts else 0,
    }
    kept = {u.fqn: u.input_bytes if checkpointing and u.fqn else u.saved_bytes for u in units}
    again = max((u.saved_bytes for u in blocks), default=0) if checkpointing else 0
    moments = [(0, sum(kept.values()))]
    done = 0
    for index, unit in enumerate(reversed(blocks)):
        before = blocks[-index].trained if index else 0  # its reduction is under way
        flying = unit.trained + before + root.trained  # the root's is whole until the end
        reduced = done * setup.master_bytes // sharding.ranks
        moments.append((reduced + flying * setup.param_bytes, sum(kept.values()) + again))
        done += unit.trained
        kept[unit.fqn] = 0
    moments.append((inventory.trained * setup.master_bytes // sharding.ranks, 0))
    gradients, activations = max(moments, key=sum)
    worst = {"gradients": gradients, "activations": activations}
    return {name: int({**fixed, **worst}[name]) for name in CATEGORIES}


__all__ = ["Prediction", "Setup", "predict"]
