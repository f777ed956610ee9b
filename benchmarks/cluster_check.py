"""Losses, tokens per second and memory of this project beside FSDP2, on the GPUs of a cluster.

    torchrun --nnodes 2 --nproc-per-node 8 ... benchmarks/cluster_check.py --decoder 1b

prints a table in the format of torchtitan's benchmark submissions. All peers train in the same
processes, one after the other, with the same weights and batches. Their losses must agree within
the rounding of the dtype; otherwise the exit code is 1. Without torchrun, ``--device cpu
--decoder small`` tries it on one machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input, output_file
from benchmarks.measure.rank_script import Training, slowest_ms
from benchmarks.measure.ranks import become_ranks, check_device, process_group, say
from benchmarks.measure.report import record, write
from benchmarks.measure.rounds import slowest, synchronize
from benchmarks.peers import Setting
from benchmarks.workloads.catalogue import DECODER_SIZES, decoder

PEERS = "fsdp2,fsdp2_inductor,ours,ours_hooks_inductor,ours_graph_inductor"
WARMUP = 3


def measured(key: str, setting: Setting, steps: int, tokens: int) -> dict[str, Any]:
    """One row: the peer's loss after the last step, tokens per second and GPU, and peak memory."""
    device = setting.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training = Training(key, setting)

    def step() -> None:
        training.train()
        synchronize(device)

    began = time.perf_counter()
    for _ in range(WARMUP):
        step()
    first_s = time.perf_counter() - began
    median_ms = statistics.median(slowest_ms(step) for _ in range(steps))
    batch = setting.workload.batch_of(dist.get_rank(), 0, device)
    loss = training.trainee.forward(batch).detach().float()
    dist.all_reduce(loss)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {
        "technique": training.title,
        "tokens_per_s": round(tokens / median_ms * 1e3),
        "memory_gib": round(slowest([float(peak)])[0] / 2**30, 2),
        "loss": round(loss.item() / dist.get_world_size(), 5),
        "warmup_s": round(first_s, 1),
    }


def report(rows: list[dict[str, Any]], what: str) -> str:
    """A table as torchtitan's submissions have it."""
    lines = [what, "", "| Techniques | TPS/GPU | Memory(GiB) | loss |", "|---|---|---|---|"]
    lines += [
        f"| {row['technique']} | {row['tokens_per_s']:,} | {row['memory_gib'] or '-'} "
        f"| {row['loss']} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table on rank 0 and compare losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default="29m")
    parser.add_argument("--batch", type=at_least(1), default=1, help="sequences per rank")
    parser.add_argument("--length", type=at_least(2), default=128, help="tokens per sequence")
    parser.add_argument("--steps", type=at_least(1), default=10)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--world_size", type=at_least(2), default=2, help="without torchrun")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    with one_line_on_bad_input():
        check_device(options.device, options.world_size)
    become_ranks(options.world_size)
    warnings.filterwarnings("ignore")
    dtype = torch.bfloat16 if options.dtype == "bfloat16" else None
    rows = []
    with one_line_on_bad_input(), process_group(options.device) as device:
        workload = decoder(options.decoder, options.batch, options.length)
        for key in options.peers.split(","):
            setting = Setting(workload, device, dtype)
            rows.append(measured(key, setting, options.steps, options.batch * options.length))
            say(f"{rows[-1]}")
            gc.collect()
        what = (
            f"{workload.name}, {dist.get_world_size()} ranks ({_name_of(device)}), "
            f"{options.dtype}, torch {torch.__version__}"
        )
        say(report(rows, what))
        if options.json is not None and dist.get_rank() == 0:
            write(options.json, record("cluster check", what=what, rows=rows))
    losses = [row["loss"] for row in rows]
    tolerance = 2e-2 if dtype is not None else 1e-4
    sys.exit(max(losses) - min(losses) > tolerance * max(map(abs, losses)))


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
