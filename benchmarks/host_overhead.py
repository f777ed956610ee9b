"""Host microseconds per unit for forward + backward, ours and peers', in one run.

100 units of two ``Linear(64, 64)``, batch 4, on a fake process group of 8 ranks (collectives
return at once), one thread. What remains is the host's work around the compute. The rows are
interleaved; the table shows the median over rounds with the spread, and the median of each round's
excess over the unwrapped model as a fraction of FSDP2's eager excess in that round.

    python benchmarks/host_overhead.py [--units 100] [--rounds 7] [--peers KEYS] [--json FILE]

With ``--step single``, ``foreach`` or ``fused`` it is the time of a step of AdamW instead, on each
rank's parts; the fraction is of FSDP2's whole step.

    python benchmarks/host_overhead.py --step fused --peers plain,fsdp2,ours

``--on-shards`` lets our eager mode's DTensors be stepped by ``fsdp_dynamo.step_on_shards``, and
adds plain tensors of the same sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import BadInputError, at_least, one_line_on_bad_input, output_file
from benchmarks.measure.report import record, table, write
from benchmarks.measure.step_profile import local
from benchmarks.peers import Setting, named
from benchmarks.workloads.catalogue import Batch, Workload
from fsdp_dynamo import step_on_shards

DIM, BATCH, WORLD = 64, 4, 8
FLOOR, REFERENCE, PARTS = "plain", "fsdp2", "parts"
KEYS = (
    "plain,fsdp2,fsdp2_aot_eager,simple_fsdp_aot_eager,ours,ours_hooks_aot_eager,"
    "ours_graph_aot_eager"
)

Row = dict[str, float]


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


def workload(num_units: int) -> Workload:
    """A workload with so little compute that the host's work dominates."""

    def batch(generator: torch.Generator) -> Batch:
        return {"x": torch.randn(BATCH, DIM, generator=generator)}

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        return model(batch["x"]).sum()

    return Workload(f"{num_units} pairs", lambda: Stack(num_units), batch, loss, (Pair,))


def timed_step(model: nn.Module, batch: Batch, task: Workload) -> float:
    """Seconds of forward and backward; gradients are dropped outside the timed part."""
    for param in model.parameters():
        param.grad = None
    began = time.perf_counter()
    task.loss(model, batch).backward()
    return time.perf_counter() - began


class _Timer:
    """What is timed of a model: forward and backward, or the step after them."""

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        task: Workload,
        step: str | None,
        on_shards: bool = False,
    ) -> None:
        self._given = model, batch, task
        self._optimizer: torch.optim.Optimizer | None = None
        if step is not None:
            self._optimizer = _adamw(model.parameters(), step)
            if on_shards:
                step_on_shards(self._optimizer)

    def __call__(self) -> float:
        seconds = timed_step(*self._given)
        return seconds if self._optimizer is None else _step_seconds(self._optimizer)


def _adamw(parameters: Iterable[nn.Parameter], step: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=step == "foreach", fused=step == "fused")


def _step_seconds(optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def _parts_timer(model: nn.Module, before: Callable[[], float], step: str) -> Callable[[], float]:
    """Seconds of a step on plain tensors that are as large as one rank's parts of a model.

    ``before`` is run ahead of it, so that processor caches are as ahead of other steps.
    """
    parts = [nn.Parameter(local(param).detach().clone()) for param in model.parameters()]
    for part in parts:
        part.grad = torch.ones_like(part)
    optimizer = _adamw(parts, step)

    def timed() -> float:
        before()
        return _step_seconds(optimizer)

    return timed


def measure(
    num_units: int,
    rounds: int,
    keys: str = KEYS,
    step: str | None = None,
    on_shards: bool = False,
) -> dict[str, Row]:
    """Microseconds per unit of every peer: median, min and max over rounds, and first step.

    Args:
        num_units: how many units the model has.
        rounds: how often each peer is measured.
        keys: peers' keys, joined by commas; ``plain`` and ``fsdp2`` must be among them.
        step: how AdamW's step runs, to measure that; ``None``: forward and backward.
        on_shards: whether those of our eager mode are stepped on by ``step_on_shards``.

    Returns:
        Rows by the peers' keys.
    """
    task = workload(num_units)
    setting = Setting(task, torch.device("cpu"))
    batch = task.batch_of(0, 0, setting.device)
    models = {peer.key: peer.train(setting).model for peer in named(keys.split(","))}
    for key in (FLOOR, REFERENCE):
        if key not in models:
            raise BadInputError(f"--peers: expected {key} among them, got {keys}")
    timers: dict[str, Callable[[], float]] = {
        key: _Timer(model, batch, task, step, on_shards and key == "ours")
        for key, model in models.items()
    }
    if step is not None and on_shards:
        timers[PARTS] = _parts_timer(models["ours"], timers["ours"], step)
    first = {key: timer() for key, timer in timers.items()}
    for _ in range(2):
        for timer in timers.values():
            timer()
    samples: dict[str, list[float]] = {key: [] for key in timers}
    for _ in range(rounds):
        for key, timer in timers.items():
            if step is not None:
                # torch finds an operator by a peer's specs faster where that peer ran it first.
                _clear_sharding_prop_cache()
                timer()
            samples[key].append(min(timer() for _ in range(2)))
    floors, references = samples[FLOOR], samples[REFERENCE]
    if step is not None:  # an unwrapped model updates eight times as much
        floors = [0.0] * rounds
    rows: dict[str, Row] = {}
    for key, seconds in samples.items():
        micros = [s / num_units * 1e6 for s in seconds]
        parts = [  # round by round, so that a drift of the machine cancels
            (own - floor) / (reference - floor)
            for own, floor, reference in zip(seconds, floors, references, strict=True)
        ]
        rows[key] = {
            "median_us": statistics.median(micros),
            "min_us": min(micros),
            "max_us": max(micros),
            "first_step_s": first[key],
            "of_fsdp2_eager": statistics.median(parts),
        }
    return rows


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=at_least(1), default=100)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--peers", default=KEYS, help="keys, joined by commas")
    parser.add_argument("--step", choices=("single", "foreach", "fused"))
    parser.add_argument("--on-shards", action="store_true", help="with --step: step_on_shards")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=WORLD)
    with one_line_on_bad_input():
        titles = {peer.key: peer.title for peer in named(options.peers.split(","))}
        titles[PARTS] = "plain tensors, as large as one rank's parts"
        rows = measure(
            options.units, options.rounds, options.peers, options.step, options.on_shards
        )
    header = ("host us per unit", "median", "min", "max", "of FSDP2 eager", "first step s")
    body = [
        (
            titles[key],
            *(f"{row[name]:.0f}" for name in ("median_us", "min_us", "max_us")),
            f"{row['of_fsdp2_eager']:.2f}",
            f"{row['first_step_s']:.1f}",
        )
        for key, row in rows.items()
    ]
    print(table(header, body))
    if options.json is not None:
        units = {"units": options.units, "rounds": options.rounds}
        write(options.json, record("host_overhead", **units, rows=rows, titles=titles))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
