"""Pipeline stages of torch.distributed.pipelining whose units are sharded over other ranks.

    torchrun --nproc-per-node 4 examples/pipeline.py

The ranks are a mesh of two dimensions. Along ``stage``, ranks hold different layers, and
activations travel; along ``shard``, they hold parts of the same ones and see other data::

                 shard 0              shard 1
    stage 0      layers 0, 2: rows    layers 0, 2: rows
    stage 1      layers 1, 3: rows    layers 1, 3: rows

Each rank has two stages of an interleaved schedule. Parameters stay unsharded between microbatches,
and gradients are reduced once a step, after the last of them: FSDP2's settings, which the schedule
makes on units of ``fully_shard`` by itself.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.nn.functional import mse_loss

from fsdp_dynamo import fully_shard, record_events

WIDTH, BATCH, MICROBATCHES, STEPS = 16, 16, 4, 20
STAGES_OF = ((0, 2), (1, 3))
NUM_STAGES = 4


class Layer(nn.Module):
    """What one stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def make_layers() -> list[nn.Module]:
    """The same values on every rank."""
    torch.manual_seed(0)
    return [Layer() for _ in range(NUM_STAGES)]


def batch_of(step: int, shard: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of the first stage and targets of the last one, for ranks of one shard."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    x = torch.randn(BATCH, WIDTH, generator=generator)
    return x, x.roll(1, dims=1)


def make_stages(mesh: DeviceMesh, device: torch.device) -> list[PipelineStage]:
    """This rank's stages, each a unit that is sharded along ``shard``."""
    layers, group = make_layers(), mesh["stage"].get_group()
    stages = []
    for index in STAGES_OF[mesh["stage"].get_local_rank()]:
        layer = fully_shard(
            layers[index].to(device), mesh=mesh["shard"], reshard_after_forward=False
        )
        stages.append(PipelineStage(layer, index, NUM_STAGES, device, group=group))
    return stages


def start() -> torch.device:
    """Start the process group; return a GPU if this machine has one for each of its ranks."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """Train for some steps."""
    device = start()
    mesh = init_device_mesh(
        device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("stage", "shard")
    )
    stages, shard = make_stages(mesh, device), mesh["shard"].get_local_rank()
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=mse_loss)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    is_first, is_last = (index in STAGES_OF[mesh["stage"].get_local_rank()] for index in (0, 3))
    for step in range(STEPS):
        x, target = (tensor.to(device) for tensor in batch_of(step, shard))
        losses: list[torch.Tensor] = []
        with record_events() as log:
            schedule.step(
                *([x] if is_first else []), **({"target": target} if is_last else {}), losses=losses
            )
        optimizer.step()
        optimizer.zero_grad()
        if is_last and step % 5 in (0, 4):
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["shard"].get_group())
            if shard == 0:
                reductions = len(log.keys("reduce_scatter"))
                print(f"step {step:3}  loss {mean.item():.6f}  reductions {reductions}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
