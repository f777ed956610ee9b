"""A matrix optimizer on sharded parameters: Muon, in a few lines over ``update_whole``.

    torchrun --nproc-per-node 2 examples/muon.py

Muon orthogonalizes the momentum of each matrix, for which it needs the whole matrix. A rank holds
some rows; ``update_whole`` brings each matrix to one rank, which updates it, and gives every rank
its rows of the result. All matrices together are spread over the ranks by size.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo import fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's: fast where singular values are small


def orthogonalized(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """An orthogonal matrix near to this one, by a quintic Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum for matrices, plain SGD for the rest; of a sharded model or not."""

    def __init__(self, model: nn.Module, lr: float = 0.02, momentum: float = 0.9) -> None:
        self.model = model
        self.is_sharded = hasattr(model, "update_whole")
        super().__init__(model.parameters(), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One step; every rank must take it."""
        group = self.param_groups[0]
        momenta: dict[str, torch.Tensor] = {}
        params = dict(self.model.named_parameters())
        for name, param in params.items():
            if param.grad is None:
                continue
            if param.dim() < 2:
                param.sub_(param.grad, alpha=group["lr"])
                continue
            state = self.state[param].setdefault("momentum", torch.zeros_like(param))
            momenta[name] = state.mul_(group["momentum"]).add_(param.grad)
        for name, change in self._orthogonalized(momenta).items():
            params[name].sub_(change, alpha=group["lr"])

    def _orthogonalized(self, momenta: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.is_sharded:
            changes: dict[str, torch.Tensor] = self.model.update_whole(  # type: ignore[operator]
                momenta, lambda _, whole: orthogonalized(whole)
            )
            return changes
        return {name: orthogonalized(whole) for name, whole in momenta.items()}


def start() -> torch.device:
    """Start the process group; return a GPU if this machine has one for each of its ranks."""
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def main() -> None:
    """Fit a small network to a rotation; prints the loss."""
    device = start()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*layers, nn.Linear(32, 32)).to(device)
    fully_shard(model, policy=ModuleWrapPolicy({nn.Sequential}))
    optimizer = Muon(model, lr=0.01)
    rotation = orthogonalized(torch.randn(32, 32)).to(device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(200):
        x = torch.randn(64, 32, generator=generator).to(device)
        loss = (model(x) - x @ rotation).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 in (0, 49):
            print(f"step {step:3}  loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
