"""HYBRID_SHARD on a 2-D mesh: shards inside a node, replicas across nodes.

    torchrun --nproc-per-node 4 examples/hsdp.py 2     # pretends to be two nodes of two ranks
    sbatch --nodes 2 examples/slurm.sh examples/hsdp.py

All-gathers and reduce-scatters stay inside a row of the mesh, where the link is fast; what crosses
the rows is one shard of the gradients, averaged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import Event, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

WIDTH, LAYERS, STEPS = 32, 3, 20


def make_model() -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """On a batch of this rank's own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, WIDTH, generator=generator).to(next(model.parameters()).device)
    return (model(x) - x.roll(1, -1)).square().mean()


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Elements of the tensors on this rank."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(tensor.numel() for tensor in local)


def start() -> torch.device:
    """Start the process group; return a GPU if this machine has one for each of its ranks."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """Train; print the loss, how much a rank holds, and what it sent where."""
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shards = int(sys.argv[1] if len(sys.argv) > 1 else os.environ["LOCAL_WORLD_SIZE"])
    shape, names = (world_size // shards, shards), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = fully_shard(
        make_model().to(device),
        policy=ModuleWrapPolicy({nn.Sequential}),
        mesh=mesh,
        strategy=ShardingStrategy.HYBRID_SHARD,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    events: list[Event] = []
    for step in range(STEPS):
        with record_events() as log:
            loss = loss_of(model, step, rank)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        events = list(log)
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:3}  loss {total.item() / world_size:.6f}")
    if rank == 0:
        print(f"mesh {shape[0]} x {shape[1]}")
        print(f"a rank holds {held(model.parameters())} elements")
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            moved = sum(event.num_bytes for event in events if event.kind == kind)
            print(f"{kind}: {moved} bytes per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
