"""What ranks get after a fault of one of them, and when they end: NCCL ranks that share one GPU.

    python benchmarks/gpu_faults.py [--device cuda] [--faults swap,kill] [--modes eager,graph]
    python benchmarks/gpu_faults.py --device cpu      # with gloo

- ``leave out``: rank 1 leaves a unit out, of the size of the others.
- ``swap``: rank 1 runs two such units in the other order, so that no rank waits.
- ``raise``, ``kill``: rank 1 raises an error, or is killed by SIGKILL.
- ``late``: rank 1 comes 14 s later, which is no fault; all ranks go on.
- ``capture``: rank 1 captures a CUDA graph for 3 s, as no fault either.

After each step the main thread reads the loss (``.item()``), which blocks it in its device. NCCL
takes ranks on one GPU for hosts and goes through sockets (``NCCL_HOSTID``); times of collectives
mean nothing. Exit code 1 if a process outlives the limit, or ends without our error about rank 1.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.command_line import at_least, one_line_on_bad_input, output_file, some_of
from benchmarks.gpu_checks import MODES
from benchmarks.measure.report import record, table, write
from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FAULTS = ("leave out", "swap", "raise", "kill", "late", "capture")
NO_FAULTS = ("late", "capture")
FAULT_STEP, STEPS = 12, 60
LATE_S, CAPTURE_S = 14.0, 3.0
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""NCCL's settings for several ranks on one GPU, each with an ``NCCL_HOSTID`` of its own."""


class Block(nn.Module):
    """A unit; all are of one size."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Blocks(nn.Module):
    """Runs its blocks in the order of ``order``."""

    def __init__(self, dim: int, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(dim) for _ in range(count)])
        self.order = list(range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
        return x


def make_fault(fault: str, model: Blocks) -> None:
    """What rank 1 does at the step of the fault."""
    if fault == "leave out":
        model.order = [0, 2, 3]
    elif fault == "swap":
        model.order = [0, 2, 1, 3]
    elif fault == "raise":
        raise ValueError("no more data")
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "capture":
        capture_for(CAPTURE_S, model.blocks[0].linear.bias.device)
    else:
        time.sleep(LATE_S)


def capture_for(seconds: float, device: torch.device) -> None:
    """Capture one addition; the thread that watches waits looks at them meanwhile."""
    if device.type == "cuda":
        value = torch.zeros(1, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value += 1
            time.sleep(seconds)
        graph.replay()
        assert value.item() == 1
    else:
        time.sleep(seconds)


def run_rank(fault: str, mode: str, device_name: str) -> None:
    """Train as one rank; says when it comes to the fault."""
    device = torch.device(device_name)
    dist.init_process_group("gloo" if device_name == "cpu" else "nccl")
    torch.manual_seed(0)
    model = Blocks(256, 4).to(device)
    wrapped = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    settings = MODES[mode]
    run = wrapped if settings is None else torch.compile(wrapped, **settings)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(STEPS):
        if step == FAULT_STEP:
            print("fault", flush=True)
            if dist.get_rank() == 1:
                make_fault(fault, model)
        loss = run(torch.ones(8, 256, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    dist.destroy_process_group()


class Outcome(NamedTuple):
    """What became of a rank.

    Attributes:
        report_s: seconds from the fault to the first line of our error; ``None``: there was none.
        end_s: seconds from the fault to the end of the process; ``None``: it was killed by us.
        error: that line.
    """

    report_s: float | None
    end_s: float | None
    exit_code: int | None
    error: str


_ERROR = re.compile(r"(DivergenceError|RankFailedError): .*")


class _Rank:
    """A process, and when what it wrote came."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), *arguments],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        streams = self.process.stdout, self.process.stderr
        self._readers = [threading.Thread(target=self._read, args=(s,)) for s in streams]
        for reader in self._readers:
            reader.start()
        self.ended_at: float | None = None

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.lines.append((time.monotonic(), line.rstrip()))

    def finish(self, until: float) -> None:
        """Wait for the end, at most until a moment; then kill the process."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
            self.ended_at = time.monotonic()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join()

    def came_to_the_fault(self) -> float | None:
        return next((at for at, line in self.lines if line == "fault"), None)

    def outcome(self, fault_at: float) -> Outcome:
        errors = [
            (at, found[0])
            for at, line in self.lines
            if at >= fault_at and (found := _ERROR.search(line)) is not None
        ]
        at, error = errors[0] if errors else (None, "")
        return Outcome(
            None if at is None else at - fault_at,
            None if self.ended_at is None else self.ended_at - fault_at,
            None if self.ended_at is None else self.process.returncode,
            error,
        )


def try_fault(fault: str, mode: str, device: str, world_size: int, limit_s: float) -> list[Outcome]:
    """Run ranks until all have ended, at most ``limit_s`` to the fault, and again after it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        common = ONE_GPU | {
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "FSDP_DYNAMO_FLIGHT": folder,
        }
        arguments = ["--rank-of", fault, "--modes", mode, "--device", device]
        ranks = [
            _Rank(arguments, common | {"RANK": str(r), "NCCL_HOSTID": f"host-{r}"})
            for r in range(world_size)
        ]
        began = time.monotonic()
        while not (came := [at for one in ranks if (at := one.came_to_the_fault()) is not None]):
            is_over = all(one.process.poll() is not None for one in ranks)
            if is_over or time.monotonic() - began > limit_s:
                break
            time.sleep(0.05)
        fault_at = came[0] if came else time.monotonic()
        enders = [threading.Thread(target=one.finish, args=(fault_at + limit_s,)) for one in ranks]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()
        return [one.outcome(fault_at) for one in ranks]


