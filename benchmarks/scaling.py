"""Scaling over N ranks on the simulated cluster, and the simulation's error on a real link.

    python benchmarks/scaling.py [--sizes 2,4,8] [--cluster ethernet] [--weak] [--json FILE]
    python benchmarks/scaling.py --validate COMPARISON.json [--json FILE]

The first runs every peer on a simulated cluster of each size: one process per size, as rank 0;
compute and host work are real, collectives take the time of the cluster's model. Strong scaling
divides a global batch over the ranks; ``--weak`` keeps the batch per rank.

The second repeats a comparison that was measured on a real link (``compare.py --link ...
--json``) on the simulated link of the same rate and prints predicted and measured times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster.simulation import (
    ClusterModel,
    ethernet_cluster,
    gpu_cluster,
    simulated_cluster,
    two_hosts,
)
from benchmarks.command_line import (
    DTYPES,
    BadInputError,
    at_least,
    numbers,
    one_line_on_bad_input,
    output_file,
)
from benchmarks.measure.comparison_report import rows
from benchmarks.measure.report import record, table, write
from benchmarks.measure.rounds import Comparison
from benchmarks.measure.step_profile import Collective
from benchmarks.peers import Setting, named
from benchmarks.workloads import catalogue

KEYS = "plain,fsdp2,simple_fsdp_aot_eager,ours,ours_graph_aot_eager"
CLUSTERS: dict[str, Callable[[int], ClusterModel]] = {
    "gpu": gpu_cluster,
    "ethernet": lambda world_size: ethernet_cluster(world_size, gbit_per_s=10.0),
    "ethernet_25g": lambda world_size: ethernet_cluster(world_size, gbit_per_s=25.0),
    "ethernet_400g": lambda world_size: ethernet_cluster(world_size, gbit_per_s=400.0),
    "slow_ethernet": lambda world_size: ethernet_cluster(world_size, gbit_per_s=1.0),
}
TIMEOUT_S = 1200


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=numbers, default=[2, 4, 8, 16])
    parser.add_argument("--cluster", choices=tuple(CLUSTERS), default="ethernet")
    parser.add_argument("--peers", default=KEYS)
    parser.add_argument("--decoder", default="29m")
    parser.add_argument(
        "--global_batch", type=at_least(1), default=16, help="sequences of all ranks"
    )
    parser.add_argument(
        "--batch_size", type=at_least(1), default=4, help="sequences per rank, with --weak"
    )
    parser.add_argument("--length", type=at_least(1), default=128)
    parser.add_argument("--weak", action="store_true", help="keep the batch per rank")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--validate", type=Path, help="a record of compare.py on a link")
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure_here(spec: dict[str, Any]) -> dict[str, Any]:
    """The peers on one simulated cluster, in this process.

    Args:
        spec: what ``simulate`` makes.

    Returns:
        The comparison's rows and the workload's name.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # The other ranks' shards are copies of this one's: with very many of them gradients vanish into
    # denormal numbers, which CPUs multiply some ten times slower. No real training has those.
    torch.set_flush_denormal(True)
    cluster = CLUSTERS[spec["cluster"]](spec["size"]) if spec["size"] else two_hosts(spec["gbit"])
    device = torch.device(spec["device"])
    sizes = (spec["batch_size"], spec["length"], spec.get("blocks"))
    task = catalogue.decoder(spec["decoder"], *sizes)
    with simulated_cluster(cluster, device) as group:
        comparison = Comparison(
            named(spec["peers"]), Setting(task, device, DTYPES[spec["dtype"]]), rank=0
        )
        comparison.start()
        comparison.run(spec["rounds"])
        exposed_ms = {}
        for key in comparison.trainees:
            group.reset_log()
            profile = comparison.profile_one(key)
            # The group's own log: its collectives do not pass the dispatcher, where profiles look.
            profile.collectives = [Collective(r.op, r.payload_bytes) for r in group.log]
            exposed_ms[key] = group.exposed_s() * 1e3
            comparison.samples[key].profile = profile
        made = rows(comparison, cluster)
    for row in made:
        row["exposed_ms"] = exposed_ms.get(row["key"])
    return {"workload": task.name, "rows": made}


