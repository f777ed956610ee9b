"""Step and exposed time on GPUs, computed from programs that were recorded on a CPU.

    python benchmarks/virtual_clock.py [--models 8b,70b] [--ranks 8,64,512] [--head] [--json FILE]

Each peer runs two steps of a decoder whose dimensions are 64 times too small, on a fake process
group of 8 ranks, with bf16 parameters and fp32 reductions; of the third one everything that it
enqueues is recorded (``benchmarks/streams``): operators, collectives, streams and events, in
torch's own ``fully_shard`` too. A clock with CUDA's rules then runs that program at the real sizes
and with the rates below. It knows no contention for memory or processors and no fusion; all peers
run the same kernels. What is compared is what waits for what. Units are the blocks and the rest of
the model; with ``--head``, the head is one more, as in torchtitan.

    python benchmarks/virtual_clock.py --calls

prints instead how often the host calls the device for a block, forward and backward: kernels on the
computing stream and beside it, collectives, events, waits for events, changes of the stream.

Rates: H100 SXM (data sheet: 989 TFLOP/s in bf16, of which 60 % are taken; 3.35 TB/s), NVLink
450 GB/s in each direction and eight 400 Gbit/s adapters a node, of each 80 %; a collective takes
20 us and 1 us a rank besides; the host 6 us a launch.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.distributed import fsdp as upstream
from torch.distributed.fsdp.wrap import CustomPolicy as UpstreamPolicy

from benchmarks.command_line import BadInputError, one_line_on_bad_input, output_file, some_of
from benchmarks.measure.report import record, write
from benchmarks.peers.simple_fsdp import shard_parameters
from benchmarks.streams.clock import Rates, Timeline, run
from benchmarks.streams.order import unordered
from benchmarks.streams.program import COMPUTING, Launch, Mark, Program, Record, Switch, Wait
from benchmarks.streams.recording import record_program
from benchmarks.workloads.decoder import Decoder, DecoderSizes
from fsdp_dynamo import FSDP, MixedPrecision
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.wrap_policy import CustomPolicy

SCALE, RECORDED_RANKS, TOKENS = 64, 8, 4096
MODELS = {
    "8b": DecoderSizes(4096, 32, 32, 128256, 14336, 8),
    "70b": DecoderSizes(8192, 80, 64, 128256, 28672, 8),
}
PEERS = ("fsdp1", "fsdp2", "simple_fsdp", "ours", "ours_hooks", "ours_graph")
TITLES = {
    "fsdp1": "FSDP1 eager",
    "fsdp2": "FSDP2 eager",
    "simple_fsdp": "SimpleFSDP, no passes",
    "ours": "fsdp_dynamo, eager",
    "ours_hooks": "fsdp_dynamo, hooks mode",
    "ours_graph": "fsdp_dynamo, graph mode",
}
STREAMS_IN_FORWARD = ("fsdp1", "fsdp2")
"""Peers that make their streams in their first forward, which is recorded for that."""
FREES_BY_ALLOCATOR = ("fsdp1",)
"""Peers that leave it to ``record_stream`` when memory is used again, which no event shows."""


def rates_of(num_ranks: int) -> Rates:
    """H100s, eight a node."""
    link = 0.8 * (450e9 if num_ranks <= 8 else 400e9)
    return Rates(0.6 * 989e12, 3.35e12, link, 20e-6 + 1e-6 * num_ranks, 6e-6, num_ranks, SCALE)


def _small(sizes: DecoderSizes) -> Decoder:
    """The model with all widths ``SCALE`` times smaller: heads are fewer and narrower."""
    torch.manual_seed(0)
    narrower = math.isqrt(SCALE)
    return Decoder(
        DecoderSizes(
            sizes.dim // SCALE,
            sizes.num_blocks,
            sizes.num_heads // narrower,
            sizes.vocabulary // SCALE,
            sizes.hidden_dim // SCALE,
            sizes.num_kv_heads // narrower,
        )
    )


def _wrapped(
    peer: str, model: Decoder, rates: Rates, has_head: bool
) -> tuple[nn.Module, Callable[..., Any]]:
    units: set[nn.Module] = {*model.blocks, *([model.head] if has_head else [])}
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    if peer == "fsdp1":
        sharded: nn.Module = upstream.FullyShardedDataParallel(
            model,
            auto_wrap_policy=UpstreamPolicy(units.__contains__),
            mixed_precision=upstream.MixedPrecision(**low),
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        return sharded, sharded
    if peer == "fsdp2":
        for unit in units:
            upstream.fully_shard(unit, mp_policy=upstream.MixedPrecisionPolicy(**low))
        sharded = upstream.fully_shard(model, mp_policy=upstream.MixedPrecisionPolicy(**low))
        return sharded, sharded
    if peer == "simple_fsdp":  # its gradients are reduced in the dtype of the parameters, float32
        shard_parameters(model, torch.device("cpu"), torch.bfloat16)
        return model, torch.compile(model, backend="aot_eager", fullgraph=True)
    sharded = FSDP(
        model,
        auto_wrap_policy=CustomPolicy(units.__contains__),
        mixed_precision=MixedPrecision(**low),
    )
    if peer == "ours_hooks":
        return sharded, torch.compile(sharded, backend="aot_eager")
    if peer == "ours_graph":
        options = _costs(rates)
        backend = "fsdp_dynamo_aot_eager"
        return sharded, torch.compile(sharded, fullgraph=True, backend=backend, options=options)
    return sharded, sharded


def _costs(rates: Rates) -> dict[str, dict[str, float]]:
    """What the plan of a graph is made for: the same times with the small model's numbers."""
    sent = (RECORDED_RANKS - 1) / RECORDED_RANKS * rates.num_ranks / (rates.num_ranks - 1)
    return {
        "device": {
            "flops_per_ms": rates.flops_per_s / SCALE**3 / 1e3,
            "bytes_per_ms": rates.memory_bytes_per_s / SCALE**2 / 1e3,
        },
        "link": {
            "latency_ms": rates.collective_s * 1e3,
            "bytes_per_ms": rates.link_bytes_per_s * sent / SCALE**2 / 1e3,
        },
    }


