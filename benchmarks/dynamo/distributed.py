"""Dynamo's distributed benchmark: one model, one mode, one backend.

    python benchmarks/dynamo/distributed.py --torchbench_model hf_Bert --fsdp --dynamo aot_eager \\
        --fsdp_wrap --device cpu --world_size 2

It starts its own ranks unless torchrun has. ``--fsdp`` is this project's wrapper, ``--fsdp1`` and
``--fsdp2`` are torch's. ``--dynamo fsdp_dynamo`` (or ``fsdp_dynamo_aot_eager``) selects graph
mode, any other backend hooks mode. Models are built from configurations with random weights.
To compare several modes in one run use ``benchmarks/compare.py``.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.command_line import (
    DTYPES,
    BadInputError,
    at_least,
    one_line_on_bad_input,
    output_file,
)
from benchmarks.dynamo import extras
from benchmarks.measure import ranks
from benchmarks.measure.comparison_report import comparison_table, memory_table, rows
from benchmarks.measure.report import record, write
from benchmarks.measure.rounds import Comparison
from benchmarks.peers import FAMILIES, Peer, Setting
from benchmarks.workloads import catalogue


def parse_arguments() -> argparse.Namespace:
    """The command line; leaves with a message and code 2 where it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--torchbench_model", help="a model of transformers, e.g. hf_Bert, hf_T5")
    model.add_argument("--toy_model", action="store_true", help="three MyModules 10-10000-1000-5")
    model.add_argument("--decoder", help="size of the reference decoder, e.g. 29m, 1b")
    peer = parser.add_mutually_exclusive_group()
    for family in FAMILIES:
        if family != "plain":
            peer.add_argument(f"--{family}", dest="family", action="store_const", const=family)
    parser.set_defaults(family="plain")
    parser.add_argument("--fsdp_wrap", action="store_true", help="one unit per block")
    parser.add_argument("--fsdp_checkpoint", action="store_true", help="checkpoint activations")
    parser.add_argument("--dynamo", metavar="BACKEND", help="compile with this Dynamo backend")
    parser.add_argument("--dynamo_no_optimize_ddp", action="store_true")
    parser.add_argument("--model_size", choices=("real", "small"), default="real")
    parser.add_argument("--batch_size", type=at_least(1), help="a rank (default: the model's own)")
    parser.add_argument("--sequence_length", type=at_least(1), help="default: 128 tokens")
    parser.add_argument("--repeat", type=at_least(1), default=10, help="timed steps")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    accelerated = torch.cuda.is_available()
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if accelerated else "cpu"
    )
    parser.add_argument("--world_size", type=at_least(1), default=2, help="ranks to start")
    parser.add_argument("--profile", action="store_true", help="write a Chrome/Perfetto trace")
    parser.add_argument("--trace_file", type=output_file, default=Path("runs/trace.json"))
    parser.add_argument("--torchviz", action="store_true", help="draw the autograd graph")
    parser.add_argument("--torchviz_file", type=output_file, default=Path("runs/torchviz.dot"))
    parser.add_argument("--gpu_memory_stats", action="store_true", help="torch.cuda's own summary")
    parser.add_argument("--verbose", action="store_true", help="losses, graph breaks, event order")
    parser.add_argument("--json", type=output_file, help="write the record there")
    return parser.parse_args()


def workload_of(options: argparse.Namespace) -> catalogue.Workload:
    """The task that the command line names."""
    small = options.model_size == "small"
    if options.toy_model:
        return catalogue.toy(options.batch_size or 20, small)
    sizes = (options.batch_size or 4, options.sequence_length or 128)
    if options.decoder is not None:
        return catalogue.decoder(options.decoder, *sizes, small=small)
    return catalogue.hugging_face(options.torchbench_model, *sizes, small=small)


def check(options: argparse.Namespace) -> Peer:
    """Refuse what cannot work, before any rank is started."""
    if options.dynamo is not None:
        extras.check_backend(options.dynamo)
    _require_effects(options)
    ranks.check_device(options.device, options.world_size)
    if options.gpu_memory_stats and options.device != "cuda":
        raise BadInputError(
            "--gpu_memory_stats: expected --device cuda, got cpu; peak bytes by category are "
            "printed for every device"
        )
    if options.torchviz:
        extras.check_torchviz()
    peer = FAMILIES[options.family](options.dynamo)
    reason = peer.why_not(Setting(workload_of(options), torch.device(options.device)))
    if reason is not None:
        raise BadInputError(f"--{options.family}: {reason}")
    return peer


