"""Train a small language model on the standard library's sources, sharded and compiled.

Start it with ``make demo``, or::

    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/demo/train.py

It runs on CPUs (gloo) or, where every rank has a GPU of its own, on GPUs (NCCL), and writes
``loss.png``, ``timeline.png``, ``summary.json`` and ``checkpoints/`` under ``--out``. With
``--resume``, and ``--max-restarts 3`` before the script, it survives ranks that die.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import TextBatches
from model import HEAD_DIM, Block, Decoder
from pictures import draw_loss, draw_timeline
from torch._dynamo.utils import counters
from torch.nn import functional as F
from tqdm import tqdm

from fsdp_dynamo import FSDP, CheckpointError, EventLog, MixedPrecision, checkpoint, record_events
from fsdp_dynamo.events import COLLECTIVE_KINDS
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

SEED = 1234
PROMPT = b"def "
SAMPLE_BYTES = 200
TEMPERATURE = 0.8


def positive_int(text: str) -> int:
    """An argument that counts something."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got '{text}'")
    return int(text)


def positive_float(text: str) -> float:
    """An argument that measures something."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return value


def width(text: str) -> int:
    """A width that divides into heads."""
    value = positive_int(text)
    if value % HEAD_DIM:
        raise argparse.ArgumentTypeError(f"expected a multiple of {HEAD_DIM}, got {value}")
    return value


def parse_arguments() -> argparse.Namespace:
    """The command line; leaves with a message and code 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive_int, default=220, help="optimizer steps in all")
    parser.add_argument("--dim", type=width, default=256, help="width of the model")
    parser.add_argument("--blocks", type=positive_int, default=8, help="number of blocks")
    parser.add_argument("--batch", type=positive_int, default=4, help="windows a rank and step")
    parser.add_argument("--length", type=positive_int, default=64, help="tokens a window")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="highest learning rate")
    parser.add_argument(
        "--backend",
        default="fsdp_dynamo",
        choices=["fsdp_dynamo", "fsdp_dynamo_aot_eager"],
        help="graph mode's backend: Inductor, or the graphs run node by node",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder to write to")
    parser.add_argument(
        "--text-bytes", type=positive_int, default=4_000_000, help="bytes of text for all ranks"
    )
    parser.add_argument(
        "--save-every", type=positive_int, default=100, help="steps from one checkpoint to the next"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --out, if any"
    )
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error(
            "expected to be started by torch.distributed.run, found no RANK. Use 'make demo' or "
            "'python -m torch.distributed.run --standalone --nproc-per-node 2 ...'"
        )
    return arguments


def start_process_group() -> torch.device:
    """NCCL where every rank of this machine has a GPU, gloo on CPUs otherwise."""
    local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_ranks))
    dist.init_process_group("gloo")
    return torch.device("cpu")


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Linear warmup, then half a cosine down to a tenth. ``step`` counts from 0."""
    warmup = max(1, min(20, steps // 10))
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return highest * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class Progress:
    """The losses of all steps so far: a state in checkpoints."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """For ``checkpoint.save``."""
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For ``checkpoint.load``."""
        self.losses = list(state_dict["losses"])


class Checkpoints:
    """Saves in the background every few steps; everything that a run needs to go on.

    Args:
        folder: where they are.
        batches: of this rank.
        every: steps from one to the next.
    """

    def __init__(
        self,
        folder: Path,
        model: FSDP,
        optimizer: torch.optim.Optimizer,
        batches: TextBatches,
        every: int,
    ) -> None:
        self.folder, self.every = folder, every
        self.progress = Progress()
        self._saved = (model, optimizer)
        self._states: dict[str, Any] = {
            "shared": {"progress": self.progress},
            "per_rank": {"data": batches.generator},
        }
        self._saving: Future[Path] | None = None

    def load(self) -> None:
        """Go on from the newest one; a new run begins where there is none."""
        try:
            checkpoint.load(self.folder, *self._saved, missing_ok=True, **self._states)
        except CheckpointError as error:
            raise SystemExit(f"--resume: {error}") from None

    def after_step(self, is_last: bool) -> None:
        """Save if it is time to; after the last step, wait until it is complete."""
        step = len(self.progress.losses)
        if is_last or step % self.every == 0:
            self._saving = checkpoint.async_save(
                self.folder, *self._saved, step=step, keep_last=2, **self._states
            )
        if is_last and self._saving is not None:
            self._saving.result()


