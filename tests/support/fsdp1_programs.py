"""Random programs for a comparison with FSDP1: a model, arguments, and a sequence of user calls.

A ``Program`` is data whose ``repr`` rebuilds it. ``draw`` makes the same one of the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from fsdp1_hooks import KINDS as HOOKS
from module_trees import Boundary, Branch, Leaf

Call = tuple[Any, ...]
"""Its name (a method of ``fsdp1_sides.Side``), and its arguments."""

NUM_CALLS = 8


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded and run, and what is done with it.

    Attributes:
        tree: the model.
        policy: where its units are: "none", "custom", "lambda", "module", "size", or "hand".
        strategy: name of the sharding strategy.
        precision: a name in ``fsdp1_sides.PRECISIONS``.
        use_orig_params: as the argument.
        prefetch: ``forward_prefetch`` and the name of ``backward_prefetch``.
        ignored: number of the leaf that is ignored, and the argument that says so.
        momentum: of the optimizer, SGD.
        mode: of running ours; FSDP1 runs eagerly.
        calls: in order.
    """

    tree: Branch
    policy: str = "none"
    strategy: str = "FULL_SHARD"
    precision: str = "none"
    use_orig_params: bool = True
    prefetch: tuple[bool, str | None] = (False, "BACKWARD_PRE")
    ignored: tuple[int, str] | None = None
    momentum: float = 0.0
    mode: str = "eager"
    calls: tuple[Call, ...] = ()


def leaves_of(tree: Leaf | Branch) -> list[Leaf]:
    """In the order of ``modules()``."""
    if isinstance(tree, Leaf):
        return [tree]
    return [leaf for child in tree.children for leaf in leaves_of(child)]


def draw(seed: int, mode: str = "eager", strategies: tuple[str, ...] = ()) -> Program:
    """The program of a seed, in a mode of ours, with one of the strategies named."""
    rng = random.Random(seed)
    policy = rng.choice(["none", "custom", "custom", "lambda", "module", "size", "hand"])
    tree = draw_branch(rng)
    use_orig = mode != "eager" or rng.random() < 0.75
    if not use_orig:
        tree = map_leaves(tree, lambda leaf: replace(leaf, frozen="none"))
    tree = _tie(rng, tree) if policy in ("none", "custom", "hand") else tree
    if policy in ("custom", "lambda", "hand") and not any(_wrapped(tree.children)):
        policy = "none"
    strategy = rng.choice(strategies or ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
    calls = _Calls(rng, use_orig)
    while len(calls.made) < NUM_CALLS:
        calls.add()
    calls.end()
    hook = _hook(seed, mode)
    leaves = len(leaves_of(tree))
    return Program(
        tree,
        policy,
        strategy,
        rng.choice(["none", "none", "none", "wide", "wide reduce", "low", "low reduce", "kept"]),
        use_orig,
        (rng.random() < 0.3, rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None])),
        (rng.randrange(leaves), rng.choice(["ignored_modules", "ignored_states"]))
        if rng.random() < 0.15
        else None,
        rng.choice([0.0, 0.0, 0.9]),
        mode,
        (*hook, *calls.made),
    )


def _hook(seed: int, mode: str) -> tuple[Call, ...]:
    """In one program in eight, a communication hook; a graph refuses them."""
    rng = random.Random(f"hook of {seed}")
    if mode == "graph" or rng.random() >= 1 / 8:
        return ()
    return (("hook", rng.choice(HOOKS)),)


# -- models ------------------------------------------------------------------------------------

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


def map_leaves(tree: Any, change: Callable[[Leaf], Leaf]) -> Any:
    """A tree with other leaves."""
    if isinstance(tree, Leaf):
        return change(tree)
    return replace(tree, children=tuple(map_leaves(child, change) for child in tree.children))


def _wrapped(children: tuple[Leaf | Branch, ...]) -> Iterator[bool]:
    for child in children:
        yield child.wrapped
        if isinstance(child, Branch):
            yield from _wrapped(child.children)


def _tie(rng: random.Random, tree: Branch) -> Branch:
    """Tie leaves of one unit; FSDP1 loses parameters that are tied across units."""
    if rng.random() < 0.7:
        return tree
    found: list[tuple[Leaf, int]] = []  # leaves before, and the unit of each
    units = iter(range(1000))

    def visit(node: Any, unit: int) -> Any:
        own = next(units) if node.wrapped else unit
        if isinstance(node, Branch):
            return replace(node, children=tuple(visit(child, own) for child in node.children))
        same = [
            i
            for i, (other, other_unit) in enumerate(found)
            if other_unit == own
            and (other.kind, other.double, other.frozen) == (node.kind, node.double, node.frozen)
        ]
        found.append((node, own))
        return replace(node, tied_to=rng.choice(same)) if same and node.kind != "nothing" else node

    return replace(tree, children=tuple(visit(child, -1) for child in tree.children))