def _require_effects(options: argparse.Namespace) -> None:
    """Refuse flags that would change nothing."""
    if options.toy_model and options.sequence_length is not None:
        raise BadInputError("--sequence_length: the inputs of --toy_model are no sequences")
    if options.dynamo_no_optimize_ddp and (options.family != "ddp" or options.dynamo is None):
        raise BadInputError("--dynamo_no_optimize_ddp: expected --ddp and --dynamo BACKEND")


def run_rank(options: argparse.Namespace, peer: Peer) -> int:
    """One rank's part; the exit code."""
    warnings.filterwarnings("ignore")
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.dynamo_no_optimize_ddp:
        torch._dynamo.config.optimize_ddp = False
    with ranks.process_group(options.device) as device:
        return _run(options, peer, device)


def _run(options: argparse.Namespace, peer: Peer, device: torch.device) -> int:
    """The peer's steps and what is told of them; the exit code. No model is left."""
    rank = dist.get_rank()
    extras.count_recompiles()
    if options.verbose and rank == 0:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
    setting = Setting(
        workload_of(options),
        device,
        DTYPES[options.dtype],
        options.fsdp_wrap,
        options.fsdp_checkpoint,
    )
    comparison = Comparison([peer], setting, rank)
    comparison.start(say=ranks.say)
    samples = comparison.samples[peer.key]
    if samples.reason is not None:
        return 1
    comparison.run(options.repeat)
    comparison.profile()
    _report(options, comparison)
    _extras(options, comparison, peer)
    return 0


def _extras(options: argparse.Namespace, comparison: Comparison, peer: Peer) -> None:
    """Requested output besides times; all ranks take part in its steps."""

    def step() -> None:
        comparison.step(peer.key, timed=False)

    rank_0 = dist.get_rank() == 0
    if options.verbose:
        losses = comparison.samples[peer.key].losses
        ranks.say("losses of rank 0: " + " ".join(f"{loss:.6f}" for loss in losses))
        if peer.ours:
            ranks.say("order of issue in one step:\n" + extras.event_order(step))
    if options.profile:
        extras.write_trace(step, options.trace_file if rank_0 else None)
        ranks.say(f"trace: {options.trace_file} (open it in Perfetto or chrome://tracing)")
    if options.torchviz:
        trainee = comparison.trainees[peer.key]
        batch = comparison.setting.workload.batch_of(dist.get_rank(), 0, comparison.setting.device)
        loss = trainee.forward(batch)
        if rank_0:
            ranks.say(f"autograd graph: {extras.draw(loss, trainee.model, options.torchviz_file)}")
        trainee.backward(loss)
        trainee.update()
    if options.gpu_memory_stats:
        ranks.say(torch.cuda.memory_summary())


def _report(options: argparse.Namespace, comparison: Comparison) -> None:
    made = rows(comparison)
    graphs = extras.dynamo_counts()
    name, world_size = comparison.setting.workload.name, dist.get_world_size()
    ranks.say(f"\n{name}; {world_size} ranks\n{comparison_table(made)}")
    ranks.say(f"\n{memory_table(made)}\n")
    ranks.say(f"{_counted(made[0]['collectives']) or 'no collectives'} a step")
    ranks.say(_counted(graphs))
    if options.json is not None and dist.get_rank() == 0:
        arguments: dict[str, Any] = {"workload": name, "world_size": world_size}
        write(options.json, record("distributed", **arguments, dynamo=graphs, rows=made))


def _counted(counts: dict[str, int]) -> str:
    """Counts by noun, as text."""
    nouns = [(count, noun.removesuffix("s")) for noun, count in counts.items()]
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in nouns)


def main() -> None:
    """Start ranks, or be one."""
    options = parse_arguments()
    with one_line_on_bad_input():
        peer = check(options)
        ranks.become_ranks(options.world_size)
        raise SystemExit(run_rank(options, peer))


if __name__ == "__main__":
    main()