@dataclass
class Training:
    """Results of training.

    Attributes:
        losses: mean over ranks, nats a byte, of every step since step 1 (resumed ones too).
        step_ms: time of each step of this process; the first one compiles.
        log: events of the last step on this rank.
        graphs: how many graphs Dynamo handed to the backend.
        recompiles: how many frames Dynamo compiled after this process's first step.
    """

    losses: list[float]
    step_ms: list[float]
    log: EventLog
    graphs: int
    recompiles: int


def train(
    model: FSDP,
    optimizer: torch.optim.Optimizer,
    batches: TextBatches,
    checkpoints: Checkpoints,
    arguments: argparse.Namespace,
    device: torch.device,
) -> Training:
    """Train from where the checkpoints are up to ``arguments.steps``; records the last step."""
    losses = checkpoints.progress.losses
    compiled = torch.compile(model, fullgraph=True, backend=arguments.backend)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens_a_step = world_size * arguments.batch * arguments.length
    step_ms: list[float] = []
    frames_after_first = 0
    log = EventLog()
    bar = tqdm(
        total=arguments.steps,
        initial=len(losses),
        disable=rank != 0,
        unit="step",
        dynamic_ncols=True,
    )
    for step in range(len(losses), arguments.steps):
        if not step_ms:
            bar.set_postfix_str("compiling", refresh=True)
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, arguments.steps, arguments.lr)
        inputs, targets = (tensor.to(device) for tensor in batches.draw())
        if step == arguments.steps - 1:
            with record_events() as log:
                loss = train_step(model, compiled, optimizer, inputs, targets)
        else:
            loss = train_step(model, compiled, optimizer, inputs, targets)
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        step_ms.append((time.perf_counter() - begin) * 1e3)
        if len(step_ms) == 1:
            frames_after_first = counters["frames"]["ok"]
        bar.set_postfix(
            {"loss": f"{losses[-1]:.3f}", "tokens/s": f"{tokens_a_step / step_ms[-1] * 1e3:.0f}"},
            refresh=False,
        )
        bar.update()
        checkpoints.after_step(is_last=step == arguments.steps - 1)
    bar.close()
    return Training(
        losses=losses,
        step_ms=step_ms,
        log=log,
        graphs=counters["stats"]["unique_graphs"],
        recompiles=counters["frames"]["ok"] - frames_after_first,
    )


def train_step(
    model: FSDP,
    compiled: Any,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> torch.Tensor:
    """One step on this rank's (batch, length) tokens; returns its loss, a scalar."""
    logits = compiled(inputs)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def sample(model: FSDP, device: torch.device, prompt: bytes, num_bytes: int) -> bytes:
    """``prompt`` and ``num_bytes`` more; every rank must call it and gets the same.

    The wrapper runs eagerly here: the same module that was compiled needs no conversion.
    """
    model.eval()
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.length :])[0, -1].float().cpu()
        probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
        following = torch.multinomial(probabilities, 1, generator=generator).to(device)
        dist.broadcast(following, src=0)  # ranks must not drift apart by a rounding
        tokens = torch.cat((tokens, following[None]), dim=1)
    model.train()
    return bytes(tokens[0].tolist())


