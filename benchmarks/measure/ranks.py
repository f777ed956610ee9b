"""Starting ranks and their process group.

Under torchrun (or the link) a script finds ``RANK`` and ``WORLD_SIZE`` in its environment and is
one rank. Otherwise it replaces itself by torchrun, which starts the ranks, ends all of them when
one fails and passes Ctrl-C on.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.command_line import BadInputError

TIMEOUT = timedelta(minutes=10)

QUIET = {
    "OMP_NUM_THREADS": "1",  # torchrun's own choice, without its banner
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # name look-ups of addresses that have no name
}
"""Environment of ranks, unless the user has set it."""


def is_rank() -> bool:
    """Whether this process was started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def become_ranks(world_size: int) -> None:
    """Replace this process by torchrun with the same command line; returns if already a rank."""
    if is_rank():
        return
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def check_device(name: str, world_size: int) -> None:
    """Raise an error for a missing device, before any rank is started."""
    if name == "cpu":
        return
    if not torch.cuda.is_available():
        raise BadInputError("--device cuda: expected a CUDA device, got none; use --device cpu")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if local > torch.cuda.device_count():
        raise BadInputError(
            f"--world_size: expected at most {torch.cuda.device_count()} ranks, one per CUDA "
            f"device, got {local}"
        )


def say(text: str) -> None:
    """Print a line on the first rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


@contextmanager
def process_group(device_name: str) -> Iterator[torch.device]:
    """This rank's process group and device; gloo for CPUs, NCCL for GPUs.

    What has models must have returned before it ends: DDP's reducer, dropped after the group, joins
    gloo's threads while it holds Python's lock, for which one of them may be waiting (torch 2.13).
    """
    if device_name == "cpu":
        device, backend = torch.device("cpu"), "gloo"
    else:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        yield device
        gc.collect()
        dist.barrier()
    finally:
        dist.destroy_process_group()
