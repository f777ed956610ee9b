"""Peers in one run: the same model, seeds, data and optimizer, rounds interleaved.

    python benchmarks/compare.py [--peers ours,fsdp2,ddp] [--link 1gbit] [--rounds 5] [--json FILE]

All peers are built in the same processes. In each round every peer runs one step on the same batch,
which all ranks start together. The table shows median, minimum and maximum of forward + backward,
ratios by round, a lower bound, bytes sent, peak memory and losses, and the reason if a peer cannot
run. The exit code is 1 if a peer's losses differ from the reference's.

``--link RATE`` joins two ranks by a link of that rate (needs root, see ``link.py``); without it
ranks communicate over the loopback.
"""

from __future__ import annotations

import argparse
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import link
from benchmarks.command_line import (
    DTYPES,
    BadInputError,
    at_least,
    one_line_on_bad_input,
    output_file,
)
from benchmarks.measure import ranks, wire
from benchmarks.measure.comparison_report import comparison_table, memory_table, rows
from benchmarks.measure.report import record, write
from benchmarks.measure.rounds import Comparison
from benchmarks.peers import Peer, Setting, all_peers, named
from benchmarks.workloads import catalogue


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", help="keys, joined by commas (default: all)")
    parser.add_argument("--list", action="store_true", help="show the peers' keys and leave")
    parser.add_argument("--decoder", default="29m", help="size of the reference decoder")
    parser.add_argument("--blocks", type=at_least(1), help="instead of the size's own number")
    parser.add_argument("--torchbench_model", help="a model of transformers instead")
    parser.add_argument("--model_size", choices=("real", "small"), default="real")
    parser.add_argument("--batch_size", type=at_least(1), default=4, help="sequences per rank")
    parser.add_argument("--length", type=at_least(1), default=128, help="tokens per sequence")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="timed steps per peer")
    parser.add_argument("--world_size", type=at_least(1), default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--link", metavar="RATE", help="join two ranks by a link, e.g. 1gbit")
    parser.add_argument("--json", type=output_file, help="write the record there")
    return parser.parse_args()


def workload_of(options: argparse.Namespace) -> catalogue.Workload:
    """The task that the command line names."""
    sizes = (options.batch_size, options.length)
    small = options.model_size == "small"
    if options.torchbench_model is not None:
        if options.blocks is not None:
            raise BadInputError("--blocks: expected a decoder, not --torchbench_model")
        return catalogue.hugging_face(options.torchbench_model, *sizes, small=small)
    return catalogue.decoder(options.decoder, *sizes, num_blocks=options.blocks, small=small)


def decoder_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that reproduce the decoder."""
    names = ("decoder", "blocks", "batch_size", "length")
    return {name: getattr(options, name) for name in names}


def run_rank(options: argparse.Namespace) -> int:
    """Run one rank; returns the exit code."""
    warnings.filterwarnings("ignore")
    chosen = named(options.peers.split(",") if options.peers else list(all_peers()))
    if options.device == "cpu":
        torch.set_num_threads(1)
    with ranks.process_group(options.device) as device:
        return _run(options, chosen, device)


def _run(options: argparse.Namespace, chosen: list[Peer], device: torch.device) -> int:
    """Steps of the peers and what is told of them; the exit code. No model is left."""
    setting = Setting(workload_of(options), device, DTYPES[options.dtype])
    rank = dist.get_rank()
    comparison = Comparison(chosen, setting, rank)
    comparison.start(say=ranks.say)
    comparison.run(options.rounds, say=ranks.say)
    comparison.profile()
    made = rows(comparison)
    ranks.say(f"\n{setting.workload.name}; {dist.get_world_size()} ranks\n{comparison_table(made)}")
    ranks.say(f"\n{memory_table(made)}")
    if rank == 0 and options.json is not None:
        results = record(
            "comparison",
            workload=setting.workload.name,
            world_size=dist.get_world_size(),
            decoder=None if options.torchbench_model else decoder_arguments(options),
            link_bytes_per_s=wire.link_bytes_per_s(),
            rounds=options.rounds,
            rows=made,
        )
        write(options.json, results)
    return 0 if all(row.get("loss_agrees", True) for row in made) else 1


def main() -> None:
    """Start ranks, or run as one."""
    options = parse_arguments()
    if options.list:
        print("\n".join(f"{key:22} {peer.title}" for key, peer in all_peers().items()))
        return
    with one_line_on_bad_input():
        named(options.peers.split(",") if options.peers else [])
        workload_of(options)
        if ranks.is_rank():
            raise SystemExit(run_rank(options))
        if options.link is not None:
            if options.world_size != 2 or options.device != "cpu":
                raise BadInputError("--link: expected 2 ranks on CPUs: it joins two hosts of one")
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            code, _ = link.run_on_link(sys.argv, link.Shape(options.link))
            raise SystemExit(code)
        ranks.check_device(options.device, options.world_size)
        ranks.become_ranks(options.world_size)


if __name__ == "__main__":
    main()
