"""Rows of a comparison, from its samples: statistics, ratios, losses, bounds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from benchmarks.cluster.model import ClusterModel
from benchmarks.measure import wire
from benchmarks.measure.bound import flat_cluster, lower_bound, wire_bytes
from benchmarks.measure.report import table
from benchmarks.measure.rounds import (
    Comparison,
    Samples,
    mean_over_ranks,
    round_ratios,
    slowest,
    spread,
)

REFERENCES = ("fsdp2", "fsdp2_inductor")
LOSS_REFERENCES = ("ddp", "fsdp2")
"""Peers whose losses are the reference, in order of preference; else the first peer."""

LOSS_TOLERANCE = 1e-3
LOW_PRECISION_LOSS_TOLERANCE = 3e-2

Row = dict[str, Any]


def rows(comparison: Comparison, cluster: ClusterModel | None = None) -> list[Row]:
    """Rows by peer, the same on every rank; every rank must call it.

    Args:
        comparison: after its rounds.
        cluster: whose links were used; by default the link that the ranks were started on.
    """
    made = {key: _measured(samples) for key, samples in comparison.samples.items()}
    ran = {key: row for key, row in made.items() if row["reason"] is None}
    _compare_times(ran)
    compare_losses(ran, low_precision=comparison.setting.param_dtype is not None)
    _bound(ran, comparison, cluster)
    return list(made.values())


def _measured(samples: Samples) -> Row:
    row: Row = {
        "key": samples.peer.key,
        "title": samples.peer.title,
        "ours": samples.peer.ours,
        "communicates": samples.peer.communicates,
        "reason": samples.reason,
    }
    if samples.reason is not None or not samples.forward_ms:
        return row
    parts = [slowest(part) for part in (samples.forward_ms, samples.backward_ms, samples.update_ms)]
    both = slowest(_sums(samples.forward_ms, samples.backward_ms))
    steps = slowest(_sums(samples.forward_ms, samples.backward_ms, samples.update_ms))
    row |= {
        "forward_ms": spread(parts[0]),
        "backward_ms": spread(parts[1]),
        "update_ms": spread(parts[2]),
        "forward_backward_ms": spread(both) | {"samples": both},
        "step_ms": spread(steps) | {"samples": steps},
        "first_step_s": slowest([samples.first_step_s])[0],
        "losses": mean_over_ranks(samples.losses),
    }
    if samples.sent_bytes:
        row["sent_bytes"] = spread([float(b) for b in samples.sent_bytes])["median"]
    if samples.profile is not None:
        row |= {
            "collectives": samples.profile.counts(),
            "collective_bytes": samples.profile.num_bytes(),
            "peak_bytes": samples.profile.peak_bytes,
            "most_bytes": samples.profile.most_bytes,
        }
    return row


def _sums(*parts: list[float]) -> list[float]:
    return [sum(values) for values in zip(*parts, strict=True)]


def _compare_times(ran: dict[str, Row]) -> None:
    for reference in REFERENCES:
        if reference not in ran:
            continue
        for row in ran.values():
            for measure in ("forward_backward_ms", "step_ms"):
                pair = (row[measure]["samples"], ran[reference][measure]["samples"])
                row.setdefault(f"{measure}_ratio", {})[reference] = round_ratios(*pair)
    for key, row in ran.items():
        unscheduled = ran.get(f"{key}_unscheduled")
        if unscheduled is not None:
            pair = tuple(r["forward_backward_ms"]["samples"] for r in (row, unscheduled))
            row["of_unscheduled"] = round_ratios(*pair)


def compare_losses(ran: dict[str, Row], low_precision: bool) -> None:
    """Add the largest relative distance from the reference's losses, step by step, to each row."""
    communicating = [key for key, row in ran.items() if row["communicates"]]
    known = [key for key in LOSS_REFERENCES if key in communicating]
    if not communicating:
        return
    reference = ran[(known or communicating)[0]]
    tolerance = LOW_PRECISION_LOSS_TOLERANCE if low_precision else LOSS_TOLERANCE
    for row in ran.values():
        distances = [
            abs(own - other) / abs(other)
            for own, other in zip(row["losses"], reference["losses"], strict=True)
        ]
        row["loss_reference"] = reference["key"]
        row["loss_distance"] = max(distances)
        # Without communication every rank trains on its own data: only a compute floor.
        row["loss_agrees"] = not row["communicates"] or max(distances) <= tolerance