def program_of(peer: str, sizes: DecoderSizes, rates: Rates, has_head: bool = False) -> Program:
    """One steady step, forward and backward."""
    torch.compiler.reset()
    least = (collectives.DIRECT_BYTES["library"] or 0) // SCALE**2  # of a parameter at real sizes
    with mock.patch.dict(collectives.DIRECT_BYTES, library=least, point_to_point=least):
        sharded, call = _wrapped(peer, _small(sizes), rates, has_head)
    tokens = torch.randint(sizes.vocabulary // SCALE, (1, TOKENS // SCALE))

    def step(program: Program) -> None:
        logits = call(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        program.append(Mark("backward"))
        loss.backward()
        program.append(Mark("end"))
        sharded.zero_grad()

    if peer not in STREAMS_IN_FORWARD:
        step([])
    with record_program() as recorder:
        for _ in range(2):
            begin = len(recorder.program)
            step(recorder.program)
        end = len(recorder.program)
    faults = [] if peer in FREES_BY_ALLOCATOR else unordered(recorder.program)
    if faults:
        raise AssertionError(f"{peer}: {faults[0]}")
    return recorder.program[begin:end]


def _row(timeline: Timeline) -> list[str]:
    compute_s = timeline.busy_s["computing"]
    bound_s = max(compute_s, timeline.communication_s)
    return [
        f"{timeline.total_s * 1e3:.1f}",
        f"{timeline.exposed_s * 1e3:.2f}",
        f"{100 * timeline.exposed_s / timeline.total_s:.1f} %",
        f"{bound_s * 1e3:.1f} ({'compute' if compute_s == bound_s else 'communication'})",
    ]


def measure(models: list[str], ranks: list[int], has_head: bool) -> list[dict[str, Any]]:
    """A row for each peer, model and number of ranks."""
    rows = []
    for name in models:
        programs: dict[str, Program] = {}
        for num_ranks in ranks:
            rates = rates_of(num_ranks)
            for peer in PEERS:
                if peer not in programs or peer == "ours_graph":  # whose plan depends on rates
                    programs[peer] = program_of(peer, MODELS[name], rates, has_head)
                timeline = run(programs[peer], rates)
                rows.append(
                    {
                        "model": name,
                        "ranks": num_ranks,
                        "peer": peer,
                        "step_ms": timeline.total_s * 1e3,
                        "exposed_ms": timeline.exposed_s * 1e3,
                        "compute_ms": timeline.busy_s["computing"] * 1e3,
                        "communication_ms": timeline.communication_s * 1e3,
                    }
                )
                print(name, num_ranks, TITLES[peer], *_row(timeline), sep=" | ", flush=True)
    return rows


CALLS = ("kernels", "beside", "collectives", "events", "waits", "switches")


def _calls(program: Program) -> dict[str, Counter[str]]:
    """How often the host calls the device, by phase and kind of call."""
    phase, found = (
        "forward",
        {"forward": Counter[str](), "backward": Counter[str](), "end": Counter[str]()},
    )
    kinds = {Record: "events", Wait: "waits", Switch: "switches"}
    for step in program:
        if isinstance(step, Mark):
            phase = step.phase
        elif isinstance(step, Launch):
            beside = "kernels" if step.stream == COMPUTING else "beside"
            found[phase]["collectives" if step.group else beside] += 1
        elif type(step) in kinds:
            found[phase][kinds[type(step)]] += 1
    return found


def calls_per_block(peer: str) -> dict[str, dict[str, float]]:
    """Calls of the device for a block of 8B's, by phase and kind: what four more blocks add."""
    rates, sizes = rates_of(RECORDED_RANKS), MODELS["8b"]
    few, many = (
        _calls(program_of(peer, replace(sizes, num_blocks=number), rates)) for number in (4, 8)
    )
    return {
        phase: {kind: (many[phase][kind] - few[phase][kind]) / 4 for kind in CALLS}
        for phase in ("forward", "backward")
    }


def print_calls() -> list[dict[str, Any]]:
    """Print and return a row for each peer and phase."""
    rows = []
    print("peer", "phase", *CALLS, sep=" | ")
    for peer in PEERS:
        for phase, calls in calls_per_block(peer).items():
            rows.append({"peer": peer, "phase": phase, **calls})
            numbers = (f"{number:g}" for number in calls.values())
            print(TITLES[peer], phase, *numbers, sep=" | ", flush=True)
    return rows


def _num_ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise BadInputError(f"--ranks: expected numbers of 2 or more, got {text!r}")
    return int(text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default="8b,70b")
    parser.add_argument("--ranks", default="8,64,512")
    parser.add_argument("--head", action="store_true", help="as a unit of its own")
    parser.add_argument("--calls", action="store_true", help="count calls of the device instead")
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    with one_line_on_bad_input():
        models = some_of("--models", options.models, MODELS)
        ranks = [_num_ranks(one) for one in options.ranks.split(",")]
    dist.init_process_group("fake", rank=0, world_size=RECORDED_RANKS)
    rows = print_calls() if options.calls else measure(models, ranks, options.head)
    if options.json is not None:
        write(options.json, record("virtual_clock", rows=rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