# -- calls -------------------------------------------------------------------------------------


class _Calls:
    """Draws calls that make sense where they stand; a few do not."""

    def __init__(self, rng: random.Random, use_orig_params: bool) -> None:
        self.made: list[Call] = []
        self._rng = rng
        self._pending = 0  # forwards without a backward
        self._unsynced = False
        between = [self._gradients, self._gradients, self._values, self._states, self._others]
        self._between = between if use_orig_params else [self._whole_gradients, self._states]

    def add(self) -> None:
        rng = self._rng
        if self._pending and rng.random() < 0.9:
            if self._pending == 1 and rng.random() < 0.3:
                self._forward()
            else:
                self._backward()
        elif rng.random() < 0.35:
            self.made.append(("train", self._seed()))
            self._unsynced = False
            self._pending = 0
        elif rng.random() < 0.15:
            self._forward()
        elif rng.random() < 0.2:
            self.made.append(("accumulate", self._seed()))
            self._unsynced = True
        elif rng.random() < 0.3 and (not self._unsynced or rng.random() < 0.1):
            self.made.append(("step",))
        else:
            rng.choice(self._between)()

    def end(self) -> None:
        """Let nothing wait for a backward or a reduction, so that all can be compared."""
        if self._pending:
            self._backward()
        elif self._unsynced:
            self.made.append(("train", self._seed()))

    def _seed(self) -> int:
        return self._rng.randrange(6)

    def _forward(self) -> None:
        self.made.append(("forward", self._seed()))
        self._pending += 1

    def _backward(self) -> None:
        self.made.append(("backward",))
        self._pending, self._unsynced = 0, False

    def _whole_gradients(self) -> None:
        rng = self._rng
        choice = rng.randrange(3)
        if choice == 0:
            self.made.append(("zero_grad", rng.choice(["model", "optimizer"]), rng.random() < 0.5))
            self._unsynced = False
        elif choice == 1:
            kind = rng.choice([1.0, 2.0, 2.0, 3.0, float("inf")])
            self.made.append(("clip", rng.choice([0.05, 100.0]), kind))
        else:
            self.made.append(("predict", self._seed()))

    def _gradients(self) -> None:
        rng = self._rng
        choice = rng.randrange(4)
        if choice < 2:
            self._whole_gradients()
        elif choice == 2:
            self.made.append(("drop_grad", rng.randrange(8)))
        else:
            self.made.append(("scale_grad", rng.randrange(8), rng.choice([0.5, 3.0])))

    def _values(self) -> None:
        rng = self._rng
        name = rng.choice(["set_data", "replace", "freeze", "apply", "summon", "summon", "summon"])
        if name in ("set_data", "replace"):
            self.made.append((name, rng.randrange(8)))
        elif name == "freeze":
            self.made.append((name, rng.randrange(8), rng.random() < 0.5))
        elif name == "apply":
            self.made.append((name,))
        else:
            self.made.append(self._summon())

    def _summon(self) -> Call:
        rng = self._rng
        options = {
            "writeback": rng.random() < 0.7,
            "rank0_only": rng.random() < 0.1,
            "with_grads": rng.random() < 0.4,
            "recurse": rng.random() < 0.85,
        }
        inside = ["read", "read", "write", "write", "write_grad", "forward", "nested", "train"]
        return ("summon", tuple(k for k, v in options.items() if v), rng.choice(inside))

    def _states(self) -> None:
        rng = self._rng
        kind = rng.choice(["FULL", "FULL", "SHARDED", "LOCAL"])
        name = rng.choice(["save", "save", "load", "load", "load_partial", "summon", "names"])
        if name == "load_partial":
            self.made.append((name, rng.randrange(8), rng.random() < 0.7))
        elif name == "summon":
            self.made.append(self._summon())
        elif name == "names":
            self.made.append((name,))
        else:
            self.made.append((name, kind))

    def _others(self) -> None:
        rng = self._rng
        choice = rng.randrange(3)
        if choice == 0:
            self.made.append(("mode", rng.random() < 0.5))
        elif choice == 1:
            self.made.append(("convert", rng.choice(["double", "float", "bfloat16"])))
        else:
            self.made.append(("names",))


def shrunk(program: Program) -> Iterator[Program]:
    """Smaller programs, the smallest change of all first."""
    for i in reversed(range(len(program.calls))):
        yield replace(program, calls=program.calls[:i] + program.calls[i + 1 :])
    plain = Program(program.tree)
    for name in ("precision", "prefetch", "ignored", "momentum", "policy", "strategy", "mode"):
        if getattr(program, name) != getattr(plain, name):
            yield replace(program, **{name: getattr(plain, name)})
    for tree in smaller_trees(program.tree):
        if isinstance(tree, Branch) and leaves_of(tree):
            yield replace(program, tree=tree)


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
