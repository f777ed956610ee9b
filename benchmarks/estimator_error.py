"""The planner's prediction against a step that was run: time, memory by category, bytes sent.

Rates are those that the ranks measure of themselves before the first compilation, here anew, not
those of an earlier run; the model, its batch and the optimizer are the same. Over a real link:

    python benchmarks/link.py --rate 1gbit -- python benchmarks/planner_error.py [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input
from benchmarks.measure.ranks import become_ranks, process_group
from benchmarks.measure.report import record, table, write
from benchmarks.measure.step_profile import CATEGORIES, StepProfile, StepProfiler
from benchmarks.peers import Setting, Trainee, named
from benchmarks.workloads.catalogue import DECODER_SIZES, Workload, decoder
from fsdp_dynamo import ShardingStrategy
from fsdp_dynamo.estimator import Cluster, Prediction, Setup, predict, take_inventory
from fsdp_dynamo.graph_path import calibration

PEERS = {
    ShardingStrategy.FULL_SHARD: "ours_graph_inductor",
    ShardingStrategy.SHARD_GRAD_OP: "ours_graph_inductor_kept",
}
WARMUP = 3


class _WithLoss(nn.Module):
    """The workload's model as the planner wants it: it returns its loss."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.inner = workload.build()
        self.workload = workload

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.workload.loss(self.inner, batch)


def predicted(workload: Workload, strategy: ShardingStrategy) -> Prediction:
    """From this cluster's measured rates. All ranks must call it."""
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
    return predict(inventory, cluster, strategy, Setup(4, 4, 4, 8))


def measured(trainee: Trainee, setting: Setting, rounds: int) -> tuple[list[float], StepProfile]:
    """Milliseconds of steps, the slowest rank's, and one step's profile."""

    def train(step: int, profiler: StepProfiler | None = None) -> None:
        batch = setting.workload.batch_of(dist.get_rank(), step, setting.device)
        trainee.backward(trainee.forward(batch))
        if profiler is not None:
            profiler.note_gradients()
        trainee.update()

    for step in range(WARMUP):
        train(step)
    times = []
    for step in range(rounds):
        dist.barrier()
        began = time.perf_counter()
        train(step)
        took = torch.tensor([(time.perf_counter() - began) * 1e3])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(took.item())
    profiler = StepProfiler(trainee.model, trainee.optimizer)
    with profiler.recording() as profile:
        train(0, profiler)
    return times, profile


def sent_bytes(profile: StepProfile) -> int:
    """By one rank: half of the unsharded side on two ranks."""
    world = dist.get_world_size()
    kinds = ("all_gather", "all_to_all", "reduce_scatter")
    numbers = [c.num_bytes for c in profile.collectives if c.op in kinds]
    return sum(numbers) * (world - 1) // world


def row_of(strategy: ShardingStrategy, setting: Setting, rounds: int, key: str) -> dict[str, Any]:
    """What was predicted of one strategy, and what was measured of the peer of that key."""
    expected = predicted(setting.workload, strategy)
    trainee = named([key])[0].train(setting)
    times, profile = measured(trainee, setting, rounds)
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
    """Predicted over measured."""
    body = []
    for name, row in rows.items():
        for key, value in row["predicted"].items():
            other = row["measured"][key]
            unit = 1 if key == "step_ms" else 1e6
            ratio = f"{value / other:.2f}" if other else "-"
            body.append((name, key, f"{value / unit:.1f}", f"{other / unit:.1f}", ratio))
    return table(("strategy", "ms or MB", "predicted", "measured", "ratio"), body)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default="29m")
    parser.add_argument("--world_size", type=at_least(2), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    become_ranks(options.world_size)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ["FSDP_DYNAMO_PLACE"] = f"planner_error {time.time()}"  # nothing is known of it
    with one_line_on_bad_input(), process_group("cpu") as device:
        setting = Setting(decoder(options.decoder), device)
        rows = {s.name: row_of(s, setting, options.rounds, key) for s, key in PEERS.items()}
        if dist.get_rank() == 0:
            print(f"decoder {options.decoder}, {options.world_size} ranks, gloo")
            print(report(rows))
            if options.json is not None:
                facts = {"decoder": options.decoder, "world_size": options.world_size}
                write(options.json, record("planner", **facts, rows=rows))


if __name__ == "__main__":
    main()
