"""Random module trees: how they are drawn and made smaller, and their modules."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
import unit_kinds as kinds
from torch import nn
from torch.utils._pytree import register_pytree_node

from fsdp_dynamo import FSDP

WIDTH = 3


@dataclass(frozen=True)
class Boundary:
    """How a module and its caller exchange tensors; ``call`` is the caller's side.

    Attributes:
        container: kind of container for input and output, a key of ``CONTAINERS``.
        view: kind of view that the output is, a key of ``VIEWS``.
        change: the caller's in-place change of the output: ``add_`` or ``relu_``.
        stored: what the module stores as ``aux`` for the loss: ``mean`` or ``tensor``.
        detached: whether the caller detaches the input.
        number: what the module computes with, a key of ``unit_kinds.NUMBERS``.
        result: what it returns, a key of ``unit_kinds.RESULTS``.
        set_by: who sets what those depend on, one of ``unit_kinds.SETTERS``.
        fills: which container it fills, a key of ``unit_kinds.FILLS``.
    """

    container: str | None = None
    view: str | None = None
    change: str | None = None
    stored: str | None = None
    detached: bool = False
    number: str | None = None
    result: str | None = None
    set_by: str = "own"
    fills: str | None = None

    def set(self, module: Any, i: int) -> None:
        """Set what the module's result depends on."""
        for table, name in ((kinds.NUMBERS, self.number), (kinds.RESULTS, self.result)):
            if name is not None:
                table[name][0](module, i)


@dataclass(frozen=True)
class Leaf:
    """A module with parameters of its own.

    Attributes:
        kind: linear, norm, scale (a bare parameter), scalar (one without dimensions), spare (one
            that no forward uses), nothing (no parameters), batchnorm, buffer (a running mean, which
            is added), or, not drawn here, frozen batchnorm.
        bias: whether it has one.
        frozen: which of its parameters are: none, the weight, all.
        double: whether it computes in float64.
        tied_to: number of an earlier leaf of the same kind and dtype whose weight it takes.
        wrapped: whether it is a unit.
        boundary: how it exchanges tensors with its caller.
    """

    kind: str
    bias: bool = True
    frozen: str = "none"
    double: bool = False
    tied_to: int | None = None
    wrapped: bool = False
    boundary: Boundary = Boundary()


@dataclass(frozen=True)
class Branch:
    """Children called one after the other.

    Attributes:
        children: trees.
        residual: whether each child's output is added to its input.
        twice: whether the whole is called twice.
        wrapped: whether it is a unit.
        boundary: how it exchanges tensors with its caller.
    """

    children: tuple[Leaf | Branch, ...] = field(default=())
    residual: bool = False
    twice: bool = False
    wrapped: bool = False
    boundary: Boundary = Boundary()


def leaves_of(tree: Leaf | Branch) -> list[Leaf]:
    """In the order of ``modules()``."""
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for child in tree.children for leaf in leaves_of(child)]


def map_leaves(tree: Any, change: Callable[[Leaf], Leaf]) -> Any:
    """A tree with other leaves."""
    if isinstance(tree, Leaf):
        return change(tree)
    return replace(tree, children=tuple(map_leaves(child, change) for child in tree.children))


def smaller_trees(tree: Any) -> Iterator[Any]:
    """Trees with one thing less."""
    boundary, plain_boundary = tree.boundary, Boundary()
    for one in fields(boundary):
        if getattr(boundary, one.name) != getattr(plain_boundary, one.name):
            less = replace(boundary, **{one.name: getattr(plain_boundary, one.name)})
            yield replace(tree, boundary=less)
    if isinstance(tree, Leaf):
        plain = Leaf(tree.kind, tree.bias, wrapped=tree.wrapped, boundary=boundary)
        if plain != tree:
            yield plain
        if tree.kind not in ("linear", "nothing"):
            yield replace(tree, kind="linear")
        if tree.bias:
            yield replace(tree, bias=False)
        return
    for i, child in enumerate(tree.children):
        before, after = tree.children[:i], tree.children[i + 1 :]
        if before or after:
            yield replace(tree, children=before + after)
        if isinstance(child, Branch):
            yield replace(tree, children=before + child.children + after)
        for smaller in smaller_trees(child):
            yield replace(tree, children=(*before, smaller, *after))
    for name in ("residual", "twice"):
        if getattr(tree, name):
            yield replace(tree, **{name: False})


_KINDS = ["linear"] * 5 + ["norm", "norm", "scale", "nothing", "spare", "batchnorm", "buffer"]


