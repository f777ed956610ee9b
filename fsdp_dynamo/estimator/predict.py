"""Predicted memory, communication and step time of a sharding strategy on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_dynamo.api import ShardingStrategy
from fsdp_dynamo.estimator.inventory import Inventory
from fsdp_dynamo.estimator.transfers import (
    Cluster,
    ElementSizes,
    StepTransfers,
    sharding_of,
    without_refused_formats,
)
from fsdp_dynamo.observe.command_line import format_bytes, format_table
from graph_passes.scheduling.planner import choose_formats, with_formats
from graph_passes.scheduling.problem import Problem, Transfer
from graph_passes.scheduling.schedule import Options, decide
from graph_passes.scheduling.simulation import Limits, lower_bound_ms, simulate

CATEGORIES = ("shards", "optimizer", "unsharded", "gradients", "activations")


@dataclass(frozen=True)
class Prediction:
    """Predicted costs of a step with one sharding strategy.

    Attributes:
        strategy: the sharding strategy.
        checkpointing: whether every unit except the root recomputes its forward.
        memory: peak bytes of a rank, by ``CATEGORIES``.
        wire_bytes: bytes that a rank sends per step.
        between_bytes: the part of ``wire_bytes`` that a rank sends to other nodes, if data that
            has arrived on a node is forwarded inside it (a ring).
        compute_ms: compute of forward and backward, including encoding and decoding.
        bound_ms: lower bound of the step time over all orders of the collectives.
        step_ms: forward and backward as scheduled, and the optimizer's update.
        exposed_ms: exposed communication of forward and backward.
        update_ms: the optimizer's update.
        num_formatted: number of collectives with a wire format.
        num_collectives: number of all-gathers and reductions per step.
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
    """Predict the costs of one step for one rank: forward, backward, collectives and update.

    Secondary shards of HIERARCHICAL_SHARD count as unsharded, and are gathered before the forward,
    as in graph mode.

    Args:
        inventory: the model's, for the batch of one rank.
        cluster: ranks and links that it runs on.
        strategy: the sharding strategy.
        sizes: bytes per element.
        checkpointing: whether every unit except the root recomputes its forward.
    """
    sharding = sharding_of(strategy, cluster)
    sizes = without_refused_formats(sizes, sharding, cluster)
    step = StepTransfers(inventory, cluster, sharding, sizes)
    forward, backward = _forward(step), _backward(step, checkpointing)
    if sizes.precision.only_where_exposed:
        plain = replace(step, sizes=sizes.without_formats())
        forward = _with_chosen(_forward(plain), forward)
        backward = _with_chosen(_backward(plain, checkpointing), backward)
    problems = (forward, backward)
    transfers = [transfer for problem in problems for transfer in problem.transfers]
    compute_ms = sum(forward.compute_ms) + sum(backward.compute_ms)
    compute_ms += sum(transfer.encode_ms + transfer.decode_ms for transfer in transfers)
    between_bytes, between_ms = step.secondary_gathers()
    times = [between_ms, *(_scheduled(problem) for problem in problems)]
    sent = between_bytes + sum(transfer.wire_bytes for transfer in transfers)
    # The update reads and writes each parameter, its gradient and its optimizer state once.
    an_element = 4 * sizes.master_bytes + 2 * sizes.optimizer_bytes
    touched = inventory.trained / sharding.ranks * an_element
    update_ms = touched / cluster.memory_bytes_per_ms
    return Prediction(
        strategy=strategy,
        checkpointing=checkpointing,
        memory=_memory(step, checkpointing),
        wire_bytes=sent,
        between_bytes=step.between_nodes(sent),
        compute_ms=compute_ms,
        bound_ms=between_ms + lower_bound_ms(forward) + lower_bound_ms(backward) + update_ms,
        step_ms=sum(times) + update_ms,
        exposed_ms=sum(times) - compute_ms,
        update_ms=update_ms,
        num_formatted=sum(bool(transfer.wire) for transfer in transfers),
        num_collectives=len(transfers),
    )


def _scheduled(problem: Problem) -> float:
    """Milliseconds of the planner's schedule, without a memory limit."""
    schedule, _ = decide(problem, _options(problem))
    return simulate(problem, schedule).total_ms


def _options(problem: Problem) -> Options:
    held = sum(transfer.held_bytes for transfer in problem.transfers)
    return Options(limits=Limits(memory_budget_bytes=max(held, 1)))


