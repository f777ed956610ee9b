"""The GPU set in parts: a JSON for each, under 8 minutes in all on one GPU.

    python benchmarks/gpu.py [--folder benchmarks/results/gpu] [--decoder 1b] [--budget_s 460]
    python benchmarks/gpu.py --dry-run      # the same commands, small, on a CPU

First whether it is right (``gpu_checks.py``; once more under torch's CUDA sanitizer) and blocks the
host nowhere, with a profile of each mode. Then its speed: a Llama-style decoder in bf16 at world
size 1 over NCCL (this project in three modes, FSDP1, FSDP2 eager and compiled, SimpleFSDP), and as
rank 0 of simulated clusters with real GPU compute. Peers are interleaved within a part; the parts
are small enough that all models of one fit in memory.

A part whose record is there is not run again, so that a call that ran out of time can be repeated;
a part that had no time, or left no record, has a JSON with the reason, and is run again. Needs no
package but torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
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
    """One process of the set, the least time that it needs, and its environment."""

    name: str
    script: str
    arguments: tuple[str, ...]
    least_s: float
    environment: tuple[tuple[str, str], ...] = ()


_SANITIZER = (("TORCH_CUDA_SANITIZER", "1"),)


def checks(*, is_dry: bool) -> list[Part]:
    """Whether values are right, and the host is free."""
    device = ("--device", "cpu" if is_dry else "cuda")
    few = ("--modes", "eager,hooks,graph")  # a dry run does without Inductor's start
    modes = (*few, "--cases", "bf16,checkpointing") if is_dry else ()
    script = "gpu_checks.py"
    some = (*few, "--cases", "fp32,bf16,offload")
    sanitized = ("one", *device, *some)
    return [
        Part("one", script, ("one", *device, *modes), 20),
        Part("late", script, ("late", *device, *(modes or some)), 15),
        Part("steady", script, ("steady", *device, *(modes or few)), 15),
        Part("two", script, ("two", *device, *(modes or few)), 20),
        Part("sanitizer", script, sanitized, 15, () if is_dry else _SANITIZER),
        Part("traces", script, ("traces", *device, *modes, "--cases", "bf16"), 20),
    ]


def speeds(decoder: str, batch: int, length: int, *, is_dry: bool) -> list[Part]:
    """In order of importance: what comes last is skipped first."""
    common = ("--decoder", decoder, "--batch_size", str(batch), "--length", str(length))
    if is_dry:
        small = (*common, "--rounds", "1", "--peers", "plain,fsdp2,ours")
        weak = ("--weak", "--cluster", "ethernet_25g", "--sizes", "8")
        return [
            Part("eager", "compare.py", (*small, "--world_size", "1"), 10),
            Part("cluster_64", "scaling.py", (*small, *weak), 10),
        ]
    gpu = ("--device", "cuda", "--dtype", "bfloat16")
    one = (*common, *gpu, "--world_size", "1", "--rounds", "20", "--peers")
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


def run_part(part: Part, result: Path, left_s: float) -> dict[str, Any]:
    """The part's record, or why there is none."""
    if left_s < part.least_s:
        return {"skipped": f"needs {part.least_s:.0f} s, {left_s:.0f} s were left"}
    command = [sys.executable, str(HERE / part.script), *part.arguments, "--json", str(result)]
    result.unlink(missing_ok=True)
    try:
        code = subprocess.run(
            command, timeout=left_s, env={**os.environ, **dict(part.environment)}
        ).returncode
    except subprocess.TimeoutExpired:
        return {"skipped": f"did not end within the {left_s:.0f} s that were left"}
    if not result.exists():
        return {"skipped": f"failed with exit code {code}"}
    data: dict[str, Any] = json.loads(result.read_text())
    return {**data, "exit_code": code}


def is_done(result: Path) -> bool:
    """Whether a part has a record, rather than a reason."""
    return result.exists() and "skipped" not in json.loads(result.read_text())


def main() -> None:
    """The command line; exit code 1 if a part failed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--decoder")
    parser.add_argument("--batch_size", type=at_least(1), default=4)
    parser.add_argument("--length", type=at_least(1))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--budget_s", type=at_least(1), default=460)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small models")
    options = parser.parse_args()
    is_dry = options.dry_run
    if not is_dry:
        with one_line_on_bad_input():
            ranks.check_device("cuda", 1)
    folder = options.folder or (Path("runs/gpu") if is_dry else HERE / "results" / "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    size = (options.decoder or ("29m" if is_dry else "1b"), options.batch_size)
    length = options.length or (16 if is_dry else 1024)
    failed = False
    for part in [*checks(is_dry=is_dry), *speeds(*size, length, is_dry=is_dry)]:
        result = folder / f"{part.name}.json"
        if not is_done(result):
            print(f"\n=== {part.name}", flush=True)
            found = run_part(part, result, deadline - time.monotonic())
            write(result, found if "skipped" not in found else record("gpu", **found))
        failed |= not is_done(result) or json.loads(result.read_text()).get("exit_code") != 0
    print(folder)
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
