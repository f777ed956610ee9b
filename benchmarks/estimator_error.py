"""The estimator's prediction against a measured step: time, memory by category, bytes sent.

The rates are measured by the ranks, as before a first compilation; those of earlier runs are not
used. The model, its batch and the optimizer are the same. Over a real link:

    python benchmarks/link.py --rate 1gbit -- python benchmarks/estimator_error.py [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure.rank_script import Training, run_script, slowest_ms
from benchmarks.measure.report import table
from benchmarks.measure.rounds import profiled_step
from benchmarks.measure.step_profile import CATEGORIES, StepProfile
from benchmarks.peers import Setting
from benchmarks.workloads.catalogue import Workload
from fsdp_dynamo import ShardingStrategy
from fsdp_dynamo.estimator import Cluster, ElementSizes, Prediction, predict, take_inventory
from fsdp_dynamo.graph_mode import calibration

PEERS = {
    ShardingStrategy.FULL_SHARD: "ours_graph_inductor",
    ShardingStrategy.SHARD_GRAD_OP: "ours_graph_inductor_kept",
}
WARMUP = 3


class _WithLoss(nn.Module):
    """The workload's model as the estimator takes it: it returns its loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.inner = workload.build()
        self.workload = workload

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.workload.loss(self.inner, batch)


def predicted(workload: Workload, strategy: ShardingStrategy) -> Prediction:
    """Prediction from the measured rates of this cluster; all ranks must call it."""
    group = dist.group.WORLD
    assert group is not None
    rates = calibration.measured(group, torch.device("cpu"))
    link = rates["link"]["bytes_per_ms"]
    cluster = Cluster(
        world_size=dist.get_world_size(),
        per_node=1,
        flops_per_ms=rates["device"]["flops_per_ms"],
        memory_bytes_per_ms=rates["device"]["bytes_per_ms"],
        link_bytes_per_ms=link,
        node_bytes_per_ms=link,
        latency_ms=rates["link"]["latency_ms"],
        memory_bytes=1 << 40,
    )

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        example = workload.batch_of(0, 0, torch.device("cpu"))
        batch = {name: torch.empty_like(tensor) for name, tensor in example.items()}
        return _WithLoss(workload), batch

    classes = [kind.__name__ for kind in workload.block_classes]
    inventory = take_inventory(build, classes, torch.float32)
    return predict(inventory, cluster, strategy, ElementSizes(4, 4, 4, 8))


def measured(key: str, setting: Setting, rounds: int) -> tuple[list[float], StepProfile]:
    """Milliseconds of steps on the slowest rank, and the profile of one step."""
    training = Training(key, setting)
    for _ in range(WARMUP):
        training.train()
    times = []
    for _ in range(rounds):
        dist.barrier()
        times.append(slowest_ms(training.train))
    batch = setting.workload.batch_of(dist.get_rank(), 0, setting.device)
    return times, profiled_step(training.trainee, batch)


def sent_bytes(profile: StepProfile) -> int:
    """Bytes sent by one rank: half of the unsharded side on two ranks."""
    world = dist.get_world_size()
    kinds = ("all_gather", "all_to_all", "reduce_scatter")
    numbers = [c.num_bytes for c in profile.collectives if c.op in kinds]
    return sum(numbers) * (world - 1) // world


def row_of(strategy: ShardingStrategy, setting: Setting, rounds: int, key: str) -> dict[str, Any]:
    """Predictions for a strategy, and measurements of the peer that uses it."""
    expected = predicted(setting.workload, strategy)
    times, profile = measured(key, setting, rounds)
    return {
        "predicted": {
            "step_ms": expected.step_ms,
            "sent": expected.wire_bytes,
            **expected.memory,
            "peak": expected.total_bytes,
        },
        "measured": {
            "step_ms": statistics.median(times),
            "sent": sent_bytes(profile),
            **{name: profile.peak_bytes.get(name, 0) for name in CATEGORIES},
            "peak": sum(profile.peak_bytes.values()),
        },
        "times_ms": times,
    }


def report(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Table of predicted and measured values, with their ratios."""
    body = []
    for name, row in rows.items():
        for key, value in row["predicted"].items():
            other = row["measured"][key]
            unit = 1 if key == "step_ms" else 1e6
            ratio = f"{value / other:.2f}" if other else "-"
            body.append((name, key, f"{value / unit:.1f}", f"{other / unit:.1f}", ratio))
    return table(("strategy", "ms or MB", "predicted", "measured", "ratio"), body)


def measure(setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
    """Predictions and measurements by strategy, with rates that are measured anew."""
    os.environ["FSDP_DYNAMO_PLACE"] = f"estimator_error {time.time()}"  # no rates are known for it
    return {s.name: row_of(s, setting, rounds, key) for s, key in PEERS.items()}


def main() -> None:
    """The command line."""
    run_script("estimator", __doc__ or "", measure, report, decoder_size="29m", rounds=5)


if __name__ == "__main__":
    main()
