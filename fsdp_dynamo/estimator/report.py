"""Text of predictions: a table, and the recommended strategy with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_dynamo.api import ShardingStrategy
from fsdp_dynamo.estimator.inventory import Inventory
from fsdp_dynamo.estimator.predict import CATEGORIES, Prediction
from fsdp_dynamo.estimator.transfers import Cluster
from fsdp_dynamo.observe.text_format import format_bytes, format_table


def recommend(predictions: Sequence[Prediction], memory_bytes: int) -> Prediction | None:
    """The fastest prediction that fits into memory.

    Among equally fast ones it prefers no checkpointing, then the least memory.

    Args:
        predictions: the candidates.
        memory_bytes: memory of a rank.

    Returns:
        One of them; ``None`` if none fits.
    """
    fits = [p for p in predictions if p.total_bytes <= memory_bytes]
    limit = min((p.step_ms for p in fits), default=0.0) * 1.001
    fast = [p for p in fits if p.step_ms <= limit]
    return min(fast, key=lambda p: (p.checkpointing, p.total_bytes), default=None)


def format_report(
    inventory: Inventory, cluster: Cluster, predictions: Sequence[Prediction], tokens: int
) -> str:
    """Format the output of ``python -m fsdp_dynamo.estimator``.

    Args:
        inventory: inventory of the model.
        cluster: the cluster.
        predictions: all candidates.
        tokens: number of tokens per rank and step; 0 if unknown.
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
    """Name of a prediction in texts."""
    return prediction.strategy.name + (" + checkpoint" if prediction.checkpointing else "")


def _recommended(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    best = recommend(predictions, cluster.memory_bytes)
    if best is None:
        least = min(predictions, key=lambda p: p.total_bytes)
        largest = max(least.memory, key=lambda name: least.memory[name])
        return (
            f"nothing fits: {_title(least)} needs the least, {format_bytes(least.total_bytes)} of "
            f"{format_bytes(cluster.memory_bytes)}, most of it for {largest}.\n{_REMEDIES[largest]}"
        )
    lines = [f"recommended: {_title(best)}", f"  {_reason(best, predictions, cluster)}"]
    lines += [f"  {line}" for line in _code(best)]
    return "\n".join(lines)


_REMEDIES = {
    "shards": "Use more ranks, or a smaller data type for parameters.",
    "optimizer": "Use more ranks, or an optimizer with less state.",
    "unsharded": "Use smaller units, or FULL_SHARD.",
    "gradients": "Use smaller units, or more ranks.",
    "activations": "Use a smaller batch, shorter sequences, or tensor parallelism.",
}


def _reason(best: Prediction, predictions: Sequence[Prediction], cluster: Cluster) -> str:
    fits = [p for p in predictions if p.total_bytes <= cluster.memory_bytes]
    faster = [p for p in predictions if p.step_ms < best.step_ms * 0.999 and p not in fits]
    reason = f"the fastest of {len(fits)} that fit: {_communication(best)}."
    if faster:
        first = min(faster, key=lambda p: p.step_ms)
        gain = 1 - first.step_ms / best.step_ms
        reason += (
            f" {_title(first)} would be {gain:.0%} faster, but needs "
            f"{format_bytes(first.total_bytes)}."
        )
    return reason


def _communication(best: Prediction) -> str:
    waits = best.exposed_ms / best.step_ms
    if not best.wire_bytes:
        return "one rank sends nothing"
    if waits < 0.02:
        return "all communication is hidden, except at the ends"
    text = f"{waits:.0%} of the step waits for the link"
    return text if waits < 0.5 else f"{text}; each rank computes too little for this many ranks"


def _code(best: Prediction) -> list[str]:
    lines = [f"model = FSDP(model, sharding_strategy=ShardingStrategy.{best.strategy.name},"]
    lines += ["             auto_wrap_policy=..., mixed_precision=...)"]
    if best.strategy is ShardingStrategy.NO_SHARD:
        lines[0] += "  # as DistributedDataParallel"
    if best.checkpointing:
        lines.insert(0, "apply_activation_checkpointing(model, ...)  # before FSDP")
    return lines


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1e4 else f"{value / 1e3:,.1f} s"