def _bound(ran: dict[str, Row], comparison: Comparison, cluster: ClusterModel | None) -> None:
    """Bytes by count, and the least time where rates and a compute floor are known."""
    floors = [r["forward_backward_ms"] for r in ran.values() if not r["communicates"]]
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rate = wire.link_bytes_per_s()
    timed = cluster is not None or rate is not None
    if cluster is None:  # without a rate it still counts bytes
        gloo = comparison.setting.device.type == "cpu"
        cluster = flat_cluster(world_size, rate or 1.0, gloo)
    for key, row in ran.items():
        profile = comparison.samples[key].profile
        if profile is None or world_size == 1:
            continue
        row["counted_bytes"] = wire_bytes(profile.collectives, cluster)
        if floors and timed and row["communicates"]:
            least = min(floor["median"] for floor in floors)
            bound = lower_bound(profile.collectives, least, cluster)
            row["bound_ms"] = bound._asdict() | {"total_ms": bound.total_ms}
            # By the compute of the same round: the machine's speed drifts.
            by_round = [min(at) for at in zip(*(f["samples"] for f in floors), strict=True)]
            totals = [bound._replace(compute_ms=ms).total_ms for ms in by_round]
            row["of_bound"] = round_ratios(row["forward_backward_ms"]["samples"], totals)


def comparison_table(made: list[Row]) -> str:
    """Table of the rows, followed by the reasons of peers that did not run."""
    header = (
        "peer", "fwd+bwd ms", "min", "max", "bound ms", "of FSDP2", "of compiled FSDP2",
        "step ms", "first step s", "sent MB", "peak MB", "loss",
    )  # fmt: skip
    ran = [row for row in made if row["reason"] is None]
    lines = table(header, [_cells(row) for row in ran])
    failed = [f"{row['title']}: did not run: {row['reason']}" for row in made if row["reason"]]
    return "\n".join([lines, *failed])


def _cells(row: Row) -> tuple[str, ...]:
    both = row["forward_backward_ms"]
    ratios = row.get("forward_backward_ms_ratio", {})
    sent = row.get("sent_bytes", row.get("counted_bytes"))
    peak = row.get("peak_bytes")
    agrees = row.get("loss_agrees", True)
    return (
        row["title"],
        f"{both['median']:.0f}",
        f"{both['min']:.0f}",
        f"{both['max']:.0f}",
        f"{row['bound_ms']['total_ms']:.0f}" if "bound_ms" in row else "",
        *(f"{ratios[key]['median']:.2f}" if key in ratios else "" for key in REFERENCES),
        f"{row['step_ms']['median']:.0f}",
        f"{row['first_step_s']:.1f}",
        f"{sent / 1e6:.1f}" if sent is not None else "",
        f"{sum(peak.values()) / 1e6:.1f}" if peak else "",
        f"{row['losses'][-1]:.5f}" + ("" if agrees else " DIFFERS"),
    )


def memory_table(made: list[Row]) -> str:
    """Peak bytes by category."""
    ran = [row for row in made if row.get("peak_bytes")]
    if not ran:
        return ""
    kinds = list(ran[0]["peak_bytes"])
    header = ("peak MB", "all", *kinds, "most unsharded")
    body = [
        (
            row["title"],
            f"{sum(row['peak_bytes'].values()) / 1e6:.1f}",
            *(f"{row['peak_bytes'][kind] / 1e6:.1f}" for kind in kinds),
            f"{row['most_bytes']['unsharded'] / 1e6:.1f}",
        )
        for row in ran
    ]
    return table(header, body)
