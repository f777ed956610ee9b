"""Expert parallelism: each rank holds some experts of a layer, sharded over the other ranks.

    torchrun --nproc-per-node 4 examples/expert_parallel.py

The ranks are a mesh of two dimensions. Along ``expert``, ranks hold different experts, and tokens
travel to the rank that has theirs; along ``data``, they hold parts of the same ones::

                 expert 0                expert 1
    data 0       experts 0, 1: rows      experts 2, 3: rows
    data 1       experts 0, 1: rows      experts 2, 3: rows

The experts' unit shards along ``data``, everything else over all ranks. An expert has seen the
tokens of all ranks once its gradients are summed along ``data``, so they are divided by the number
of all ranks, not by that of its unit's. The experts are DTensors along ``expert`` before they are
sharded, so a norm of all gradients counts each of them once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import mse_loss

from fsdp_dynamo import fully_shard

WIDTH, EXPERTS, LAYERS, TOKENS, STEPS = 16, 4, 2, 32, 20


class Exchange(torch.autograd.Function):
    """Rows to other ranks and rows from them; gradients go the other way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, rows: torch.Tensor, got: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes = sent, got, group
        received = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), got, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return Exchange.apply(grad, *ctx.sizes), None, None, None  # type: ignore[no-untyped-call]


class Experts(nn.Module):
    """Two layers for each expert; a token goes through those of its own.

    Args:
        mesh: the ranks that share the experts; ``None``: this process has all.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.mesh = mesh
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.2)
        for name, param in list(self.named_parameters()) if mesh is not None else ():
            setattr(self, name, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])))

    def forward(self, tokens: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Results ``(num_tokens, width)``; ``expert`` says whose each token is."""
        order = expert.argsort(stable=True)
        counts = expert.bincount(minlength=EXPERTS)
        results = self._travel(tokens[order], counts)
        return torch.empty_like(results).index_copy(0, order, results)

    def _travel(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Let tokens, ordered by expert, be computed where their experts are."""
        if self.mesh is None:
            return self._compute(tokens, counts[None])
        ranks, group = self.mesh.size(), self.mesh.get_group()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        theirs = received.view(ranks, -1)  # by rank and local expert
        sent, got = counts.view(ranks, -1).sum(1).tolist(), theirs.sum(1).tolist()
        here = Exchange.apply(tokens, got, sent, group)  # type: ignore[no-untyped-call]
        back: torch.Tensor = Exchange.apply(  # type: ignore[no-untyped-call]
            self._compute(here, theirs), sent, got, group
        )
        return back

    def _compute(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Tokens by rank and expert, ``counts`` of each, through the experts of this rank."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        pieces = tokens.split(counts.flatten().tolist())
        results = [
            (piece @ up[i % len(up)]).relu() @ down[i % len(up)] for i, piece in enumerate(pieces)
        ]
        return torch.cat(results)


class Layer(nn.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, expert = self.router(x).softmax(-1).max(-1)
        return x + weight[:, None] * self.experts(x, expert)


def make_model(mesh: DeviceMesh | None = None) -> nn.Sequential:
    """The same values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(mesh) for _ in range(LAYERS)], nn.Linear(WIDTH, 1))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Of the tokens of a rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator).to(next(model.parameters()).device)
    return mse_loss(model(x), x.square().mean(1, keepdim=True))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Make units: the experts along ``data``, each layer and the rest over all ranks."""
    for layer in model[:LAYERS]:
        assert isinstance(layer, Layer)
        experts = fully_shard(layer.experts, mesh=mesh["data"])
        experts.set_gradient_divide_factor(mesh.size())
        fully_shard(layer)
    fully_shard(model)
    return model


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
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world_size // 2, 2), mesh_dim_names=("data", "expert"))
    model = shard(make_model(mesh["expert"]).to(device), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss = loss_of(model, step, rank)
        optimizer.zero_grad()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 5 in (0, 4):
            print(f"step {step:3}  loss {total.item() / world_size:.6f}  norm {norm.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
