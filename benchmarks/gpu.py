"""The GPU set in one call: one JSON, under 8 minutes on one GPU.

    python benchmarks/gpu.py [--decoder 1b] [--json runs/gpu.json] [--budget_s 460]

A Llama-style decoder in bf16: at world size 1 over NCCL (this project in three modes, FSDP1, FSDP2
eager and compiled, SimpleFSDP), then as rank 0 of simulated clusters with real GPU compute. Peers
are interleaved within a part; the parts are small enough that all models of one fit in memory.
A part for which no time is left is recorded as skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input
from benchmarks.measure import ranks
from benchmarks.measure.report import record, write

HERE = Path(__file__).resolve().parent


class Part(NamedTuple):
    """One process of the set and the least time that it needs."""

    name: str
    script: str
    arguments: tuple[str, ...]
    least_s: float


def parts(decoder: str, batch: int, length: int) -> list[Part]:
    """In order of importance: what comes last is skipped first."""
    common = ("--decoder", decoder, "--batch_size", str(batch), "--length", str(length))
    gpu = ("--device", "cuda", "--dtype", "bfloat16")
    one = (*common, *gpu, "--world_size", "1", "--rounds", "7", "--peers")
    cluster = (*common, *gpu, "--weak", "--cluster", "gpu", "--rounds", "5")
    eager, compiled = "plain,fsdp1,fsdp2,ours", "fsdp2_inductor,ours_hooks_inductor"
    graphs = "plain_inductor,simple_fsdp_inductor,ours_graph_inductor"
    simulated = "plain,fsdp2,fsdp2_inductor,ours,ours_hooks_inductor"
    return [
        Part("eager", "compare.py", (*one, eager), 30),
        Part("compiled", "compare.py", (*one, compiled), 45),
        Part("cluster_64", "scaling.py", (*cluster, "--sizes", "64", "--peers", simulated), 60),
        Part("graphs", "compare.py", (*one, graphs), 90),
        Part(
            "cluster_graphs",
            "scaling.py",
            (*cluster, "--sizes", "64", "--peers", graphs),
            90,
        ),
    ]


def run_part(part: Part, left_s: float) -> dict[str, Any]:
    """The part's record, or why there is none."""
    if left_s < part.least_s:
        return {"skipped": f"needs {part.least_s:.0f} s, {left_s:.0f} s were left"}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "record.json"
        command = [sys.executable, str(HERE / part.script), *part.arguments, "--json", str(result)]
        try:
            code = subprocess.run(command, timeout=left_s).returncode
        except subprocess.TimeoutExpired:
            return {"skipped": f"did not end within the {left_s:.0f} s that were left"}
        if not result.exists():
            return {"skipped": f"failed with exit code {code}"}
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder", default="1b")
    parser.add_argument("--batch_size", type=at_least(1), default=4)
    parser.add_argument("--length", type=at_least(1), default=1024)
    parser.add_argument("--json", type=Path, default=Path("runs/gpu.json"))
    parser.add_argument("--budget_s", type=at_least(1), default=460)
    options = parser.parse_args()
    with one_line_on_bad_input():
        ranks.check_device("cuda", 1)
    deadline = time.monotonic() + options.budget_s
    results: dict[str, Any] = {}
    for part in parts(options.decoder, options.batch_size, options.length):
        print(f"\n=== {part.name}", flush=True)
        results[part.name] = run_part(part, deadline - time.monotonic())
        write(options.json, record("gpu", parts=results))  # what is done is kept
    print(options.json)


if __name__ == "__main__":
    main()
