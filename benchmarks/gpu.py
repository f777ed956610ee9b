"""The GPU set in parts: a JSON for each; a call runs those that fit into 8 minutes.

    python benchmarks/gpu.py [--folder benchmarks/results/gpu] [--decoder 1b] [--budget_s 460]
    python benchmarks/gpu.py --dry-run      # the same commands, small, on a CPU

First whether it is right (``gpu_checks.py``; once more under torch's CUDA sanitizer) and blocks the
host nowhere, with a profile of each mode, and what ranks get after faults (``gpu_faults.py``, two
NCCL ranks on the GPU); these parts run side by side. Then, one by one, speed and
memory (``gpu_speeds.py``): a Llama-style decoder in bf16 at world size 1 over NCCL (this project in
three modes, FSDP1, FSDP2 eager and compiled, SimpleFSDP), and behind simulated links of 50 and 250
GB/s with real GPU compute, where int8 collectives are among the peers.

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
from concurrent.futures import ThreadPoolExecutor
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


def checks(*, is_dry: bool) -> list[Part]:
    """Whether values are right, and the host is free."""
    device = ("--device", "cpu" if is_dry else "cuda")
    few = ("--modes", "eager,hooks,graph")
    compiled = ("--modes", "hooks_inductor,graph_inductor,graph_captured")
    dry = ("--cases", "bf16,checkpointing") if is_dry else ()
    some = ("--cases", "bf16,checkpointing" if is_dry else "fp32,bf16,offload,int8")
    faults = ("--modes", "eager", "--faults", "raise") if is_dry else ("--limit_s", "60")
    script = "gpu_checks.py"
    sanitizer = () if is_dry else (("TORCH_CUDA_SANITIZER", "1"),)
    return [
        Part("one", script, ("one", *device, *few, *dry), 20),
        Part("one_inductor", script, ("one", *device, *compiled, *dry), 20),
        Part("late", script, ("late", *device, *few, *some), 15),
        Part("steady", script, ("steady", *device, *few, *dry), 15),
        Part("two", script, ("two", *device, *few, *dry), 20),
        Part("sanitizer", script, ("sanitizer", *device, *few, *some), 15, sanitizer),
        Part("faults", "gpu_faults.py", (*device, *faults), 60),
        Part("traces", script, ("traces", *device, *few, "--cases", "bf16"), 20),
    ]


PEERS = {
    "eager": "plain,fsdp1,fsdp2,ours",
    "compiled": "fsdp2_inductor,ours_hooks_inductor",
    "graphs": "plain_inductor,simple_fsdp_inductor,ours_graph_inductor",
    "captured": "ours_graph_inductor,ours_graph_inductor_captured",
}
"""By part; all of one are compared with each other, too."""

LINKS_GB_S = (50, 250)
FEWER_BYTES = {"eager": ",ours_int8", "graphs": ",ours_graph_inductor_int8"}
"""Peers that behind a link are among those of a part, too."""


def speeds(decoder: str, batch: int, length: int, *, is_dry: bool) -> list[Part]:
    """In order of importance: what comes last is skipped first."""
    common = ("--decoder", decoder, "--batch_size", str(batch), "--length", str(length))
    common += ("--runs", "1") if is_dry else ("--device", "cuda", "--dtype", "bfloat16")
    least_s = {"eager": 30, "compiled": 60, "graphs": 90, "captured": 60}
    script = "gpu_speeds.py"
    parts = [
        Part(name, script, (*common, "--peers", peers), least_s[name])
        for name, peers in PEERS.items()
    ]
    for link in LINKS_GB_S:
        for name, peers in PEERS.items():
            chosen = peers + FEWER_BYTES.get(name, "")
            if is_dry:  # no second look at Inductor's code
                chosen = chosen.replace("plain_inductor,", "").replace("inductor", "aot_eager")
            arguments = (*common, "--link_gb_s", str(link), "--peers", chosen)
            parts.append(Part(f"{name}_{link}", script, arguments, least_s[name]))
    return parts


def run_part(part: Part, result: Path, left_s: float) -> dict[str, Any]:
    """The part's record, or why there is none or a part of it; prints when the part has ended."""
    if left_s < part.least_s:
        return {"skipped": f"needs {part.least_s:.0f} s, {left_s:.0f} s were left"}
    command = [sys.executable, str(HERE / part.script), *part.arguments, "--json", str(result)]
    result.unlink(missing_ok=True)
    process = subprocess.Popen(
        command,
        env={**os.environ, **dict(part.environment)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    data: dict[str, Any] = {}
    try:
        printed, _ = process.communicate(timeout=left_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        printed, _ = process.communicate()
        data["skipped"] = f"did not end within the {left_s:.0f} s that were left"
    print(f"\n=== {part.name}\n{printed}", flush=True)
    if result.exists():
        return {**json.loads(result.read_text()), "exit_code": process.returncode, **data}
    return {"skipped": f"failed with exit code {process.returncode}", **data}


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
    size = (options.decoder or ("small" if is_dry else "1b"), options.batch_size)
    length = options.length or (16 if is_dry else 1024)

    def run(part: Part) -> bool:
        """Whether it is right."""
        result = folder / f"{part.name}.json"
        if not is_done(result):
            found = run_part(part, result, deadline - time.monotonic())
            write(result, found if "command" in found else record("gpu", **found))
        return is_done(result) and json.loads(result.read_text()).get("exit_code") == 0

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as side_by_side:
        are_right = list(side_by_side.map(run, checks(is_dry=is_dry)))
    are_right += [run(part) for part in speeds(*size, length, is_dry=is_dry)]
    print(folder)
    raise SystemExit(int(not all(are_right)))


if __name__ == "__main__":
    main()
