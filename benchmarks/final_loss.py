"""Final loss of the demo's model for each format in which shards may travel, beside fp32.

Two ranks train a small language model on text, in eager mode with AdamW, from the same values and
on the same windows for each format; a seed changes both. The final loss is the mean over ranks and
over the last tenth of the steps, in nats a byte.

    python benchmarks/final_loss.py [--formats none,int8,...] [--seeds 3]
        [--fp32-seeds 10] [--steps 2000] [--json FILE]

The spread of fp32's losses is what a format's are judged by, so fp32 has more seeds than they.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
import torch.distributed as dist

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input, output_file, some_of
from benchmarks.measure import ranks
from benchmarks.measure.report import record, table, write
from examples.demo.data import TextBatches
from examples.demo.model import Block, Decoder
from fsdp_dynamo import FSDP, CollectivePrecision
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM, BLOCKS, BATCH, LENGTH, TEXT_BYTES, RATE = 128, 4, 8, 64, 4_000_000, 3e-3
FORMATS: dict[str, CollectivePrecision | None] = {
    "none": None,
    **{name: CollectivePrecision(name, name) for name in ("bfloat16", "float8", "int8")},
    "int4_reductions": CollectivePrecision(reduce_scatter="int4"),
    "int8_gathers_int4_reductions": CollectivePrecision("int8", "int4"),
    "int8_blocks_of_256": CollectivePrecision("int8", "int8", block_numel=256),
    "int8_gathers_blocks_of_256": CollectivePrecision(all_gather="int8", block_numel=256),
    "int8_reductions_blocks_of_256": CollectivePrecision(reduce_scatter="int8", block_numel=256),
}


def final_loss(precision: CollectivePrecision | None, seed: int, steps: int) -> float:
    """Train from scratch; the mean loss of the last tenth of the steps."""
    torch.manual_seed(seed)
    model = FSDP(
        Decoder(DIM, BLOCKS, LENGTH),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        collective_precision=precision,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, RATE / 10)
    batches = TextBatches(dist.get_rank(), dist.get_world_size(), TEXT_BYTES, BATCH, LENGTH, seed)
    last = []
    for step in range(steps):
        inputs, targets = batches.draw()
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        if step >= steps - max(1, steps // 10):
            last.append(loss.detach())
    mean = torch.stack(last).mean()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()


def main() -> None:
    """Print a row for each format; write all losses as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(FORMATS), help="joined by commas")
    parser.add_argument("--seeds", type=at_least(1), default=3, help="of each format")
    parser.add_argument("--fp32-seeds", type=at_least(1), default=10, help="of the format none")
    parser.add_argument("--steps", type=at_least(10), default=2000)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    with one_line_on_bad_input():
        names = some_of("--formats", options.formats, FORMATS)
        ranks.become_ranks(2)
    losses: dict[str, list[float]] = {name: [] for name in names}
    with ranks.process_group("cpu"):
        torch.set_num_threads(1)
        for name in names:
            for seed in range(options.fp32_seeds if name == "none" else options.seeds):
                losses[name].append(final_loss(FORMATS[name], seed, options.steps))
                if dist.get_rank() == 0:
                    print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
        if dist.get_rank() != 0:
            return
    header = ("format", "median", "min", "max")
    body = [
        (name, *(f"{pick(found):.4f}" for pick in (statistics.median, min, max)))
        for name, found in losses.items()
    ]
    print(table(header, body))
    if options.json is not None:
        settings = {"steps": options.steps, "dim": DIM, "blocks": BLOCKS, "world_size": 2}
        write(options.json, record("final_loss", **settings, losses=losses))


if __name__ == "__main__":
    main()