def summarize(
    training: Training, model: FSDP, num_parameters: int, resumed_from: int, tokens_a_step: int
) -> dict[str, Any]:
    """The run in numbers. Collectives, bytes and exposed time are those of the last step."""
    collectives = [event for event in training.log if event.kind in COLLECTIVE_KINDS]
    num_bytes: Counter[str] = Counter()
    for event in collectives:
        num_bytes[event.kind] += event.num_bytes
    steady_ms = training.step_ms[1:] or training.step_ms
    last = training.losses[-20:]
    return {
        "parameters": num_parameters,
        "units": len(FSDP.fsdp_modules(model)),
        "world_size": dist.get_world_size(),
        "graphs": training.graphs,
        "recompiles": training.recompiles,
        "steps": len(training.losses),
        "resumed_from": resumed_from,
        "loss_first": round(training.losses[0], 4),
        "loss_last": round(training.losses[-1], 4),
        "loss_mean_of_last_20": round(statistics.fmean(last), 4),
        "first_step_ms": round(training.step_ms[0], 1),
        "step_ms": round(statistics.median(steady_ms), 1),
        "tokens_per_second": round(tokens_a_step / statistics.median(steady_ms) * 1e3),
        "collectives_per_step": dict(Counter(event.kind for event in collectives)),
        "bytes_per_step": dict(num_bytes),
        "exposed_communication_ms": round(training.log.exposed_ms(), 3),
        "peak_unsharded_bytes": training.log.peak_unsharded_bytes(),
        "torch": torch.__version__,
    }


def write_results(
    folder: Path, training: Training, summary: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Pictures and numbers, by rank 0."""
    draw_loss(
        folder / "loss.png",
        training.losses,
        f"{summary['parameters'] / 1e6:.2f} M parameters on {summary['world_size']} ranks",
    )
    counts = ", ".join(
        f"{count} {kind.replace('_', '-')}s"
        for kind, count in summary["collectives_per_step"].items()
    )
    draw_timeline(
        folder / "timeline.png",
        training.log,
        f"Step {summary['steps']} on rank 0, backend {arguments.backend}: {counts}, "
        f"{summary['exposed_communication_ms']:.1f} ms exposed",
    )
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Train, save, draw and sample; every rank calls it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder: Path = arguments.out
    batches = TextBatches(
        rank, world_size, arguments.text_bytes, arguments.batch, arguments.length, SEED
    )
    torch.manual_seed(SEED)  # the same weights on every rank
    decoder = Decoder(arguments.dim, arguments.blocks, arguments.length)
    num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
    model = FSDP(
        decoder.to(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    checkpoints = Checkpoints(
        folder / "checkpoints", model, optimizer, batches, arguments.save_every
    )
    if arguments.resume:
        checkpoints.load()
    resumed_from = len(checkpoints.progress.losses)
    if resumed_from >= arguments.steps:
        raise SystemExit(
            f"--steps: expected more than the checkpoint's {resumed_from} steps, "
            f"got {arguments.steps}. Raise --steps."
        )
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        print(
            f"{num_parameters:,} parameters in {len(FSDP.fsdp_modules(model))} units on "
            f"{world_size} ranks ({device.type}); {len(batches.text):,} bytes of text per rank"
        )
    training = train(model, optimizer, batches, checkpoints, arguments, device)
    tokens_a_step = world_size * arguments.batch * arguments.length
    summary = summarize(training, model, num_parameters, resumed_from, tokens_a_step)
    if rank == 0:
        write_results(folder, training, summary, arguments)
    text = sample(model, device, PROMPT, SAMPLE_BYTES)
    if rank == 0:
        print(json.dumps(summary, indent=2))
        print(f"sample at temperature {TEMPERATURE}:\n{text.decode('utf-8', 'replace')}")
        print(f"wrote loss.png, timeline.png, summary.json and checkpoints/ to {folder}")


def main() -> None:
    """Start the ranks' process group, run, and stop it."""
    arguments = parse_arguments()
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    device = start_process_group()
    try:
        run(arguments, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
