"""Random module trees: a strategy that draws them, their modules, and a step with each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from fsdp_dynamo import FSDP, ShardingStrategy
from fsdp_dynamo.wrap_policy import CustomPolicy

WIDTH = 3


@dataclass(frozen=True)
class Leaf:
    """A module with parameters of its own.

    Attributes:
        kind: linear, norm, scale (a bare parameter), or nothing (a module without parameters);
            not drawn here: scalar (a parameter without dimensions), spare (one that no forward
            uses), batchnorm, or buffer (a running mean, which is added).
        bias: whether it has one.
        frozen: which of its parameters are: none, the weight, all.
        double: whether it computes in float64.
        tied_to: number of an earlier leaf of the same kind and dtype whose weight it takes.
        wrapped: whether it is a unit.
    """

    kind: str
    bias: bool = True
    frozen: str = "none"
    double: bool = False
    tied_to: int | None = None
    wrapped: bool = False


@dataclass(frozen=True)
class Branch:
    """Children called one after the other.

    Attributes:
        children: trees.
        residual: whether each child's output is added to its input.
        twice: whether the whole is called twice.
        wrapped: whether it is a unit.
    """

    children: tuple[Leaf | Branch, ...] = field(default=())
    residual: bool = False
    twice: bool = False
    wrapped: bool = False


_leaves = st.builds(
    Leaf,
    kind=st.sampled_from(["linear", "norm", "scale", "nothing"]),
    bias=st.booleans(),
    frozen=st.sampled_from(["none", "none", "weight", "all"]),
    double=st.sampled_from([False, False, True]),
    tied_to=st.none() | st.integers(0, 3),
    wrapped=st.booleans(),
)


def _branches(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Branch]:
    return st.builds(
        Branch,
        children=st.lists(children, min_size=1, max_size=3).map(tuple),
        residual=st.booleans(),
        twice=st.booleans(),
        wrapped=st.booleans(),
    )


trees = _branches(st.recursive(_leaves, _branches, max_leaves=5))


class LeafModule(nn.Module):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__()
        self.leaf = leaf
        self.wants_unit = leaf.wrapped
        dtype = torch.float64 if leaf.double else torch.float32
        if leaf.kind == "linear":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 2)
        elif leaf.kind in ("norm", "scale", "spare", "batchnorm"):
            self.weight = nn.Parameter(1 + torch.randn(WIDTH, dtype=dtype) / 4)
        elif leaf.kind == "scalar":
            self.weight = nn.Parameter(torch.tensor(1.25, dtype=dtype))
        if leaf.kind in ("buffer", "batchnorm"):
            self.register_buffer("mean", torch.randn(WIDTH, dtype=dtype) / 4)
            self.register_buffer("variance", torch.ones(WIDTH, dtype=dtype))
        if leaf.bias and leaf.kind in ("linear", "norm", "batchnorm"):
            self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype) / 4)
        for name, param in self.named_parameters():
            param.requires_grad_(not (leaf.frozen == "all" or leaf.frozen == name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaf.kind in ("nothing", "spare"):
            return x.tanh()
        if self.leaf.kind == "buffer":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
            return x + self.mean.to(x.dtype)
        bias = getattr(self, "bias", None)
        h = x.to(self.weight.dtype)
        if self.leaf.kind == "linear":
            h = nn.functional.linear(h, self.weight, bias)
        elif self.leaf.kind == "norm":
            h = nn.functional.layer_norm(h, (WIDTH,), self.weight, bias)
        elif self.leaf.kind == "batchnorm":
            h = nn.functional.batch_norm(
                h, self.mean, self.variance, self.weight, bias, self.training
            )
        else:
            h = h * self.weight
        return h.to(x.dtype)


class BranchModule(nn.Module):
    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.branch = branch
        self.wants_unit = branch.wrapped
        self.parts = nn.ModuleList(module_of(child) for child in branch.children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + self.branch.twice):
            for part in self.parts:
                x = x + part(x) if self.branch.residual else part(x)
        return x


def module_of(tree: Leaf | Branch) -> nn.Module:
    return BranchModule(tree) if isinstance(tree, Branch) else LeafModule(tree)


def build(tree: Branch) -> nn.Module:
    """The module of a tree, with its weights tied as it says."""
    torch.manual_seed(0)
    module = module_of(tree)
    leaves = [m for m in module.modules() if isinstance(m, LeafModule)]
    for i, leaf in enumerate(leaves):
        other = leaf.leaf.tied_to
        if other is None or other >= i or not hasattr(leaf, "weight"):
            continue
        like = leaves[other]
        if (like.leaf.kind, like.leaf.double) == (leaf.leaf.kind, leaf.leaf.double):
            leaf.weight = like.weight
    return module


def batches(world_size: int) -> Iterator[torch.Tensor]:
    for rank in range(world_size):
        yield torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank))


def wants_unit(module: nn.Module) -> bool:
    return getattr(module, "wants_unit", False)


def run_tree(rank: int, world_size: int, tree: Branch, strategy: str) -> list[str]:
    """Compare outputs, gradients of inputs and parameters, twice over; what was wrong."""
    plain = build(tree)
    has_units = any(wants_unit(m) for m in plain.modules() if m is not plain)
    model = FSDP(
        build(tree),
        auto_wrap_policy=CustomPolicy(wants_unit) if has_units else None,
        sharding_strategy=ShardingStrategy[strategy],
    )
    wrong: list[str] = []
    for step in range(2):
        outputs, inputs = [], [x.requires_grad_() for x in batches(world_size)]
        for x in inputs:
            outputs.append(plain(x))
            (outputs[-1].square().mean() / world_size).backward()
        mine = inputs[rank].detach().clone().requires_grad_()
        output = model(mine)
        output.square().mean().backward()
        if not torch.allclose(output, outputs[rank], 1e-4, 1e-6):
            wrong.append(f"step {step}: output")
        if not torch.allclose(mine.grad, inputs[rank].grad * world_size, 1e-4, 1e-6):
            wrong.append(f"step {step}: gradient of the input")
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            if not torch.equal(p, q):
                wrong.append(f"value of {name}")
            want = torch.zeros_like(q) if q.grad is None else q.grad
            got = torch.zeros_like(p) if p.grad is None else p.grad
            if p.grad is not None and not q.requires_grad:
                wrong.append(f"{name} is frozen and has a gradient")
            if not torch.allclose(got, want, 1e-4, 1e-6):
                wrong.append(f"gradient of {name}")
    return wrong