def simulate(spec: dict[str, Any]) -> dict[str, Any]:
    """The same in a process of its own, on one core: no state of another cluster is left."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--one", json.dumps(spec), "--json", str(result)]
        environment = os.environ | {"LOCAL_RANK": "0"}  # DeepSpeed asks for it
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        if not result.exists():
            raise RuntimeError(f"simulated cluster {spec}: {done.stderr[-2000:]}")
        data: dict[str, Any] = json.loads(result.read_text())
        return data


def specification(options: argparse.Namespace, size: int) -> dict[str, Any]:
    """Specification of the measurement of one process."""
    batch = options.batch_size if options.weak else options.global_batch // size
    if batch < 1:
        raise BadInputError(
            f"--sizes: expected at most --global_batch ({options.global_batch}) ranks, got {size}; "
            "use --weak to keep the batch per rank"
        )
    return {
        "size": size,
        "cluster": options.cluster,
        "peers": [peer.key for peer in named(options.peers.split(","))],
        "decoder": options.decoder,
        "batch_size": batch,
        "length": options.length,
        "rounds": options.rounds,
        "device": options.device,
        "dtype": options.dtype,
    }


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """Every peer at every size."""
    specs = {size: specification(options, size) for size in options.sizes}
    by_size: dict[int, list[dict[str, Any]]] = {}
    for size, spec in specs.items():
        by_size[size] = simulate(spec)["rows"]
        print(f"{size} ranks done", flush=True)
    lines: list[dict[str, Any]] = []
    for index, first in enumerate(by_size[options.sizes[0]]):
        points = []
        for size in options.sizes:
            row = by_size[size][index]
            point = {"world_size": size, "reason": row["reason"]}
            if row["reason"] is None:
                point["step_ms"] = row["forward_backward_ms"]
                point["bound_ms"] = row.get("bound_ms", {}).get("total_ms")
                point["exposed_ms"] = row["exposed_ms"]
                point |= {name: row[name] for name in ("of_bound", "of_unscheduled") if name in row}
                point["batch_a_rank"] = specs[size]["batch_size"]
            points.append(point)
        lines.append({k: first[k] for k in ("key", "title", "ours")} | {"points": points})
    return {
        "cluster": options.cluster,
        "scaling": "weak" if options.weak else "strong",
        "workload": f"decoder {options.decoder}, "
        + (
            f"batch per rank {options.batch_size}"
            if options.weak
            else f"global batch {options.global_batch}"
        )
        + f" x {options.length}",
        "sizes": options.sizes,
        "rows": lines,
    }


def print_scaling(data: dict[str, Any]) -> None:
    """Medians by size; below each its bound, and the medians of the rounds' ratios."""
    body = []
    for row in data["rows"]:
        cells = [
            f"{p['step_ms']['median']:.0f}" if p["reason"] is None else "-" for p in row["points"]
        ]
        body.append((row["title"], *cells))
        if any(p.get("bound_ms") for p in row["points"]):
            bounds = [f"{p['bound_ms']:.0f}" if p.get("bound_ms") else "-" for p in row["points"]]
            body.append(("  its lower bound", *bounds))
        for name in ("of_bound", "of_unscheduled"):
            if any(name in p for p in row["points"]):
                ratios = [f"{p[name]['median']:.2f}" if name in p else "-" for p in row["points"]]
                body.append((f"  {name.replace('_', ' ')}", *ratios))
    print(f"{data['workload']}, {data['scaling']} scaling, cluster: {data['cluster']}")
    print(table(("fwd+bwd ms, by ranks", *map(str, data["sizes"])), body))


def validate(options: argparse.Namespace) -> dict[str, Any]:
    """Predicted against measured on the link of a record."""
    measured = json.loads(options.validate.read_text())
    rate = measured.get("link_bytes_per_s")
    decoder = measured.get("decoder")
    if measured.get("kind") != "comparison" or rate is None or decoder is None:
        raise BadInputError(
            "--validate: expected a record of 'compare.py --link RATE --decoder SIZE --json FILE', "
            f"got {options.validate}"
        )
    ran = {row["key"]: row for row in measured["rows"] if row["reason"] is None}
    spec = {
        "size": 0,
        "gbit": rate * 8 / 1e9,
        "peers": list(ran),
        **{name: decoder[name] for name in ("decoder", "blocks", "batch_size", "length")},
        "rounds": options.rounds,
        "device": "cpu",
        "dtype": "float32",
    }
    results = []
    for row in simulate(spec)["rows"]:
        if row["reason"] is not None:
            results.append({"title": row["title"], "reason": row["reason"]})
            continue
        real = ran[row["key"]]["forward_backward_ms"]["median"]
        predicted = row["forward_backward_ms"]["median"]
        results.append(
            {
                "key": row["key"],
                "title": row["title"],
                "reason": None,
                "measured_ms": real,
                "predicted_ms": predicted,
                "error": predicted / real - 1,
            }
        )
    return {"workload": measured["workload"], "link_bytes_per_s": rate, "rows": results}


def print_validation(data: dict[str, Any]) -> None:
    """Predicted, measured, error; and the error of what communication adds to the compute.

    The two were measured at different times: where the row without communication has drifted, the
    last column is the fairer one.
    """
    ran = [row for row in data["rows"] if row["reason"] is None]
    floor = next((row for row in ran if row["key"].startswith("plain")), None)
    body = []
    for row in ran:
        added = ""
        if floor is not None and row is not floor:
            added = f"{added_by_communication(row, floor):+.0%}"
        times = (f"{row['predicted_ms']:.0f}", f"{row['measured_ms']:.0f}")
        body.append((row["title"], *times, f"{row['error']:+.0%}", added))
    print(table(("fwd+bwd ms", "simulated", "real link", "error", "of what is added"), body))
    for row in data["rows"]:
        if row["reason"] is not None:
            print(f"{row['title']}: did not run: {row['reason']}")
    errors = [abs(r["error"]) for r in ran]
    print(f"median error {statistics.median(errors):.0%}, largest {max(errors):.0%}")


def added_by_communication(row: dict[str, Any], floor: dict[str, Any]) -> float:
    """Error of the time above the row without communication, each above its own."""
    predicted = row["predicted_ms"] - floor["predicted_ms"]
    measured: float = row["measured_ms"] - floor["measured_ms"]
    return predicted / measured - 1


def main() -> None:
    """The command line."""
    options = parse_arguments()
    with one_line_on_bad_input():
        if options.one is not None:
            options.json.write_text(json.dumps(measure_here(json.loads(options.one))))
            os._exit(0)  # Dynamo's and autograd's threads have nothing left to say
        named(options.peers.split(","))
        data = validate(options) if options.validate else scale(options)
    (print_validation if options.validate else print_scaling)(data)
    if options.json is not None:
        write(options.json, record("validation" if options.validate else "scaling", **data))


if __name__ == "__main__":
    main()