def _with_chosen(without: Problem, formatted: Problem) -> Problem:
    """Return the problem with wire formats where they shorten its schedule."""
    chosen = choose_formats(without, formatted, _options(without)).chosen
    return with_formats(without, formatted, chosen)


def _problem(ms: Sequence[float], units: Sequence[str], transfers: list[Transfer]) -> Problem:
    """Return a scheduling problem that leaves memory out; ``_memory`` computes it separately."""
    return Problem(tuple(ms), tuple(units), (0,) * len(ms), tuple(transfers))


def _forward(step: StepTransfers) -> Problem:
    units = [unit for unit, _ in step.inventory.segments]
    transfers = []
    if step.sharding.gathers and step.sharding.gather_ranks > 1:
        transfers = [step.gather(u, "forward", units.index(u)) for u in dict.fromkeys(units)]
    ms = [step.cluster.compute_ms(work) for _, work in step.inventory.segments]
    return _problem(ms, units, transfers)


def _backward(step: StepTransfers, checkpointing: bool) -> Problem:
    inventory, sharding = step.inventory, step.sharding
    segments = inventory.segments[::-1]
    units = [unit for unit, _ in segments]
    forward_ms = [step.cluster.compute_ms(work) for _, work in segments]
    # The inventory has the backward's work as a whole: spread it as that of the forward.
    ratio = step.cluster.compute_ms(inventory.backward) / max(sum(forward_ms), 1e-12)
    ms = [
        own * ratio + (own if checkpointing and unit else 0.0)
        for unit, own in zip(units, forward_ms, strict=True)
    ]
    transfers: list[Transfer] = []
    for unit in dict.fromkeys(units):
        last = len(units) - units[::-1].index(unit)
        if unit and sharding.reshards and sharding.gather_ranks > 1:
            transfers.append(step.gather(unit, "backward", units.index(unit)))
        if sharding.ranks * sharding.replicas > 1 and inventory.units[unit].trained:
            transfers.append(step.reduction(unit, last, len(units)))
    transfers.sort(key=lambda t: t.need if t.is_gather else t.ready)
    return _problem(ms, units, transfers)


