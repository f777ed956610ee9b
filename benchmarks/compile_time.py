"""Seconds of the first step by depth, ours and peers'.

Each measurement is a process of its own with an empty Inductor cache, rank 0 of a fake process
group of 8 (collectives return at once), one thread, a decoder with 4, 8, 16, 32, 64 blocks. The
first step compiles forward and backward; the second shows the time without compilation. A second
process then starts with the cache that the first has filled (``warm_...``), and, where more numbers
of ranks are given, one with each of these (``ranks_16_...``).

    python benchmarks/compile_time.py [--depths 4,8] [--size small] [--peers KEYS] [--ranks 8,16]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import compilation_time_metrics, counters

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import numbers, one_line_on_bad_input, output_file
from benchmarks.measure.report import record, table, write
from benchmarks.peers import Setting, named
from benchmarks.workloads import catalogue

KEYS = "plain_inductor,fsdp2_inductor,simple_fsdp_inductor,ours_hooks_inductor,ours_graph_inductor"
TIMEOUT_S = 900
PHASES = {
    "trace": ("bytecode_tracing", "build_guards"),
    "joint graph": ("aot_collect_metadata", "aot_trace_joint_graph"),
    "partition": ("Partitioner", "min_cut_rematerialization_partition"),
    "Inductor": (
        "_recursive_joint_graph_passes",
        "_recursive_post_grad_passes",
        "GraphLowering.run",
        "GraphLowering.codegen",
    ),
    "wait for C++": ("async_compile.wait",),
}
"""Names in torch's own record of compile times."""
MARK = "compile_time: "


def measure_here(key: str, depth: int, size: str, num_ranks: int) -> dict[str, Any]:
    """First and second step of one peer in this process."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=num_ranks)
    task = catalogue.decoder(size, num_blocks=depth)
    device = torch.device("cpu")
    (peer,) = named([key])
    trainee = peer.train(Setting(task, device))
    seconds = []
    cpu_seconds = []
    for step in range(2):
        cpu_began = _cpu_seconds()
        began = time.perf_counter()
        trainee.backward(trainee.forward(task.batch_of(0, step, device)))
        trainee.update()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(_cpu_seconds() - cpu_began)
    dist.destroy_process_group()
    graphs = counters["stats"]["unique_graphs"]
    return {
        "first_step_s": seconds[0],
        "second_step_s": seconds[1],
        "first_step_cpu_s": cpu_seconds[0],
        "graphs": graphs,
        "phases_s": phases(seconds[0]),
    }


def phases(first_step_s: float) -> dict[str, float]:
    """Wall seconds of the first step by phase; ``rest`` is what no phase has."""
    found = {
        phase: sum(sum(compilation_time_metrics.get(name, ())) for name in names)
        for phase, names in PHASES.items()
    }
    return found | {"rest": first_step_s - sum(found.values())}


def _cpu_seconds() -> float:
    """User and system seconds of this process and of the compilers that it started."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, who))


def measure(key: str, depth: int, size: str, ranks: list[int]) -> dict[str, Any]:
    """In a process with an empty cache, then in some that find it filled."""
    later = {"warm": ranks[0], **{f"ranks_{num_ranks}": num_ranks for num_ranks in ranks[1:]}}
    with tempfile.TemporaryDirectory() as cache:
        result = _measure_with(cache, key, depth, size, ranks[0])
        if "reason" in result:
            return result
        for prefix, num_ranks in later.items():
            found = _measure_with(cache, key, depth, size, num_ranks)
            names = ("reason", "first_step_s", "first_step_cpu_s")
            result |= {f"{prefix}_{name}": found[name] for name in names if name in found}
    return result


def _measure_with(cache: str, key: str, depth: int, size: str, num_ranks: int) -> dict[str, Any]:
    """The same in a separate process with this cache; a failure gives its last line."""
    environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache)
    command = [sys.executable, __file__, "--one", key, "--depths", str(depth), "--size", size]
    command += ["--ranks", str(num_ranks)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"reason": f"took more than {TIMEOUT_S} s"}
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            result: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return result
    return {"reason": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}


def compile_times(
    keys: list[str], depths: list[int], size: str, ranks: list[int]
) -> dict[str, dict[str, Any]]:
    """Results by peer and depth, the peers interleaved."""
    results: dict[str, dict[str, Any]] = {key: {} for key in keys}
    for depth in depths:
        for key in keys:
            results[key][str(depth)] = measure(key, depth, size, ranks)
            print(f"{key}, {depth} blocks: {results[key][str(depth)]}", flush=True)
    return results


def _phase_rows(
    results: dict[str, dict[str, Any]], titles: dict[str, str]
) -> Iterator[tuple[str, ...]]:
    for key, by_depth in results.items():
        for depth in dict.fromkeys((next(iter(by_depth)), next(reversed(by_depth)))):
            if "phases_s" in by_depth[depth]:
                seconds = by_depth[depth]["phases_s"].values()
                yield f"{titles[key]}, {depth} blocks", *(f"{s:.1f}" for s in seconds)


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=numbers, default=[4, 8, 16, 32, 64])
    parser.add_argument("--size", default="small", choices=list(catalogue.DECODER_SIZES))
    parser.add_argument("--peers", default=KEYS)
    parser.add_argument("--ranks", type=numbers, default=[8], help="in the cache of the first")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with one_line_on_bad_input():
        depths = options.depths
        if options.one is not None:
            found = measure_here(options.one, depths[0], options.size, options.ranks[0])
            print(MARK + json.dumps(found))
            return
        peers = named(options.peers.split(","))
    results = compile_times([peer.key for peer in peers], depths, options.size, options.ranks)
    titles = {peer.key: peer.title for peer in peers}
    cells = [
        (titles[key], *(_cell(by_depth[str(depth)]) for depth in depths))
        for key, by_depth in results.items()
    ]
    print(table(("first step s (warm), by blocks", *map(str, depths)), cells))
    print(table(("first step s, by phase", *PHASES, "rest"), list(_phase_rows(results, titles))))
    if options.json is not None:
        write(
            options.json,
            record(
                "compile_time",
                depths=depths,
                size=options.size,
                ranks=options.ranks,
                rows=results,
                titles=titles,
            ),
        )


def _cell(result: dict[str, Any]) -> str:
    if "first_step_s" not in result:
        return str(result["reason"])
    warm = f" ({result['warm_first_step_s']:.1f})" if "warm_first_step_s" in result else ""
    return f"{result['first_step_s']:.1f}{warm}"


if __name__ == "__main__":
    main()
