"""Whether values are right on a device: parameters after some steps beside an unwrapped model's.

    python benchmarks/gpu_checks.py one [--device cuda] [--cases fp32,bf16] [--modes eager,hooks]
    python benchmarks/gpu_checks.py two|late|steady|traces ...

- ``one``: one rank (NCCL on CUDA). Sharding is forced, so that it gathers and reduces.
- ``two``: two gloo ranks, on CUDA both on one device, which NCCL refuses.
- ``sanitizer``: as ``one``, for ``TORCH_CUDA_SANITIZER=1``, which must notice a missing wait.
- ``late``: as ``one``, but each collective begins late, into an output that holds NaN: what is read
  before it was waited for makes values wrong.
- ``steady``: a step that synchronises nothing with the host: torch's own mode of errors on CUDA, a
  recorded program on CPUs, which is also checked for order.
- ``traces``: a profile of a step of each mode, beside ``--json``.

The reference knows nothing of this project: it casts a copy of the parameters, runs each rank's
batches, and takes the mean of their gradients in float32. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing
from torch.nn import functional as F

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import one_line_on_bad_input, output_file, some_of
from benchmarks.measure import ranks
from benchmarks.measure.report import record, write
from benchmarks.streams.order import unordered
from benchmarks.streams.program import HostWait
from benchmarks.streams.recording import record_program
from benchmarks.workloads.decoder import Block, Decoder, DecoderSizes
from fsdp_dynamo import FSDP, CollectivePrecision, CPUOffload, MixedPrecision
from fsdp_dynamo.comm import collectives
from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.wrap import arguments, construct
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

SIZES = DecoderSizes(dim=64, num_blocks=3, num_heads=2, vocabulary=97, hidden_dim=160)
STEPS, RATE = 5, 0.5
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "hooks": {"backend": "aot_eager"},
    "graph": {"backend": "fsdp_dynamo_aot_eager", "fullgraph": True},
    "hooks_inductor": {"backend": "inductor"},
    "graph_inductor": {"backend": "fsdp_dynamo", "fullgraph": True},
    "graph_captured": {
        "backend": "fsdp_dynamo",
        "fullgraph": True,
        "options": {"cuda_graphs": True},
    },
}


PARTS = ("one", "two", "late", "sanitizer", "steady", "traces")


class Case(NamedTuple):
    """Arguments of the wrapper, and how a step is made."""

    dtype: torch.dtype = torch.float32
    offload: bool = False
    micro_batches: int = 1
    checkpoints: bool = False
    precision: CollectivePrecision | None = None

    @property
    def limit(self) -> float:
        """The largest difference that its rounding explains."""
        if self.precision is not None:
            return 0.2
        return 1e-3 if self.dtype == torch.float32 else 5e-2


CASES = {
    "fp32": Case(),
    "bf16": Case(torch.bfloat16),
    "fp16": Case(torch.float16),
    "offload": Case(torch.bfloat16, offload=True),
    "no_sync": Case(micro_batches=2),
    "checkpointing": Case(checkpoints=True),
    "int8": Case(precision=CollectivePrecision("int8", "int8")),
    "float8": Case(torch.bfloat16, precision=CollectivePrecision("float8", "float8")),
}


def _model(device: torch.device) -> Decoder:
    torch.manual_seed(0)
    return Decoder(SIZES).to(device)


def _tokens(rank: int, step: int, micro: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + 100 * step + 10 * micro + rank)
    return torch.randint(SIZES.vocabulary, (2, 16), generator=generator).to(device)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def expected(case: Case, num_ranks: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Parameters after all steps, of a model that nothing wraps."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            low = copy.deepcopy(model).to(case.dtype)
            for micro in range(case.micro_batches):
                _loss(low, _tokens(rank, step, micro, device)).backward()
            for param, own in zip(model.parameters(), low.parameters(), strict=True):
                assert own.grad is not None
                grad = own.grad.float() / num_ranks
                param.grad = grad if param.grad is None else param.grad + grad
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def wrapped(case: Case, mode: str, device: torch.device) -> tuple[FSDP, Any]:
    """The wrapped model, and what is called."""
    model = _model(device)
    if case.checkpoints:
        checkpointing.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, Block)
        )
    low = case.dtype != torch.float32
    sharded = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(case.dtype, torch.float32) if low else None,
        cpu_offload=CPUOffload(offload_params=case.offload),
        collective_precision=case.precision,
        device_id=None if device.type == "cpu" else device,
    )
    options = MODES[mode]
    return sharded, sharded if options is None else torch.compile(sharded, **options)


def step_of(
    sharded: FSDP, call: Any, case: Case, device: torch.device
) -> Callable[[int], torch.Tensor]:
    """A step of SGD, given its number."""
    optimizer = torch.optim.SGD(sharded.parameters(), lr=RATE)
    rank = dist.get_rank()
    batches = {
        (step, micro): _tokens(rank, step, micro, device)
        for step in range(STEPS)
        for micro in range(case.micro_batches)
    }

    def step(number: int) -> torch.Tensor:
        for micro in range(case.micro_batches):
            is_last = micro == case.micro_batches - 1
            with nullcontext() if is_last else sharded.no_sync():
                loss = _loss(call, batches[number, micro])
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _compare(case: Case, mode: str, device: torch.device) -> dict[str, Any]:
    """The largest difference of a parameter, relative to what training changed."""
    start = dict(_model(device).named_parameters())
    wanted = expected(case, dist.get_world_size(), device)
    sharded, call = wrapped(case, mode, device)
    step = step_of(sharded, call, case, device)
    for number in range(STEPS):
        step(number)
    worst = 0.0
    with FSDP.summon_full_params(sharded):
        for name, param in sharded.named_parameters():
            plain = name.replace("_checkpoint_wrapped_module.", "")
            moved = (wanted[plain] - start[plain]).norm()
            difference = (param.to(device) - wanted[plain]).norm() / moved
            worst = max(worst, difference.item())
    return {"difference": worst, "is_right": worst < case.limit}


def _sanitized(case: Case, mode: str, device: torch.device) -> dict[str, Any]:
    """As ``_compare``, and in eager mode whether a gather that is not waited for is noticed."""
    found = _compare(case, mode, device)
    if mode == "eager" and device.type == "cuda" and case.precision is None:
        with mock.patch.object(Unit, "_wait_gathers", return_value=None):
            try:
                _compare(case, mode, device)
            except Exception as error:
                if type(error).__name__ != "CUDASanitizerErrors":
                    raise
                return {**found, "fault_is_noticed": True}
        return {**found, "fault_is_noticed": False, "is_right": False}
    return found


def _steady(case: Case, mode: str, device: torch.device) -> dict[str, Any]:
    """Whether a step neither blocks the host nor, recorded, leaves an access unordered."""
    sharded, call = wrapped(case, mode, device)
    step = step_of(sharded, call, case, device)
    for _ in range(2):
        step(0)
    if device.type == "cpu":
        with record_program() as recorder:
            step(1)
        stops = [one.name for one in recorder.program if isinstance(one, HostWait)]
        faults = unordered(recorder.program)
        return {"stops": stops, "faults": faults, "is_right": not stops and not faults}
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"is_right": True}


def _trace(folder: Path, case: Case, mode: str, device: torch.device) -> dict[str, Any]:
    """Write a profile of one step."""
    sharded, call = wrapped(case, mode, device)
    step = step_of(sharded, call, case, device)
    step(0)
    with torch.profiler.profile() as profile:
        step(1)
        if device.type != "cpu":
            torch.accelerator.synchronize()
    path = folder / f"trace_{mode}.json.gz"
    profile.export_chrome_trace(str(path))
    return {"trace": path.name, "is_right": path.stat().st_size > 0}


@contextmanager
def forced_sharding() -> Iterator[None]:
    """Shard over one rank as over many: gather from it and reduce to it."""
    with (
        mock.patch.object(arguments, "effective_strategy", lambda strategy, groups: strategy),
        mock.patch.object(construct, "effective_strategy", lambda strategy, groups: strategy),
        mock.patch.object(Groups, "reductions", property(lambda groups: (groups.reduce,))),
    ):
        yield


@contextmanager
def late_collectives() -> Iterator[None]:
    """Fill outputs with NaN and let the stream stand still before each collective."""

    def late(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # Bytes of all ones are NaN wherever they are a scale.
            output.data.fill_(torch.nan if output.is_floating_point() else 255)
            if output.is_cuda:
                torch.cuda._sleep(_LATE_CYCLES)
            return collective(output, *args, **kwargs)

        return call

    with (
        mock.patch.object(collectives, "transport_of", return_value="library"),
        _changed_collectives(late),
    ):
        yield


@contextmanager
def _changed_collectives(
    change: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("all_gather_single", "reduce_scatter_single"):
            changed = change(getattr(collectives, name))
            stack.enter_context(mock.patch.object(collectives, name, changed))
        yield


_LATE_CYCLES = 2_000_000
"""About a millisecond: longer than a unit of these models computes."""


class _Told:
    """A collective's handle, for the sanitizer.

    It takes a collective for work of the stream that is current, which has no event of torch's
    behind it: so what waits for the collective waits for one, which comes before its end.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self, *args: Any) -> bool:
        """Let the current stream wait for both."""
        torch.cuda.current_stream().wait_event(self._event)
        done: bool = self._work.wait(*args)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def told_collectives() -> AbstractContextManager[None]:
    """Collectives that torch's sanitizer understands when another stream than theirs waits."""

    def told(collective: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Told(collective(*args, **kwargs))

    return _changed_collectives(told)


@contextmanager
def _process_group(part: str, device_name: str) -> Iterator[torch.device]:
    if part != "two" or device_name == "cpu":
        with ranks.process_group(device_name) as device:
            yield device
        return
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo", timeout=ranks.TIMEOUT)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def run_rank(options: argparse.Namespace) -> int:
    """Run the cases; returns the exit code."""
    warnings.filterwarnings("ignore")
    checks = {
        "one": _compare,
        "two": _compare,
        "late": _compare,
        "sanitizer": _sanitized,
        "steady": _steady,
        "traces": partial(_trace, options.json.parent),
    }
    rows = []
    forced = nullcontext() if options.part == "two" else forced_sharding()
    options.json.parent.mkdir(parents=True, exist_ok=True)
    changed: AbstractContextManager[None] = nullcontext()
    if options.part == "late":
        changed = late_collectives()
    elif options.part == "sanitizer" and options.device == "cuda":
        changed = told_collectives()
    with _process_group(options.part, options.device) as device, forced, changed:
        for name in options.cases:
            for mode in options.modes:
                torch.compiler.reset()
                row: dict[str, Any] = {"case": name, "mode": mode}
                try:
                    row |= checks[options.part](CASES[name], mode, device)
                except Exception as error:  # the other cases are to be known, too
                    row |= {"is_right": False, "error": f"{type(error).__name__}: {error}"[:2000]}
                    row["traceback"] = traceback.format_exc()[-4000:]
                rows.append(row)
                if dist.get_rank() == 0:
                    print({k: v for k, v in row.items() if k != "traceback"}, flush=True)
                    write(options.json, record(f"gpu_{options.part}", rows=rows))
    return 0 if all(row["is_right"] for row in rows) else 1


def main() -> None:
    """Start ranks, or run as one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", type=output_file, default=Path("runs/gpu_checks.json"))
    options = parser.parse_args()
    world_size = 2 if options.part == "two" else 1
    with one_line_on_bad_input():
        options.cases = some_of("--cases", options.cases, CASES)
        options.modes = some_of("--modes", options.modes, MODES)
        if ranks.is_rank():
            raise SystemExit(run_rank(options))
        ranks.check_device(options.device, 1)
        ranks.become_ranks(world_size)


if __name__ == "__main__":
    main()
