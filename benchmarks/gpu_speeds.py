"""Speed and memory of peers on one device, each alone: steps without a synchronisation between.

    python benchmarks/gpu_speeds.py [--device cuda] [--peers ours,fsdp2] [--steps 20] [--json FILE]
    python benchmarks/gpu_speeds.py --link_gb_s 50 ...

The first is one rank (NCCL on CUDA). With ``--link_gb_s`` it is rank 0 of ``--ranks`` simulated
ones, one on each node, whose collectives take the time of that rate (``cluster.link``).

Every peer is built, warmed up, run and dropped before the next, so that the allocator's counters
are its own. A run is ``--steps`` steps that the host enqueues as fast as it can, timed as a whole
with one synchronisation at its end; batches are on the device before it begins, and losses are read
after it. The exit code is 1 if a peer failed, or, without a link, if losses differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster.model import MAX_WORLD_SIZE, ClusterModel, LinkModel
from benchmarks.cluster.process_group import SimulatedGroup
from benchmarks.cluster.simulation import simulated_cluster
from benchmarks.command_line import (
    DTYPES,
    BadInputError,
    at_least,
    one_line_on_bad_input,
    output_file,
)
from benchmarks.measure import ranks
from benchmarks.measure.comparison_report import compare_losses
from benchmarks.measure.report import record, table, write
from benchmarks.measure.rounds import attempt, spread, synchronize
from benchmarks.peers import Peer, Setting, Trainee, named
from benchmarks.workloads import catalogue

WARM_UP = 2
_COUNTERS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "retries": "num_alloc_retries",
}
"""Names in records, and in ``torch.cuda.memory_stats``."""

Row = dict[str, Any]


def flat_link(num_ranks: int, gb_per_s: float) -> ClusterModel:
    """A cluster of one rank per node: every rank sends at this rate, in 1e9 bytes a second."""
    link = LinkModel(latency_s=5e-6, bytes_per_s=gb_per_s * 1e9)
    return ClusterModel(num_ranks, 1, intra=link, inter=link, collectives="ring")


class Memory:
    """The allocator's counters of a device; there are none of CPUs.

    Args:
        device: peaks and counts begin now.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retries = 0
        if device.type != "cpu":
            torch.cuda.reset_peak_memory_stats(device)
            self._retries = torch.cuda.memory_stats(device)[_COUNTERS["retries"]]

    def read(self) -> dict[str, int]:
        """Peaks of allocated and reserved bytes, and how often the allocator freed its cache and
        tried again."""
        if self._device.type == "cpu":
            return {}
        stats = torch.cuda.memory_stats(self._device)
        found = {name: stats[key] for name, key in _COUNTERS.items()}
        return found | {"retries": found["retries"] - self._retries}


def run_steps(trainee: Trainee, setting: Setting, first: int, num_steps: int) -> Row:
    """Steps in a row, which nothing but their end waits for.

    Args:
        first: number of the first; gives its batch.

    Returns:
        Milliseconds a step, losses, and the allocator's counters.
    """
    device = setting.device
    batches = [setting.workload.batch_of(0, first + n, device) for n in range(num_steps)]
    losses = []
    memory = Memory(device)
    synchronize(device)
    began = time.perf_counter()
    for batch in batches:
        loss = trainee.forward(batch)
        trainee.backward(loss)
        trainee.update()
        losses.append(loss.detach())
    synchronize(device)
    step_ms = (time.perf_counter() - began) * 1e3 / num_steps
    return {"step_ms": step_ms, "losses": [float(one) for one in losses], **memory.read()}


def exposed_ms(trainee: Trainee, setting: Setting) -> float | None:
    """Milliseconds of one step in which waits for the simulated link blocked; ``None`` without."""
    group = dist.group.WORLD
    if not isinstance(group, SimulatedGroup):
        return None
    synchronize(setting.device)
    group.reset_log()
    trainee.train_step(setting.workload.batch_of(0, 0, setting.device))
    synchronize(setting.device)
    exposed = group.exposed_s() * 1e3
    group.reset_log()
    return exposed


def measured(peer: Peer, setting: Setting, num_steps: int, num_runs: int) -> Row:
    """A peer's row; its memory is without what peers before it have left (FSDP1: two models)."""
    row: Row = {"key": peer.key, "title": peer.title, "communicates": peer.communicates}
    left = _in_use(setting.device)
    try:
        row["reason"] = peer.why_not(setting) or attempt(
            lambda: row.update(_runs(peer.train(setting), setting, num_steps, num_runs))
        )
    finally:
        torch.compiler.reset()
        gc.collect()
        if setting.device.type != "cpu":
            torch.cuda.empty_cache()
    for name, num_bytes in left.items():
        if name in row:
            row[name] -= num_bytes
    return row