def draw_branch(rng: random.Random, depth: int = 0) -> Branch:
    """A tree without ties."""
    children = tuple(
        draw_branch(rng, depth + 1) if depth < 2 and rng.random() < 0.35 else _leaf(rng)
        for _ in range(rng.randint(1, 3))
    )
    return Branch(
        children,
        residual=rng.random() < 0.4,
        twice=rng.random() < 0.1,
        wrapped=rng.random() < 0.5,
    )


def _leaf(rng: random.Random) -> Leaf:
    kind = rng.choice(_KINDS) if rng.random() > 0.02 else "scalar"
    return Leaf(
        kind,
        bias=rng.random() < 0.5,
        frozen=rng.choice(["none"] * 6 + ["weight", "all"]),
        double=rng.random() < 0.02,
        wrapped=rng.random() < 0.5,
    )


# -- what passes between a module and its caller ------------------------------------------------


@dataclass
class Record:
    x: torch.Tensor
    extra: torch.Tensor
    label: str = "record"


@dataclass(frozen=True)
class FrozenRecord:
    x: torch.Tensor
    extra: torch.Tensor
    label: str = "frozen record"


class Named(NamedTuple):
    x: torch.Tensor
    extra: torch.Tensor


class Registered:
    """A class that torch's pytree knows."""

    def __init__(self, x: torch.Tensor, extra: torch.Tensor) -> None:
        self.x, self.extra = x, extra


register_pytree_node(
    Registered,
    lambda one: ([one.x, one.extra], None),
    lambda values, _: Registered(*values),
    serialized_type_name="module_trees.Registered",
)


def _fields(one: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return one.x, one.extra


_Pack = Callable[[torch.Tensor, torch.Tensor], Any]
_Unpack = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
CONTAINERS: dict[str, tuple[_Pack, _Unpack]] = {
    "dataclass": (Record, _fields),
    "frozen dataclass": (FrozenRecord, _fields),
    "named tuple": (Named, _fields),
    "OrderedDict": (
        lambda x, extra: OrderedDict([("x", x), ("extra", extra)]),
        lambda one: (one["x"], one["extra"]),
    ),
    "nested": (
        lambda x, extra: {"all": [x, {"extra": extra, "none": None}], "label": "nested"},
        lambda one: (one["all"][0], one["all"][1]["extra"]),
    ),
    "pytree": (Registered, _fields),
}
"""How two tensors are packed, and unpacked."""

VIEWS: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "squeeze": (lambda y: y[None].squeeze(0), lambda view: view),
    "flatten": (lambda y: y.flatten(), lambda view: view.unflatten(0, (-1, WIDTH))),
    "slice": (lambda y: torch.cat([y, y])[: len(y)], lambda view: view),
    "transpose": (lambda y: y.t(), lambda view: view.t()),
}
"""A view of a module's output, and its inverse."""


def call(
    boundary: Boundary, module: Callable[..., Any], x: torch.Tensor, *filled: Any
) -> torch.Tensor:
    """Call a module as its boundary says; the module may fill what is given besides.

    Returns:
        Its output, outside the container, in the shape of ``x``.
    """
    x = x.detach() if boundary.detached else x
    extra = None
    if boundary.container is None:
        y = module(x, *filled)
        y = y if boundary.result is None else kinds.of_result(y, x.dtype)
    else:
        pack, unpack = CONTAINERS[boundary.container]
        y, extra = unpack(module(pack(x, 0.25 * x)))
    if boundary.change == "add_":
        y += 0.5
    elif boundary.change == "relu_":
        y = 1.0 * y.relu_()  # relu_ saves its output, which the next caller may change
    if boundary.view is not None:
        y = VIEWS[boundary.view][1](y)
    return y if extra is None else y + extra


class _Node(nn.Module):
    """The module's side of its boundary around ``compute``."""

    def __init__(self, tree: Leaf | Branch) -> None:
        super().__init__()
        self.wants_unit, self.boundary = tree.wrapped, tree.boundary
        self.aux: torch.Tensor | None = None
        self.step = 0

    def forward(self, given: Any, *filled: Any) -> Any:
        boundary, x = self.boundary, given
        if boundary.container is not None:
            pack, unpack = CONTAINERS[boundary.container]
            x, extra = unpack(given)
            x = x + extra
        y = self.compute(x)
        if boundary.stored is not None:
            self.aux = y.mean() if boundary.stored == "mean" else y
            y = y.sin()  # so that the loss reaches the module other than through its output
        if boundary.number is not None:
            y = kinds.NUMBERS[boundary.number][1](self, y)
        if boundary.fills is not None:
            y = kinds.FILLS[boundary.fills][1](self, filled, y)
        if boundary.result is not None:
            return kinds.RESULTS[boundary.result][1](self, y)
        shown = y if boundary.view is None else VIEWS[boundary.view][0](y)
        return shown if boundary.container is None else pack(shown, -0.25 * y)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def nodes_of(module: nn.Module) -> list[Any]:
    """Modules of a tree's nodes."""
    return [m for m in module.modules() if isinstance(m, _Node)]


