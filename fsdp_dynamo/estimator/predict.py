"""Predicted memory, communication and step time of a sharding strategy on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from fsdp_dynamo.api import ShardingStrategy
from fsdp_dynamo.estimator.inventory import Inventory
from fsdp_dynamo.estimator.transfers import (
    Cluster,
    ElementSizes,
    Sharding,
    accepted,
    between_nodes,
    gather_of,
    reduction_of,
    secondary_gathers,
    sharding_of,
)
from graph_passes.scheduling.planner import choose_formats, with_formats
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.schedule import Options, decide
from graph_passes.scheduling.simulation import Limits, lower_bound_ms, simulate

CATEGORIES = ("shards", "optimizer", "unsharded", "gradients", "activations")


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
    sharding = sharding_of(strategy, cluster)
    sizes = accepted(sizes, sharding, cluster)
    pose = partial(_posed, inventory, cluster, sharding, checkpointing)
    forward, backward = problems = pose(sizes)
    if sizes.precision.only_where_exposed:
        each = zip(pose(sizes.without_formats()), problems, strict=True)
        forward, backward = problems = [_with_chosen(*pair) for pair in each]
    transfers = [transfer for problem in problems for transfer in problem.transfers]
    compute_ms = sum(forward.compute_ms) + sum(backward.compute_ms)
    compute_ms += sum(transfer.encode_ms + transfer.decode_ms for transfer in transfers)
    between_bytes, between_ms = secondary_gathers(inventory, cluster, sharding, sizes)
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
        between_bytes=between_nodes(inventory, cluster, sharding, sizes, sent),
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
    sharding: Sharding,
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
    inventory: Inventory, cluster: Cluster, sharding: Sharding, sizes: ElementSizes
) -> Problem:
    units = [unit for unit, _ in inventory.segments]
    gathers = [
        gather_of(inventory, cluster, sharding, sizes, unit, "forward", units.index(unit))
        for unit in dict.fromkeys(units)
    ]
    transfers = gathers if sharding.gathers and sharding.gathering > 1 else []
    return _problem(_segments_ms(inventory, cluster), units, transfers)


def _backward(
    inventory: Inventory,
    cluster: Cluster,
    sharding: Sharding,
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
            transfers.append(
                gather_of(inventory, cluster, sharding, sizes, unit, "backward", first)
            )
        if sharding.ranks * sharding.replicas > 1 and inventory.units[unit].trained:
            transfers.append(
                reduction_of(inventory, cluster, sharding, sizes, unit, last, len(units))
            )
    transfers.sort(key=lambda t: t.need if t.is_gather else t.ready)
    return _problem(ms, units, transfers)


def _memory(
    inventory: Inventory, sharding: Sharding, sizes: ElementSizes, checkpointing: bool
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
