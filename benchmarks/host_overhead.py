"""Host microseconds a unit for forward + backward, ours and FSDP2's, in one run.

100 units of two ``Linear(64, 64)``, batch 4, on a fake process group of 8 ranks (collectives
return at once), one thread. What is left is what the host does around the compute. The rows are
measured in turn, round by round; the median over rounds is shown with the spread, and the median of
each round's excess over the unwrapped model as a part of FSDP2's eager excess in that round.

    python benchmarks/host_overhead.py [--units 100] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM, BATCH, WORLD = 64, 4, 8


class Pair(nn.Module):
    """One unit: two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Stack(nn.Module):
    """The model: units in a row."""

    def __init__(self, num_units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(Pair() for _ in range(num_units))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def unwrapped(num_units: int) -> nn.Module:
    """The plain model."""
    return Stack(num_units)


def fsdp2(num_units: int, compiled_units: bool = False) -> nn.Module:
    """Upstream's per-parameter FSDP."""
    model = Stack(num_units)
    for unit in model.units:
        if compiled_units:
            unit.compile(backend="aot_eager")
        fully_shard(unit)
    fully_shard(model)
    return model


def ours(num_units: int) -> FSDP:
    """Our wrapper."""
    return FSDP(Stack(num_units), auto_wrap_policy=ModuleWrapPolicy({Pair}))


def variants(num_units: int) -> dict[str, nn.Module]:
    """All rows, in the order in which they are measured."""
    return {
        "unwrapped": unwrapped(num_units),
        "FSDP2 eager": fsdp2(num_units),
        "FSDP2, compiled units": fsdp2(num_units, compiled_units=True),
        "fsdp_dynamo eager": ours(num_units),
        "fsdp_dynamo hooks path (aot_eager)": torch.compile(ours(num_units), backend="aot_eager"),
        "fsdp_dynamo graph path (aot_eager)": torch.compile(
            ours(num_units), fullgraph=True, backend="fsdp_dynamo_aot_eager"
        ),
    }


def timed_step(model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of forward and backward; gradients are dropped outside the timed part."""
    for param in model.parameters():
        param.grad = None
    began = time.perf_counter()
    model(x).sum().backward()
    return time.perf_counter() - began


def measure(num_units: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds a unit of every row: median, min and max over rounds, and first step."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, DIM)
    models = variants(num_units)
    first = {name: timed_step(model, x) for name, model in models.items()}
    for model in models.values():
        timed_step(model, x)
        timed_step(model, x)
    samples: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            samples[name].append(min(timed_step(model, x) for _ in range(2)))
    rows: dict[str, dict[str, float]] = {}
    for name, seconds in samples.items():
        micros = [s / num_units * 1e6 for s in seconds]
        rows[name] = {
            "median_us": statistics.median(micros),
            "min_us": min(micros),
            "max_us": max(micros),
            "first_step_s": first[name],
        }
    floors, peers = samples["unwrapped"], samples["FSDP2 eager"]
    for name, row in rows.items():  # round by round, so that a drift of the machine cancels
        parts = [
            (own - floor) / (peer - floor)
            for own, floor, peer in zip(samples[name], floors, peers, strict=True)
        ]
        row["of_fsdp2_eager"] = statistics.median(parts)
    return rows


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    rows = measure(options.units, options.rounds)
    print(f"{'':36} {'us a unit':>10} {'min':>7} {'max':>7} {'of FSDP2':>9} {'first step':>11}")
    for name, row in rows.items():
        print(
            f"{name:36} {row['median_us']:10.0f} {row['min_us']:7.0f} {row['max_us']:7.0f} "
            f"{row['of_fsdp2_eager']:9.2f} {row['first_step_s']:9.1f} s"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