def is_right(fault: str, outcomes: list[Outcome]) -> bool:
    """Whether every process has ended by itself, and those without the fault name rank 1."""
    if any(one.end_s is None for one in outcomes):
        return False
    if fault in NO_FAULTS:
        return all(one.exit_code == 0 for one in outcomes)
    if fault in ("raise", "kill"):
        outcomes = [one for rank, one in enumerate(outcomes) if rank != 1]
    return all("rank 1" in one.error and one.exit_code for one in outcomes)


def _row(fault: str, mode: str, outcomes: list[Outcome]) -> list[str]:
    def seconds(values: list[float | None]) -> str:
        return ", ".join("-" if value is None else f"{value:.1f}" for value in values)

    return [
        f"{fault}, {mode}",
        seconds([one.report_s for one in outcomes]),
        seconds([one.end_s for one in outcomes]),
        ", ".join("-" if one.exit_code is None else str(one.exit_code) for one in outcomes),
        "yes" if is_right(fault, outcomes) else "NO",
    ]


def main() -> int:
    """Try all faults in all modes; exit code 1 if an outcome is wrong."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--modes", default="eager,hooks,graph")
    parser.add_argument("--world_size", type=at_least(2), default=2)
    parser.add_argument("--limit_s", type=at_least(1), default=60)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with one_line_on_bad_input():
        modes = some_of("--modes", options.modes, MODES)
        faults = some_of("--faults", options.faults, FAULTS)
    if options.rank_of is not None:
        run_rank(options.rank_of, modes[0], options.device)
        return 0
    results, rows = {}, []
    for fault in faults:
        for mode in modes:
            outcomes = try_fault(fault, mode, options.device, options.world_size, options.limit_s)
            results[f"{fault}, {mode}"] = [one._asdict() for one in outcomes]
            rows.append(_row(fault, mode, outcomes))
            print(rows[-1], *(one.error for one in outcomes), sep="\n  ", flush=True)
    print(table(["fault, mode", "report, s", "end, s", "exit codes", "right"], rows))
    if options.json is not None:
        write(options.json, record("gpu_faults", device=options.device, outcomes=results))
    return int(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