def take_stored(module: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules stored in their last forward; removes them."""
    stored = []
    for node in nodes_of(module):
        stored += [*([] if node.aux is None else [node.aux]), *node.seen]
        node.aux, node.seen = None, []
    return stored


def set_step(module: nn.Module, step: int) -> None:
    """Set what results of modules depend on before a forward of a step."""
    for i, node in enumerate(nodes_of(module)):
        node.step = step
        node.boundary.set(node, step + (0 if node.boundary.set_by == "common" else i))


NORMS = ("batchnorm", "frozen batchnorm")
"""Batch norms; the frozen one never uses statistics of a batch."""


class LeafModule(_Node):
    def __init__(self, leaf: Leaf) -> None:
        super().__init__(leaf)
        self.leaf = leaf
        dtype = torch.float64 if leaf.double else torch.float32
        if leaf.kind == "linear":
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=dtype) / 2)
        elif leaf.kind in ("norm", "scale", "spare", *NORMS):
            self.weight = nn.Parameter(1 + torch.randn(WIDTH, dtype=dtype) / 4)
        elif leaf.kind == "scalar":
            self.weight = nn.Parameter(torch.tensor(1.25, dtype=dtype))
        if leaf.kind in ("buffer", *NORMS):
            self.register_buffer("mean", torch.randn(WIDTH, dtype=dtype) / 4)
            self.register_buffer("variance", torch.ones(WIDTH, dtype=dtype))
        if leaf.bias and leaf.kind in ("linear", "norm", *NORMS):
            self.bias = nn.Parameter(torch.randn(WIDTH, dtype=dtype) / 4)
        for name, param in self.named_parameters():
            param.requires_grad_(not (leaf.frozen == "all" or leaf.frozen == name))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.leaf.kind in ("nothing", "spare"):
            return x.sin()  # its output, which the caller may change, is not saved for backward
        if self.leaf.kind == "buffer":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean(0).to(self.mean.dtype), 0.1)
            return x + self.mean.to(x.dtype)
        bias = getattr(self, "bias", None)
        in_container = self.leaf.boundary.container is not None  # where the unit casts, or nobody
        h = x if in_container and not self.leaf.double else x.to(self.weight.dtype)
        if self.leaf.kind == "linear":
            h = nn.functional.linear(h, self.weight, bias)
        elif self.leaf.kind == "norm":
            h = nn.functional.layer_norm(h, (WIDTH,), self.weight, bias)
        elif self.leaf.kind in NORMS:
            by_batch = self.training and self.leaf.kind == "batchnorm"
            h = nn.functional.batch_norm(h, self.mean, self.variance, self.weight, bias, by_batch)
        else:
            h = h * self.weight
        return h.to(x.dtype)


class BranchModule(_Node):
    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self.branch = branch
        self.parts = nn.ModuleList(module_of(child) for child in branch.children)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        found: dict[type, Any] = {list: [], dict: {}}
        for _ in range(1 + self.branch.twice):
            for i, (child, part) in enumerate(zip(self.branch.children, self.parts, strict=True)):
                boundary = child.boundary
                if boundary.set_by == "caller":
                    boundary.set(part.module if isinstance(part, FSDP) else part, i + self.step)
                kind = None if boundary.fills is None else kinds.FILLS[boundary.fills][0]
                y = call(boundary, part, x, *([] if kind is None else [found[kind]]))
                x = x + y if self.branch.residual else y
        return kinds.of_filled(list(found.values()), x)


def module_of(tree: Leaf | Branch) -> nn.Module:
    return BranchModule(tree) if isinstance(tree, Branch) else LeafModule(tree)


def build(tree: Branch) -> nn.Module:
    """The module of a tree, with its weights tied as it says."""
    torch.manual_seed(0)
    module = module_of(tree)
    config = kinds.Config()
    for node in nodes_of(module):
        kinds.init(node, config)
    leaves = [m for m in module.modules() if isinstance(m, LeafModule)]
    for i, leaf in enumerate(leaves):
        other = leaf.leaf.tied_to
        if other is None or other >= i or not hasattr(leaf, "weight"):
            continue
        like = leaves[other]
        if (like.leaf.kind, like.leaf.double) == (leaf.leaf.kind, leaf.leaf.double):
            leaf.weight = like.weight
    return module


def wants_unit(module: nn.Module) -> bool:
    return getattr(module, "wants_unit", False)
