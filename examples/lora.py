"""LoRA: a frozen model is sharded, small matrices beside its layers learn, and only they are saved.

    torchrun --nproc-per-node 2 examples/lora.py [FILE FOR THE ADAPTER]

A unit keeps what is frozen and what learns in flat parameters of their own: frozen ones are
gathered for forward and backward like all others, but have no gradient, no reduction and no state
in the optimizer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from fsdp_dynamo import fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

WIDTH, BLOCKS, STEPS = 64, 3, 60


class LoRALinear(nn.Module):
    """A frozen linear layer, and a product of two thin matrices that is added to its own.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
    """

    def __init__(self, base: nn.Linear, rank: int = 4, alpha: float = 8.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))  # at first it adds nothing
        self.scale = alpha / rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = linear(linear(x, self.lora_a), self.lora_b)
        return self.base(x) + self.scale * added


class Block(nn.Module):
    """Two layers around a bend, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.up(self.norm(x)).relu()
        return x + self.down(hidden)


def make_model() -> nn.Module:
    """A "pretrained" model, the same on every rank, with adapters."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, WIDTH))
    model.requires_grad_(False)
    for block in model:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, LoRALinear(layer))
    return model


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    """The task: give back the input, turned around."""
    x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(seed))
    x = x.to(next(model.parameters()).device)
    return (model(x) - x.flip(-1)).square().mean()


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
    """Train the adapters; print what is held, and the losses."""
    device = start()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model().to(device)
    fully_shard(model, policy=ModuleWrapPolicy({Block}))
    adapters = [param for param in model.parameters() if param.requires_grad]
    frozen = [param for param in model.parameters() if not param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    for step in range(STEPS):
        loss = loss_of(model, seed=1 + step * world_size + rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")
    with torch.no_grad():
        final = loss_of(model, seed=0).item()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapter = get_model_state_dict(model, options=options)  # whole tensors, on rank 0
    if rank == 0:
        num_frozen, num_learning = held(frozen), held(adapters)
        num_states = held(t for s in optimizer.state.values() for t in s.values())
        print(f"a rank holds {num_frozen} frozen elements and {num_learning} that learn,")
        print(f"{num_states} of states, {sum(p.grad is not None for p in frozen)} frozen gradients")
        print(f"final loss {final!r}")
        if len(sys.argv) > 1:
            torch.save(adapter, sys.argv[1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
