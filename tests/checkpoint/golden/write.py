"""Writes a checkpoint for ../test_golden_checkpoints.py, with the version that is imported.

    git worktree add ../released v0.1.0
    PYTHONPATH=../released python -m torch.distributed.run --nproc-per-node 2 \\
        tests/checkpoint/golden/write.py tests/checkpoint/golden/0.1.0

Beside the checkpoint it writes what it should load as: whole values, from the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo import FullyShardedDataParallel as FSDP
from fsdp_dynamo import checkpoint
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STEPS = 3


def make_model() -> nn.Module:
    """Rows that two or three ranks do not share evenly, a buffer, and a tied parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3), nn.Linear(3, 5))
    model[1].register_buffer("seen", torch.arange(3.0))
    model[3].weight = model[0].weight
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups."""
    params = [*model.named_parameters()]
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in params if "weight" in name], "weight_decay": 0.1},
            {"params": [p for name, p in params if "weight" not in name], "lr": 0.01},
        ]
    )


class Counter:
    """A state of each rank."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        """The number."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Back from ``state_dict``."""
        self.value = state["value"]


def main(folder: Path) -> None:
    """Train for some steps, save, and write the whole values beside."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = FSDP(make_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    counter = Counter()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        counter.value += 10 + rank
    checkpoint.save(
        folder,
        model,
        optimizer,
        step=STEPS,
        shared={"scheduler": scheduler},
        per_rank={"counter": counter},
    )
    states = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    with FSDP.summon_full_params(model):
        values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save({"model": values, "optimizer": states}, folder / "expected.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