def _memory(step: StepTransfers, checkpointing: bool) -> dict[str, int]:
    """Return the peak bytes of the backward, by category.

    Activations shrink unit by unit while gradient shards grow, so the peak may lie anywhere in it.
    """
    inventory, sharding, sizes = step.inventory, step.sharding, step.sizes
    root, *blocks = inventory.units.values()
    if sharding.reshards:  # the root, and a block while the next one is prefetched
        unsharded = root.numel + sum(sorted((unit.numel for unit in blocks), reverse=True)[:2])
    else:
        unsharded = inventory.numel
    if sharding.nodes > 1:  # secondary shards
        unsharded += inventory.numel // sharding.gather_ranks
    if sharding.ranks == 1 and sizes.param_bytes == sizes.master_bytes:
        unsharded = 0  # the shards are the parameters
    saved_bytes = [root.saved_bytes]
    saved_bytes += [unit.input_bytes if checkpointing else unit.saved_bytes for unit in blocks]
    recomputed = max((unit.saved_bytes for unit in blocks), default=0) if checkpointing else 0
    moments = [(0, sum(saved_bytes))]  # bytes of gradients and of activations
    num_reduced = num_in_flight = 0
    for unit in reversed(blocks):
        # Unsharded gradients: this unit's, those of the unit before, whose reduction is in flight,
        # and the root's, which is reduced last.
        num_unsharded = unit.trained + num_in_flight + root.trained
        gradients = num_reduced * sizes.master_bytes // sharding.ranks
        gradients += num_unsharded * sizes.param_bytes
        moments.append((gradients, sum(saved_bytes) + recomputed))
        num_reduced += unit.trained
        num_in_flight = unit.trained
        saved_bytes.pop()
    moments.append((inventory.trained * sizes.master_bytes // sharding.ranks, 0))
    gradients, activations = max(moments, key=sum)
    return {
        "shards": inventory.numel * sizes.master_bytes // sharding.ranks,
        "optimizer": inventory.trained * sizes.optimizer_bytes // sharding.ranks,
        "unsharded": unsharded * sizes.param_bytes,
        "gradients": gradients,
        "activations": activations,
    }


# -- report ----------------------------------------------------------------------------------------
# Predictions as text: a table, and the recommended strategy.


def recommend(predictions: Sequence[Prediction], memory_bytes: int) -> Prediction | None:
    """Return the fastest prediction that fits into a rank's memory, or ``None`` if none fits.

    Among predictions of equal time (within 0.1 %) it prefers no checkpointing, then less memory.
    """
    fits = [p for p in predictions if p.total_bytes <= memory_bytes]
    limit = min((p.step_ms for p in fits), default=0.0) * 1.001
    fast = [p for p in fits if p.step_ms <= limit]
    return min(fast, key=lambda p: (p.checkpointing, p.total_bytes), default=None)


def format_report(
    inventory: Inventory, cluster: Cluster, predictions: Sequence[Prediction], tokens: int
) -> str:
    """Format ``predictions`` of an ``inventory`` on a ``cluster``, as the command line prints them.

    ``tokens`` is their number per rank and step, 0 if unknown.
    """
    parts = [_header(inventory, cluster), _table(predictions, cluster, tokens)]
    parts.append(_recommended(predictions, cluster))
    return "\n\n".join(parts)


def _header(inventory: Inventory, cluster: Cluster) -> str:
    sizes = [unit.numel for fqn, unit in inventory.units.items() if fqn]
    ends = dict.fromkeys(_count(size) for size in (min(sizes), max(sizes)))
    return (
        f"{_count(inventory.numel)} parameters in {len(inventory.units)} units: the root of "
        f"{_count(inventory.units[''].numel)}, {len(sizes)} of {' to '.join(ends)}\n"
        f"{cluster.world_size} rank{'' if cluster.world_size == 1 else 's'}, "
        f"{min(cluster.per_node, cluster.world_size)} per node, "
        f"{format_bytes(cluster.memory_bytes)} each; forward and backward of a rank: "
        f"{(inventory.forward_flops + inventory.backward.flops) / 1e12:,.2f} TFLOP\n"
        f"assumed rates: {cluster.flops_per_ms / 1e9:,.0f} TFLOP/s, "
        f"{_rate(cluster.memory_bytes_per_ms)} of memory, {_rate(cluster.link_bytes_per_ms)} "
        f"between nodes ({cluster.latency_ms:g} ms per hop), {_rate(cluster.node_bytes_per_ms)} "
        "inside"
    )


def _count(numel: int) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if numel >= size:
            return f"{numel / size:,.1f} {unit}"
    return str(numel)


def _rate(bytes_per_ms: float) -> str:
    return f"{bytes_per_ms / 1e6:,.1f} GB/s"


def _table(predictions: Sequence[Prediction], cluster: Cluster, tokens: int) -> str:
    sent = ["sent", "between"]
    rows = [["strategy", "step", "exposed", "bound", *sent, *CATEGORIES, "memory", "fits"]]
    has_formats = any(one.num_formatted for one in predictions)
    rows[0] += ["in a format"] if has_formats else []
    rows[0] += ["tokens/s"] if tokens else []
    for one in predictions:
        fits = one.total_bytes <= cluster.memory_bytes
        row = [_title(one), _ms(one.step_ms), _ms(one.exposed_ms), _ms(one.bound_ms)]
        row += [
            format_bytes(one.wire_bytes),
            format_bytes(one.between_bytes),
            *(format_bytes(one.memory[name]) for name in CATEGORIES),
        ]
        row += [format_bytes(one.total_bytes), "yes" if fits else "no"]
        row += [f"{one.num_formatted}/{one.num_collectives}"] if has_formats else []
        row += [f"{tokens * cluster.world_size / one.step_ms * 1e3:,.0f}"] if tokens else []
        rows.append(row)
    return format_table(rows)


def _title(prediction: Prediction) -> str:
    """Name of a prediction in the report."""
    return prediction.strategy.name + (" + checkpoint" if prediction.checkpointing else "")


def _recommended(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    best = recommend(predictions, cluster.memory_bytes)
    if best is not None:
        return f"recommended, as the fastest that fits: {_title(best)}"
    least = min(predictions, key=lambda p: p.total_bytes)
    largest = max(least.memory, key=lambda name: least.memory[name])
    return (
        f"nothing fits: {_title(least)} needs the least, {format_bytes(least.total_bytes)} of "
        f"{format_bytes(cluster.memory_bytes)}, most of it for {largest}"
    )


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1e4 else f"{value / 1e3:,.1f} s"


__all__ = ["Prediction", "predict"]
