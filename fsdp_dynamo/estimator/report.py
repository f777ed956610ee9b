"""Predictions as text: a table, and what is recommended, with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_dynamo.config import ShardingStrategy
from fsdp_dynamo.estimator.hardware import Cluster
from fsdp_dynamo.estimator.inventory import Inventory
from fsdp_dynamo.estimator.predict import CATEGORIES, Prediction


def best_of(predictions: Sequence[Prediction], memory_bytes: int) -> Prediction | None:
    """The fastest that fits; of equally fast ones one without checkpointing, with least memory.

    Args:
        predictions: to choose from.
        memory_bytes: what a rank has.

    Returns:
        One of them; ``None``: nothing fits.
    """
    fits = [p for p in predictions if p.total_bytes <= memory_bytes]
    limit = min((p.step_ms for p in fits), default=0.0) * 1.001
    fast = [p for p in fits if p.step_ms <= limit]
    return min(fast, key=lambda p: (p.checkpointing, p.total_bytes), default=None)


def text_of(
    inventory: Inventory, cluster: Cluster, predictions: Sequence[Prediction], tokens: int
) -> str:
    """What ``python -m fsdp_dynamo.estimator`` prints.

    Args:
        inventory: of the model.
        cluster: what it would run on.
        predictions: all ways that were looked at.
        tokens: of one rank and step; 0: not known.
    """
    parts = [_head(inventory, cluster), _table(predictions, cluster, tokens)]
    parts.append(_recommended(predictions, cluster))
    return "\n\n".join(parts)


def _head(inventory: Inventory, cluster: Cluster) -> str:
    sizes = [unit.numel for fqn, unit in inventory.units.items() if fqn]
    ends = dict.fromkeys(_count(size) for size in (min(sizes), max(sizes)))
    return (
        f"{_count(inventory.numel)} parameters in {len(inventory.units)} units: the root of "
        f"{_count(inventory.units[''].numel)}, {len(sizes)} of {' to '.join(ends)}\n"
        f"{cluster.world_size} rank{'' if cluster.world_size == 1 else 's'}, "
        f"{min(cluster.per_node, cluster.world_size)} a node, "
        f"{size_of(cluster.memory_bytes)} each; forward and backward of a rank: "
        f"{(inventory.forward_flops + inventory.backward.flops) / 1e12:,.2f} TFLOP\n"
        f"taken to be reached: {cluster.flops_per_ms / 1e9:,.0f} TFLOP/s, "
        f"{_rate(cluster.memory_bytes_per_ms)} of memory, {_rate(cluster.link_bytes_per_ms)} "
        f"between nodes ({cluster.latency_ms:g} ms a hop), {_rate(cluster.node_bytes_per_ms)} "
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
    rows = [["strategy", "step", "exposed", "bound", "sent", *CATEGORIES, "memory", "fits"]]
    rows[0] += ["tokens/s"] if tokens else []
    for one in predictions:
        fits = one.total_bytes <= cluster.memory_bytes
        row = [title_of(one), _ms(one.step_ms), _ms(one.exposed_ms), _ms(one.bound_ms)]
        row += [size_of(one.wire_bytes), *(size_of(one.memory[name]) for name in CATEGORIES)]
        row += [size_of(one.total_bytes), "yes" if fits else "no"]
        row += [f"{tokens * cluster.world_size / one.step_ms * 1e3:,.0f}"] if tokens else []
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths)))  # noqa: B905
        for row in rows
    )


def title_of(prediction: Prediction) -> str:
    """How a way is called."""
    return prediction.strategy.name + (" + checkpoint" if prediction.checkpointing else "")


def _recommended(predictions: Sequence[Prediction], cluster: Cluster) -> str:
    best = best_of(predictions, cluster.memory_bytes)
    if best is None:
        least = min(predictions, key=lambda p: p.total_bytes)
        largest = max(least.memory, key=lambda name: least.memory[name])
        return (
            f"nothing fits: {title_of(least)} needs least, {size_of(least.total_bytes)} of "
            f"{size_of(cluster.memory_bytes)}, most of it for {largest}.\n{_HELPS[largest]}"
        )
    lines = [f"recommended: {title_of(best)}", f"  {_reason(best, predictions, cluster)}"]
    lines += [f"  {line}" for line in _code(best)]
    return "\n".join(lines)


_HELPS = {
    "shards": "More ranks, or a parameter dtype of fewer bytes.",
    "optimizer": "More ranks, or an optimizer with less state.",
    "unsharded": "Smaller units, or FULL_SHARD.",
    "gradients": "Smaller units, or more ranks.",
    "activations": "A smaller batch, shorter sequences, or tensor parallelism.",
}


def _reason(best: Prediction, predictions: Sequence[Prediction], cluster: Cluster) -> str:
    fits = [p for p in predictions if p.total_bytes <= cluster.memory_bytes]
    faster = [p for p in predictions if p.step_ms < best.step_ms * 0.999 and p not in fits]
    reason = f"the fastest of {len(fits)} that fit: {_of_the_link(best)}."
    if faster:
        first = min(faster, key=lambda p: p.step_ms)
        gain = 1 - first.step_ms / best.step_ms
        reason += (
            f" {title_of(first)} would be {gain:.0%} faster, but needs "
            f"{size_of(first.total_bytes)}."
        )
    return reason


def _of_the_link(best: Prediction) -> str:
    waits = best.exposed_ms / best.step_ms
    if not best.wire_bytes:
        return "one rank sends nothing"
    if waits < 0.02:
        return "all communication but the ends is hidden"
    text = f"{waits:.0%} of the step waits for the link"
    return text if waits < 0.5 else f"{text}; a rank has too little to compute for so many ranks"


def _code(best: Prediction) -> list[str]:
    lines = [f"model = FSDP(model, sharding_strategy=ShardingStrategy.{best.strategy.name},"]
    lines += ["             auto_wrap_policy=..., mixed_precision=...)"]
    if best.strategy is ShardingStrategy.NO_SHARD:
        lines[0] += "  # as DistributedDataParallel"
    if best.checkpointing:
        lines.insert(0, "apply_activation_checkpointing(model, ...)  # before FSDP")
    return lines


def size_of(num_bytes: float) -> str:
    """Bytes with a unit."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def _ms(value: float) -> str:
    return f"{value:,.1f} ms" if value < 1e4 else f"{value / 1e3:,.1f} s"
