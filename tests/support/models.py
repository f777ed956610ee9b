"""Small models and the reference runs that tests compare with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, ShardingStrategy, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

VOCABULARY = 31
STEPS = 5


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Embedding, blocks, tied or untied head. ``vocabulary`` is odd, so shards are uneven."""

    def __init__(self, num_blocks: int = 4, dim: int = 16, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


class Branching(Transformer):
    """Leaves blocks out where it is told to."""

    skipped: frozenset[int] = frozenset()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number not in self.skipped:
                x = block(x)
        return self.head(self.norm(x)) * self.scale


def make_transformer(**kwargs: Any) -> Transformer:
    """The same weights on every rank."""
    torch.manual_seed(7)
    return Transformer(**kwargs)


def batch(rank: int, step: int, size: int = 2, length: int = 8) -> torch.Tensor:
    """This rank's tokens of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (size, length), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token cross entropy."""
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(
    model: nn.Module, rank: int, steps: int = STEPS, clip: float | None = None
) -> tuple[list[float], list[float]]:
    """SGD steps, which see the scale of gradients; returns losses and, where clipped, norms."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(steps):
        loss = loss_of(model, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            clipper = getattr(model, "clip_grad_norm_", None)
            if clipper is not None:
                norms.append(float(clipper(clip)))
            else:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def average_gradients(model: nn.Module) -> None:
    """Means over ranks, for a reference that every rank trains by itself."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad, dist.ReduceOp.AVG)


def wrap(model: nn.Module, **kwargs: Any) -> FSDP:
    """One unit a block, and the root."""
    kwargs.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    return FSDP(model, **kwargs)


DOORS = ("wrapper", "fully_shard")


def through(door: str, model: nn.Module, **kwargs: Any) -> Any:
    """As ``wrap``, through one of the two front doors."""
    if door == "wrapper":
        return wrap(model, **kwargs)
    return fully_shard(model, policy=ModuleWrapPolicy({Block}), **kwargs)


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Compile what the caches hold once more, so that passes run; C++ headers stay compiled."""
    inductor = torch._inductor.config.patch(fx_graph_cache=False)
    with inductor, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def ddp_losses(rank: int, clip: float | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """The reference: the same run under DistributedDataParallel."""
    model: nn.Module = make_transformer(**kwargs)
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    return train(model, rank, clip=clip)


STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