def _in_use(device: torch.device) -> dict[str, int]:
    """Bytes that the allocator has given out, and those that it has from the device."""
    if device.type == "cpu":
        return {}
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def _runs(trainee: Trainee, setting: Setting, num_steps: int, num_runs: int) -> Row:
    began = time.perf_counter()
    run_steps(trainee, setting, 0, WARM_UP)
    warm_up_s = time.perf_counter() - began
    runs = [run_steps(trainee, setting, n * num_steps, num_steps) for n in range(num_runs)]
    step_ms = spread([run["step_ms"] for run in runs])
    num_tokens = setting.workload.batch_of(0, 0, torch.device("cpu"))["tokens"][:, 1:].numel()
    return {
        "warm_up_s": warm_up_s,
        "step_ms": step_ms,
        "tokens_per_s": num_tokens / step_ms["median"] * 1e3,
        "losses": [loss for run in runs for loss in run["losses"]],
        "exposed_ms": exposed_ms(trainee, setting),
        **{name: max(run[name] for run in runs) for name in _COUNTERS if name in runs[0]},
    }


def speed_table(rows: list[Row]) -> str:
    """Table of the rows, followed by the reasons of peers that did not run."""
    header = ("peer", "step ms", "tokens/s", "exposed ms", "allocated MB", "reserved MB", "retries")
    ran = [row for row in rows if row["reason"] is None]
    body = [
        (
            row["title"],
            f"{row['step_ms']['median']:.1f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['exposed_ms']:.1f}" if row["exposed_ms"] is not None else "",
            *(f"{row[k] / 1e6:.0f}" if k in row else "" for k in list(_COUNTERS)[:2]),
            str(row.get("retries", "")),
        )
        for row in ran
    ]
    failed = [f"{row['title']}: did not run: {row['reason']}" for row in rows if row["reason"]]
    return "\n".join([table(header, body), *failed])


@contextmanager
def _one_rank(options: argparse.Namespace) -> Iterator[torch.device]:
    """The process group, real or simulated."""
    if options.link_gb_s is None:
        with ranks.process_group(options.device) as device:
            yield device
        return
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    # Of very many copies of one shard gradients vanish into denormal numbers (see scaling.py).
    torch.set_flush_denormal(True)
    with simulated_cluster(flat_link(options.ranks, options.link_gb_s), device):
        yield device


def run_rank(options: argparse.Namespace) -> int:
    """Measure all peers; returns the exit code."""
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    task = catalogue.decoder(options.decoder, options.batch_size, options.length)
    rows: list[Row] = []
    with _one_rank(options) as device:
        setting = Setting(task, device, DTYPES[options.dtype])
        for peer in named(options.peers.split(",")):
            rows.append(measured(peer, setting, options.steps, options.runs))
            print(f"{peer.title}: {rows[-1]['reason'] or rows[-1]['step_ms']}", flush=True)
    ran = {row["key"]: row for row in rows if row["reason"] is None}
    if options.link_gb_s is None:  # behind a simulated one ranks hold copies of this one's shards
        compare_losses(ran, low_precision=setting.param_dtype is not None)
    print(f"\n{task.name}\n{speed_table(rows)}", flush=True)
    facts = {"link_gb_s": options.link_gb_s, "steps": options.steps, "runs": options.runs}
    write(options.json, record("gpu_speeds", workload=task.name, **facts, rows=rows))
    is_right = all(row.get("loss_agrees", True) for row in rows)
    return 0 if is_right and len(ran) == len(rows) else 1


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", default="plain,fsdp2,ours")
    parser.add_argument("--decoder", default="29m")
    parser.add_argument("--batch_size", type=at_least(1), default=4)
    parser.add_argument("--length", type=at_least(1), default=128)
    parser.add_argument("--steps", type=at_least(1), default=20, help="of a run")
    parser.add_argument("--runs", type=at_least(1), default=3)
    parser.add_argument("--link_gb_s", type=at_least(1), help="a simulated link, in 1e9 bytes/s")
    parser.add_argument("--ranks", type=at_least(2), default=64, help="on the simulated link")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--json", type=output_file, default=Path("runs/gpu_speeds.json"))
    return parser.parse_args()


def main() -> None:
    """Start the rank, or be it."""
    options = parse_arguments()
    with one_line_on_bad_input():
        named(options.peers.split(","))
        if options.ranks > MAX_WORLD_SIZE:
            raise BadInputError(f"--ranks: expected at most {MAX_WORLD_SIZE}, got {options.ranks}")
        ranks.check_device(options.device, 1)
        if options.link_gb_s is None:
            ranks.become_ranks(1)
        raise SystemExit(run_rank(options))


if __name__ == "__main__":
    main()
