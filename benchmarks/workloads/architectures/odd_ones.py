"""Small models that each do one unusual thing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.workloads.architectures.base import (
    COMMON_SETTINGS,
    Architecture,
    Batch,
    Generator,
    projection,
)

FAMILY = "odd_ones"
DIM = 16


class Block(nn.Module):
    """A residual block, for all models of this file."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks and a head; the models below differ from it in one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


class Scatter(nn.Module):
    """Message passing on a graph: gather by edge, scatter by node."""

    class Layer(nn.Module):
        """Messages along edges, summed at their targets."""

        def __init__(self) -> None:
            super().__init__()
            self.message = nn.Linear(2 * DIM, DIM)
            self.update = nn.Linear(2 * DIM, DIM)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            messages = F.relu(self.message(torch.cat([nodes[source], nodes[target]], -1)))
            places = target[:, None].expand_as(messages)
            total = torch.zeros_like(nodes).scatter_add_(0, places, messages.to(nodes.dtype))
            largest = torch.zeros_like(nodes).scatter_reduce(
                0, places, messages.to(nodes.dtype), "amax"
            )
            return nodes + self.update(torch.cat([total, largest], -1))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scatter.Layer() for _ in range(2))
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.norm(nodes).index_select(0, edges[0])


class Codebook(Blocks):
    """A codebook that is moved in the forward, in the way of vector quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, DIM))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        nearest = torch.cdist(x.float(), self.codes).argmin(-1)
        with torch.no_grad():
            hits = F.one_hot(nearest, 8).float()
            means = hits.T @ x.float() / hits.sum(0).clamp(min=1)[:, None]
            self.codes.lerp_(torch.where(hits.sum(0)[:, None] > 0, means, self.codes), 0.1)
            self.num_calls += 1
        straight = x + (self.codes[nearest] - x).detach()
        return self.head(straight)


class ReplacedBuffer(Blocks):
    """A buffer that the forward replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return self.head(x - self.mean)


class Parametrized(Blocks):
    """Blocks and head with a parametrization of ``torch.nn.utils``."""

    def __init__(self, change: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        for block in self.blocks:
            change(block.up)
        change(self.head)


class TiedWeights(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.argmax(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedBlock(nn.Module):
    """One block at two places, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = self.first
        self.other = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.other(self.second(self.first(x))))


@dataclass
class Result:
    """An output as a dataclass that no pytree knows."""

    logits: Tensor
    hidden: Tensor | None = None
    note: str = ""


class Named(NamedTuple):
    """An output with names."""

    logits: Tensor
    nested: dict[str, Any]


class Output(Blocks):
    """An output of a kind made from logits and hidden state."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self._make = make

    def forward(self, x: Tensor) -> Any:
        x = self.hidden(x)
        return self._make(self.head(x), x)


class InnerOutputs(nn.Module):
    """Blocks that pass a dict with ``None``, a number and a tensor to one another."""

    class Inner(nn.Module):
        """A block from dict to dict."""

        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, state: dict[str, Any], *, scale: float = 1.0) -> dict[str, Any]:
            x = self.block(state["x"]) * scale
            return {"x": x, "empty": None, "count": state["count"] + 1, "all": [*state["all"], x]}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InnerOutputs.Inner() for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"x": x, "empty": None, "count": 0, "all": []}
        for layer in self.layers:
            state = layer(state, scale=0.5)
        return state


class Cache:
    """A cache of keys and values that layers add to."""

    def __init__(self) -> None:
        self.entries: dict[int, Tensor] = {}

    def update(self, index: int, value: Tensor) -> Tensor:
        """Add to one layer's entry; returns it."""
        old = self.entries.get(index)
        self.entries[index] = value if old is None else torch.cat([old, value])
        return self.entries[index]


class Cached(nn.Module):
    """Layers that write into a cache which the model takes and returns."""

    class Layer(nn.Module):
        """A block over all that the cache has for it."""

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.block = Block()

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return x + self.block(cache.update(self.index, x)).mean(0)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached.Layer(i) for i in range(2))

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        cache = Cache() if cache is None else cache
        for _ in range(2):
            for layer in self.layers:
                x = layer(x, cache)
        return x, cache


class Unused(Blocks):
    """A block that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = Block()


class PartlyUsed(Blocks):
    """A layer that no forward uses, in a block that is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].never = nn.Linear(DIM, DIM)


