"""Bytes between hosts of ``HIERARCHICAL_SHARD`` and ``FULL_SHARD``, as the hosts' interfaces count.

Two hosts of two ranks each, joined by a link (``link.py``: needs root, ``ip`` and ``tc``). Bytes
that the first host sends in an optimizer step with one backward, and in one with four, three of
them under ``no_sync()``; in eager and in graph mode. Headers, acknowledgements and barriers count.
A step of each kind runs before: it compiles, and makes connections.

    python benchmarks/hierarchy_bytes.py [--decoder small] [--modes eager,graph] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import link
from benchmarks.command_line import one_line_on_bad_input, output_file, some_of
from benchmarks.measure import ranks, wire
from benchmarks.measure.report import record, table, write
from benchmarks.workloads.catalogue import DECODER_SIZES, Workload, decoder
from fsdp_dynamo import FSDP, ShardingStrategy
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PER_HOST = 2
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD)
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True},
}
BACKWARDS = (1, 4)
"""Backwards of the steps that are measured."""


def left_host() -> int:
    """Bytes that this rank's host has sent over its interface; all ranks must call it."""
    dist.barrier()
    interface = os.environ[wire.INTERFACE_VARIABLE]
    shown = subprocess.run(  # /sys may be another namespace's
        ["ip", "-s", "-j", "link", "show", interface], capture_output=True, check=True
    )
    dist.barrier()
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def row_of(workload: Workload, strategy: ShardingStrategy, mode: str) -> dict[str, Any]:
    """Bytes of a host by the number of backwards of a step, and all losses of this rank."""
    mesh = None
    if strategy.is_hierarchical:
        mesh = init_device_mesh("cpu", (dist.get_world_size() // PER_HOST, PER_HOST))
    policy = ModuleWrapPolicy(set(workload.block_classes))
    model = FSDP(
        workload.seeded_model(),
        sharding_strategy=strategy,
        device_mesh=mesh,
        auto_wrap_policy=policy,
    )
    how = MODES[mode]
    run = model if how is None else torch.compile(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []

    def step(num_backwards: int) -> int:
        before = left_host()
        optimizer.zero_grad()
        for micro in range(num_backwards):
            batch = workload.batch_of(dist.get_rank(), micro, torch.device("cpu"))
            with model.no_sync() if micro + 1 < num_backwards else nullcontext():
                loss = workload.loss(run, batch)
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
        return left_host() - before

    for num_backwards in BACKWARDS:
        step(num_backwards)
    sent = {str(num_backwards): step(num_backwards) for num_backwards in BACKWARDS}
    return {"strategy": strategy.name, "mode": mode, "sent": sent, "losses": losses}


def measure(workload: Workload, modes: Iterable[str]) -> list[dict[str, Any]]:
    """A row for each mode and strategy, with its part of ``FULL_SHARD``'s bytes."""
    rows = []
    for mode in modes:
        pair = [row_of(workload, strategy, mode) for strategy in STRATEGIES]
        for row in pair:
            full = pair[0]["sent"]
            row["of_full_shard"] = {n: round(row["sent"][n] / full[n], 3) for n in full}
        rows += pair
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The table: MB that a host sends, and its part of ``FULL_SHARD``'s."""
    header = ["strategy", "mode", *(f"{n} backward{'s' * (n > 1)}, MB" for n in BACKWARDS)]
    header += [f"of FULL_SHARD, {n}" for n in BACKWARDS]
    body = [
        [
            row["strategy"],
            row["mode"],
            *(f"{row['sent'][str(n)] / 1e6:.2f}" for n in BACKWARDS),
            *(f"{row['of_full_shard'][str(n)]:.3f}" for n in BACKWARDS),
        ]
        for row in rows
    ]
    return table(header, body)


def main() -> None:
    """Print the table; write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--decoder", choices=list(DECODER_SIZES), default="29m")
    parser.add_argument("--modes", default=",".join(MODES), help="joined by commas")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    with one_line_on_bad_input():
        modes = some_of("--modes", options.modes, MODES)
        if not ranks.is_rank():
            code, _ = link.run_on_link(sys.argv, link.Shape(), PER_HOST)
            raise SystemExit(code)
        torch.set_num_threads(1)
        with ranks.process_group("cpu"):
            rows = measure(decoder(options.decoder), modes)
            if dist.get_rank() == 0:
                print(report(rows))
                if options.json is not None:
                    facts = {"decoder": options.decoder, "hosts": 2, "ranks_per_host": PER_HOST}
                    write(options.json, record("hierarchy bytes", **facts, rows=rows))


if __name__ == "__main__":
    main()