class Branching(nn.Module):
    """A block that uses one of two layers, chosen by the batch, so not the same on all ranks."""

    class Layer(nn.Module):
        """The block."""

        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(DIM, DIM)
            self.right = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.left(x) if x[0, 0] > 0 else self.right(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Branching.Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Checkpointed(Blocks):
    """Activation checkpointing written into the forward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class StraightThrough(Blocks):
    """A custom ``autograd.Function`` between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x + 0.1 * Rounded.apply(4 * x)
        return self.head(x)


class GradientPenalty(Blocks):
    """A loss that holds the gradient of the output by the input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = self.head(self.hidden(x))
        (grad,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        return out.mean() + grad.square().sum()


class Collections(nn.Module):
    """Parameters in lists, dicts and directly on the root; a scalar and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(DIM)) for _ in range(2))
        self.by_name = nn.ParameterDict({"mix": torch.randn(DIM, DIM), "c": torch.randn(3)})
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, DIM))
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.cat([x, self.empty]) @ self.by_name["mix"])
        scale = self.scales[0] + self.scales[1] * self.by_name["c"].sum()
        return x * scale * self.scalar


class Hooked(Blocks):
    """Forward and backward hooks of the user's on modules inside units."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))
            block.register_forward_hook(lambda _, args, out: out + 0.1 * args[0])
            block.down.register_full_backward_hook(lambda _, grads, __: (2 * grads[0],))


class DataDependent(Blocks):
    """A shape that depends on values: rows with a positive sum."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x[x.sum(-1) > -100.0]
        return self.head(self.hidden(rows))


class InPlace(Blocks):
    """In-place operations on what blocks return."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
            x[:, 0] += 1.0
        return self.head(x).relu_()


def _rows(generator: Generator) -> Batch:
    return {"x": torch.randn(4, DIM, generator=generator)}


def _graph(generator: Generator) -> Batch:
    edges = torch.randint(0, 8, (2, 20), generator=generator)
    return {"nodes": torch.randn(8, DIM, generator=generator), "edges": edges}


def _with_cache(generator: Generator) -> Batch:
    cache = Cache()
    cache.update(0, torch.randn(2, DIM, generator=generator))
    return {**_rows(generator), "cache": cache}


def _result_loss(output: Result) -> Tensor:
    return projection([output.logits, output.hidden])


def _first(output: Any) -> Tensor:
    return projection(output[0])


def _model(
    name: str,
    build: Callable[[], nn.Module],
    batch: Callable[[Generator], Batch] = _rows,
    loss: Callable[[Any], Tensor] = projection,
    blocks: tuple[str, ...] = ("Block",),
    settings: tuple[str, ...] = COMMON_SETTINGS,
) -> Architecture:
    return Architecture(name, FAMILY, lambda _: build(), batch, loss, blocks, settings)


def architectures() -> list[Architecture]:
    """The family."""
    return [*_structures(), *_outputs(), *_computations()]


def _structures() -> list[Architecture]:
    norms = {
        "weight_norm": parametrizations.weight_norm,
        "spectral_norm": parametrizations.spectral_norm,
        "orthogonal": parametrizations.orthogonal,
        "weight_norm_old": nn.utils.weight_norm,
        "spectral_norm_old": nn.utils.spectral_norm,
    }
    return [
        *(
            _model(name, lambda change=change: Parametrized(change))
            for name, change in norms.items()
        ),
        _model("tied_weights", TiedWeights),
        _model("shared_block", SharedBlock),
        _model("parameter_collections", Collections),
        _model("unused_block", Unused),
        _model("partly_used_block", PartlyUsed),
        _model("branching_block", Branching, blocks=("Layer",)),
        _model("user_hooks", Hooked),
    ]


def _outputs() -> list[Architecture]:
    only = ("defaults",)
    kinds: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "tuple": lambda y, x: (y, x),
        "list": lambda y, x: [y, x],
        "dict": lambda y, x: {"logits": y, "hidden": x},
        "named_tuple": lambda y, x: Named(y, {"hidden": [x, (y,)]}),
        "nested": lambda y, x: {"a": [y, {"b": (x, None)}], "c": None},
        "not_tensors": lambda y, x: (y, None, 3, "text", 0.5),
    }
    return [
        *(
            _model(f"output_{name}", lambda make=make: Output(make), settings=only)
            for name, make in kinds.items()
        ),
        _model("output_dataclass", lambda: Output(Result), loss=_result_loss, settings=only),
        _model("outputs_of_blocks", InnerOutputs, blocks=("Inner",)),
        _model("cache", Cached, _with_cache, _first, blocks=("Layer",)),
    ]


def _computations() -> list[Architecture]:
    return [
        _model("scatter_network", Scatter, _graph, blocks=("Layer",)),
        _model("codebook", Codebook),
        _model("replaced_buffer", ReplacedBuffer),
        _model("own_checkpoint", Checkpointed),
        _model("autograd_function", StraightThrough),
        _model("gradient_penalty", GradientPenalty, settings=("defaults", "frozen", "inductor")),
        _model("data_dependent_shape", DataDependent),
        _model("in_place", InPlace),
    ]
