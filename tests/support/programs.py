"""Sequences of user's calls on a random model, against the same calls on one process or FSDP1.

A ``Program`` is data whose ``repr`` rebuilds it, so that it can be made smaller and kept.
"""

from __future__ import annotations

import copy
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import module_trees as trees
import torch
import torch.distributed as dist
import unit_kinds
from modes import in_mode
from module_trees import draw_branch, leaves_of, map_leaves, smaller_trees
from pool import RankFailedError, RankPool
from torch import nn
from torch.distributed import fsdp as fsdp1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import wrap as fsdp1_policies
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import fsdp_dynamo
from fsdp_dynamo import FSDP, FSDPStateError, checkpoint, wrap_policy
from fsdp_dynamo.errors import DivergenceError, FSDPError

Call = tuple[Any, ...]
"""Its name, and its arguments."""


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded and run, and what is done with it.

    Attributes:
        tree: the model.
        strategy: name of the sharding strategy.
        mode: of running it.
        precision: a key of ``PRECISIONS``; one process may compute in another one.
        calls: in order; those that make no sense where they stand are left out when it runs.
        policy: where units are: where the tree says ("custom"), there but wrapped one by one, the
            innermost first, and none tied ("hand"), or leaves ("module").
        in_float64: whether parameters and inputs are, so that rounding explains no difference.
        teacher: a copy of the model whose output is the target: another sharded ``model``, a
            ``unit`` beside the student, one of the ``called units`` of a root that is not called,
            or one that the root ``moves`` towards the student between their forwards.
        freezes_teacher: whether its parameters are frozen.
        beside_fsdp1: whether the reference is FSDP1, which runs eagerly.
        prefetch: ``forward_prefetch`` and the name of ``backward_prefetch``; none: the defaults.
        ignored: number of the leaf that is ignored, and the argument that says so.
    """

    tree: trees.Branch
    strategy: str
    mode: str
    precision: str
    calls: tuple[Call, ...]
    policy: str = "custom"
    in_float64: bool = False
    teacher: str = "none"
    freezes_teacher: bool = True
    beside_fsdp1: bool = False
    prefetch: tuple[bool, str | None] | None = None
    ignored: tuple[int, str] | None = None


_WIDE, _LOW = torch.float64, torch.bfloat16
PRECISIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "wide": {"param_dtype": _WIDE, "reduce_dtype": _WIDE},
    "wide reduce": {"reduce_dtype": _WIDE},
    "low": {"param_dtype": _LOW},
    "low reduce": {"reduce_dtype": _LOW},
    "kept": {"param_dtype": _LOW, "reduce_dtype": _LOW, "keep_low_precision_grads": True},
}
"""Arguments of mixed precision."""


def draw(seed: int) -> Program:
    """The program of a seed; one in three has units whose results depend on more than inputs."""
    rng = random.Random(f"units {seed}")
    return _draw_units(rng) if rng.random() < 1 / 3 else _draw_themes(seed)


def _draw_units(rng: random.Random) -> Program:
    """Equal units, or almost, one after another, and steps between which numbers change."""
    normed = rng.random() < 0.25
    hooks = "hooks-inductor" if normed else "hooks"
    kinds = trees.NORMS if normed else ("linear", "norm", "scale")
    unit: Any = trees.Leaf(rng.choice(["linear", "linear", *kinds]), boundary=_unit_boundary(rng))
    if rng.random() < 0.3:
        inner = trees.Leaf("linear", wrapped=rng.random() < 0.5, boundary=_unit_boundary(rng))
        first = trees.Leaf(rng.choice(kinds))
        unit = trees.Branch((first, inner), boundary=_unit_boundary(rng))
    units = [replace(unit, wrapped=True)] * rng.choice([2, 3, 3, 4])
    if rng.random() < 0.3:
        units[-1] = replace(units[-1], boundary=_unit_boundary(rng))
    ends = [trees.Leaf(rng.choice(["linear", "nothing", *kinds])) for _ in range(2)]
    linear, sine = trees.Leaf("linear"), trees.Leaf("nothing")
    children: tuple[Any, ...] = (linear, ends[0], sine, *units, ends[1])
    if normed:  # a segment of the root with a batch norm before each unit
        before = (trees.Leaf("frozen batchnorm"), sine)
        middle = [one for unit in units for one in (*before, unit)]
        children = (linear, *middle, linear, sine, linear, sine)
    calls: list[Call] = []
    for step in range(3):
        forward = ("forward", rng.choice([0, 3]), 5)
        calls.append(("set_step", step))
        if rng.random() < 0.2:
            calls.append(("train", rng.random() < 0.5))
        if rng.random() < 0.1:
            calls.append(("forward_without_grad", *forward[1:]))
        calls += [forward, ("backward",), ("step",), ("zero_grad", rng.random() < 0.7)]
    return Program(
        trees.Branch(children, rng.random() < 0.2),
        rng.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        rng.choice(["eager", hooks, hooks, "graph", "graph"]),
        _wide(not normed and rng.random() < 0.1),  # the reference's buffers would not be widened
        (*calls, ("state_dict",)),
        _by_hand(rng),
    )


def _wide(is_wide: bool) -> str:
    return "wide" if is_wide else "none"


def _by_hand(rng: random.Random) -> str:
    return "hand" if rng.random() < 0.3 else "custom"


def _unit_boundary(rng: random.Random) -> trees.Boundary:
    def some(table: Iterable[str], chance: float) -> str | None:
        return rng.choice([*table]) if rng.random() < chance else None

    return trees.Boundary(
        number=some(unit_kinds.NUMBERS, 0.6),
        result=some(unit_kinds.RESULTS, 0.4),
        set_by=rng.choice(unit_kinds.SETTERS),
        fills=some(unit_kinds.FILLS, 0.4),
    )


def _draw_themes(seed: int) -> Program:
    """A program of which two in three have a theme."""
    program = _draw_plain(seed)
    rng = random.Random(f"themes {seed}")
    if rng.random() < 1 / 3:
        return program
    themes = rng.sample(_THEMES, rng.choice([1, 2]))
    tree = _with_boundaries(rng, program.tree, themes)
    mode = rng.choice(["eager", "eager", "eager", "hooks", "graph"])
    program = replace(
        program,
        tree=replace(tree, boundary=replace(tree.boundary, detached=False)),
        mode=mode,
        precision=_wide(rng.random() < (0.6 if "containers" in themes else 0.2)),
        calls=tuple(
            call
            for _ in range(5 if mode == "eager" else 3)
            for call in _draw_themed(rng, themes, mode == "eager")
        ),
    )
    if program.strategy == "SHARD_GRAD_OP":  # keeps what it has gathered: documented
        unseen = (".data.mul_", ".data =")
        seen = [["lerp_" if a in unseen else a for a in call] for call in program.calls]
        program = replace(program, calls=tuple(map(tuple, seen)))
    if mode == "graph":  # what a loss does not reach has zeros, as under plain torch.compile
        reached = [
            ["both" if a in ("aux", "output") else a for a in call] for call in program.calls
        ]
        program = replace(program, calls=tuple(map(tuple, reached)))
    if "teacher" not in themes:
        return program
    teacher = rng.choice(["model", "unit", "called units", "moves"])
    # The reference would move copies, and inputs are cast at the root.
    is_widened = program.precision == "wide" and teacher not in ("moves", "called units")
    return replace(
        program,
        teacher=teacher,
        precision=_wide(is_widened),
        # Units that differ in what is frozen are cut differently: no move fits their shards.
        freezes_teacher=all(leaf.frozen == "none" for leaf in leaves_of(tree)),
    )


def _with_boundaries(rng: random.Random, tree: Any, themes: Sequence[str]) -> Any:
    """A tree with more units, whose boundaries are those of the themes."""

    def some(theme: str, values: Sequence[str]) -> str | None:
        return rng.choice(values) if theme in themes and rng.random() < 0.6 else None

    boundary = trees.Boundary(
        container=some("containers", [*trees.CONTAINERS]),
        view=some("views", [*trees.VIEWS]),
        change=some("views", ["add_", "relu_"]),
        stored=some("stored", ["mean", "tensor"]),
        detached="stored" in themes and rng.random() < 0.3,
    )
    tree = replace(tree, boundary=boundary, wrapped=tree.wrapped or rng.random() < 0.5)
    if isinstance(tree, trees.Leaf):
        return tree
    children = tuple(_with_boundaries(rng, child, themes) for child in tree.children)
    return replace(tree, children=children)


def _draw_themed(
    rng: random.Random, themes: Sequence[str], changes_sizes: bool
) -> tuple[Call, ...]:
    """Calls that belong to one of the themes, or any; in compiled modes sizes take long."""
    theme = rng.choice([*themes, *themes, "any"] if changes_sizes else themes)
    forward = ("forward", rng.randrange(6), rng.choice([2, 2, 5]))
    if not changes_sizes:
        forward = ("forward", rng.choice([0, 3]), 2)
    number, how = rng.choice([-1, *range(8)]), rng.choice([*CHANGES])
    backward = (rng.choice(["backward", "backward", "backward_each"]),)
    before: tuple[Call, ...]
    end = (backward, ("step",), ("zero_grad", rng.random() < 0.7))
    if theme == "stored":
        return ((*forward, rng.choice(["aux", "output", "both"])), *end)
    if theme == "teacher":
        before = (("ema", how),) if rng.random() < 0.6 else ()
        return (*before, (*forward, "both", rng.choice([None, *CHANGES])), *end)
    if theme == "changed":
        change = ("change", number, how)
        without = ("forward_without_grad", *forward[1:])
        before = rng.choice([(), (without,), (forward, ("forget",)), (forward, ("forget",))])
        return (*before, change, forward, *end)
    if theme == "frozen":
        freezes = rng.random() < 0.7
        change, back = ("freeze_between", number, freezes), ("freeze", number, not freezes)
        return (*rng.choice([(forward,), (forward, forward)]), change, *end, back)
    return (forward, *end) if theme != "any" else _draw_calls(rng)


def _draw_plain(seed: int) -> Program:
    rng = random.Random(f"program {seed}")
    tree = map_leaves(draw_branch(rng), lambda leaf: replace(leaf, kind=_stateless(leaf.kind)))
    number = len(leaves_of(tree))
    tree = map_leaves(
        tree, lambda leaf: replace(leaf, tied_to=rng.choice([None, None, *range(number)]))
    )
    return Program(
        tree,
        rng.choice(["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        rng.choice(["eager", "eager", "hooks", "graph"]),
        _wide(rng.random() < 0.3),
        tuple(call for _ in range(_NUM_CALLS) for call in _draw_calls(rng)),
        _by_hand(rng),
    )


_NUM_CALLS = 10
_THEMES = ("views", "stored", "containers", "changed", "frozen", "teacher")
_RECOMPILE_LIMIT = 64
"""More than Dynamo's, beyond which the modules' common ``forward`` is not compiled at all."""
_MAX_OUTPUT = 1e6
"""Of the reference: beyond it, rounding and overflows differ, and the program ends."""
_MAX_GRADIENT = 100.0
"""Of the reference: a step of more may end where models magnify rounding a billion times."""


def _stateless(kind: str) -> str:
    """Another kind for those whose buffers would see all ranks' inputs in the reference."""
    return {"batchnorm": "norm", "buffer": "nothing"}.get(kind, kind)


def _draw_calls(rng: random.Random) -> tuple[Call, ...]:
    """One call, or a few that users write together."""
    seed, rows = rng.randrange(6), rng.choice([2, 2, 5])
    step = (("forward", seed, rows), ("backward",), ("step",))
    return rng.choice(
        [
            step,
            (*step, ("zero_grad", rng.random() < 0.5)),
            (("forward", seed, rows),),
            (("backward",),),
            (("forward_without_grad", seed, rows),),
            (("accumulate", seed, rows),),
            (("clip", rng.choice([0.01, 1e3])),),
            (("step",),),
            (("zero_grad", rng.random() < 0.5),),
            ((rng.choice(["summon", "state_dict", "load", "deepcopy"]),),),
            (("save_checkpoint",),),
            (("load_checkpoint",),),
            (("freeze", rng.randrange(8), rng.random() < 0.6),),
            (("fail_in_forward",),),
            (("fail_in_backward", seed, rng.choice(["input", "output"])),),
            (("train", rng.random() < 0.5),),
        ]
    )


# -- beside FSDP1 --------------------------------------------------------------------------------

STRATEGIES = ("FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


def draw_beside_fsdp1(
    seed: int, mode: str = "eager", strategies: Sequence[str] = STRATEGIES
) -> Program:
    """The program of a seed for a comparison with FSDP1, in a mode of ours.

    It has nothing in which the two are known to differ: docs/migration.md lists that.
    """
    rng = random.Random(f"FSDP1 {seed}")
    precision = rng.choice(["none", "none", *PRECISIONS])
    is_cast = "param_dtype" in PRECISIONS[precision]
    tree = map_leaves(draw_branch(rng), lambda leaf: _as_fsdp1_can(leaf, is_cast))
    policy = rng.choice(["custom", "custom", "module", "hand"])
    number = len(leaves_of(tree))
    if not any(child.wrapped for child in _below(tree)):  # FSDP1 loses ties between units
        policy = "custom"
        tied = [rng.choice([None, None, *range(number)]) for _ in range(number)]
        tree = map_leaves(tree, lambda leaf: replace(leaf, tied_to=tied.pop(), frozen="none"))
    strategy = rng.choice(strategies)
    calls = [call for _ in range(_NUM_CALLS) for call in _draw_calls_beside_fsdp1(rng)]
    prefetch = (
        rng.random() < 0.3,
        rng.choice(["BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", None]),
    )
    ignored = None
    if rng.random() < 0.15:
        ignored = (rng.randrange(number), rng.choice(["ignored_modules", "ignored_states"]))
        # Its gradients differ between ranks, so each rank would clip by a norm of its own.
        calls = [call for call in calls if call[0] != "clip"]
    if strategy == "NO_SHARD":  # where FSDP1's frozen parameters vanish, and it sees new data late
        tree = map_leaves(tree, lambda leaf: replace(leaf, frozen="none"))
        calls = [(*call[:2], "lerp_") if ".data =" in call else call for call in calls]
    return Program(
        tree,
        strategy,
        mode,
        precision,
        tuple(calls),
        policy,
        beside_fsdp1=True,
        prefetch=prefetch,
        ignored=ignored,
    )


def _as_fsdp1_can(leaf: trees.Leaf, is_cast: bool) -> trees.Leaf:
    """Another leaf for those that FSDP1 refuses, and those whose gradients it makes zeros."""
    kinds = {"scalar": "linear", "spare": "nothing"}
    if is_cast:  # but for buffers
        kinds["batchnorm"] = "norm"
    return replace(leaf, kind=kinds.get(leaf.kind, leaf.kind), double=False)


def _below(tree: Any) -> Iterator[Any]:
    for child in getattr(tree, "children", ()):
        yield child
        yield from _below(child)


def _draw_calls_beside_fsdp1(rng: random.Random) -> tuple[Call, ...]:
    """Calls that users write together; none leaves gradients that wait for a reduction."""
    seed, rows = rng.randrange(6), rng.choice([2, 5])
    forward, number = ("forward", seed, rows), rng.choice([-1, *range(8)])
    train = (forward, ("backward",))
    clip = ("clip", rng.choice([0.05, 100.0]), rng.choice([1.0, 2.0, 3.0, float("inf")]))
    return rng.choice(
        [
            (*train, ("step",), ("zero_grad", rng.random() < 0.5)),
            (*train, ("step",)),
            train,
            (forward, *train, ("step",)),
            (("accumulate", seed, rows), *train, ("step",)),
            (("forward_without_grad", seed, rows), *train),
            (*train, clip),
            (*train, ("scale_gradient", number, rng.choice([0.5, 3.0])), ("step",)),
            (("change", number, rng.choice([*CHANGES])),),
            (("write",),),
            (("state_dict",),),
            (("load",),),
            (("summon",),),
            (("train", rng.random() < 0.5),),
        ]
    )


# -- models --------------------------------------------------------------------------------------


def sharded(
    program: Program, inner: nn.Module, package: Any = fsdp_dynamo, **arguments: Any
) -> Any:
    """The model, sharded by this package or by FSDP1."""
    is_ours = package is fsdp_dynamo
    precision = PRECISIONS[program.precision]
    arguments |= {
        "sharding_strategy": package.ShardingStrategy[program.strategy],
        "mixed_precision": package.MixedPrecision(**precision) if precision else None,
    }
    if not is_ours:
        arguments |= {"use_orig_params": True, "device_id": torch.device("cpu")}
    if "HYBRID" in program.strategy:
        arguments["device_mesh"] = init_device_mesh("cpu", (2, 2))
    if program.prefetch is not None:
        forward, backward = program.prefetch
        arguments["forward_prefetch"] = forward
        arguments["backward_prefetch"] = backward and package.BackwardPrefetch[backward]
    ignored: list[nn.Module] = []
    if program.ignored is not None:
        number, argument = program.ignored
        leaves = [m for m in inner.modules() if isinstance(m, trees.LeafModule)]
        ignored = [leaves[number % len(leaves)]]
        arguments[argument] = ignored
    wrap, policies = package.FullyShardedDataParallel, wrap_policy if is_ours else fsdp1_policies
    others = [m for m in inner.modules() if m is not inner and m not in ignored]
    policy = None
    if program.policy == "hand":
        for parent in reversed(list(inner.modules())):
            for name, child in list(parent.named_children()):
                if trees.wants_unit(child):
                    setattr(parent, name, wrap(child, **arguments))
    elif program.policy == "module" and any(isinstance(m, trees.LeafModule) for m in others):
        policy = policies.ModuleWrapPolicy({trees.LeafModule})
    elif program.policy == "custom" and any(map(trees.wants_unit, others)):
        policy = policies.CustomPolicy(trees.wants_unit)
    return wrap(inner, auto_wrap_policy=policy, **arguments)


def built(program: Program) -> nn.Module:
    """The plain model. Of units wrapped one by one, none may hold a parameter of another."""
    tree = program.tree
    if program.policy == "hand":
        tree = map_leaves(tree, lambda leaf: replace(leaf, tied_to=None))
    module = trees.build(tree)
    if program.teacher not in ("none", "model"):
        module = _Distilled(program, module)
    return module.double() if program.in_float64 else module


def _teacher_of(program: Program, student: nn.Module) -> nn.Module:
    """A copy with other values."""
    teacher = copy.deepcopy(student)
    for param in teacher.parameters():
        param.data.mul_(0.75)
        if program.freezes_teacher:
            param.requires_grad_(False)
    return teacher


class _Distilled(nn.Module):
    """Student and teacher, two units; returns the difference of their outputs."""

    def __init__(self, program: Program, student: nn.Module) -> None:
        super().__init__()
        self.boundary, self.moves = program.tree.boundary, program.teacher == "moves"
        self.student, self.teacher = student, _teacher_of(program, student)
        self.student.wants_unit = self.teacher.wants_unit = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = trees.call(self.boundary, self.student, x)
        with torch.no_grad():
            if self.moves:
                _move("lerp_", self.teacher.parameters(), self.student.parameters())
            target = trees.call(self.boundary, self.teacher, x)
        return y - target


def _move(how: str, parameters: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    """Change parameters in one of the ways of ``CHANGES``."""
    with torch.no_grad():
        for param, other in zip(list(parameters), list(others), strict=True):
            CHANGES[how](param, other)


def _set_data(param: torch.Tensor, other: torch.Tensor) -> None:
    moved = torch.lerp(param.data, other.data, 0.25)
    if isinstance(param, DTensor):  # which takes no other data
        param.data.copy_(moved)
    else:
        param.data = moved


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "lerp_": lambda param, other: param.lerp_(other, 0.25),
    "copy_": lambda param, other: param.copy_(0.75 * param + 0.25 * other),
    ".data =": _set_data,
    ".data.mul_": lambda param, other: param.data.mul_(0.75).add_(other.data, alpha=0.25),
}
"""Ways in which users move a parameter a quarter of the way to another."""


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """SGD, which sees the scale of gradients, with a state."""
    parameters = list(model.parameters())
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5) if parameters else None


class _Losses(NamedTuple):
    """Of the reference and of the sharded model, and the inputs of both on this rank."""

    theirs: torch.Tensor
    mine: torch.Tensor
    x: torch.Tensor
    own_x: torch.Tensor


class _Pair:
    """The sharded model of this rank, and the reference, which does what all ranks do."""

    def __init__(self, program: Program, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, Path(folder)
        self.mode, self.is_widened = program.mode, program.precision == "wide"
        self.dtype = torch.float64 if program.in_float64 else torch.float32
        self.is_low = program.precision in ("low", "low reduce", "kept")
        self.ranks_in_loss = world_size
        self.plain = self._make_reference(program)
        self.model = sharded(program, built(program))
        self.calls_units = program.teacher == "called units"
        in_one = program.teacher not in ("none", "model")
        self.boundary = (
            trees.Boundary() if in_one and not self.calls_units else program.tree.boundary
        )
        self.teachers: tuple[nn.Module, ...] = ()
        if program.teacher == "model":
            plain = _teacher_of(program, self.plain)
            self.teachers = sharded(program, copy.deepcopy(plain)), plain
        self.kinds = _kinds_of(program)
        self.changed: set[str] = set()
        self.due: set[str] = set()
        self.ran: Counter[str] = Counter()
        self.saved: list[Any] = []
        self._begin()
        self.moves = program.teacher == "moves"
        self.step_number = 0
        self.local = [_local_of(self.plain) for _ in range(world_size)]
        self.losses: list[_Losses] = []
        self.is_unsynced = False
        self.wrong: list[str] = []
        self.has_left_range = False

    # -- what can be called; each is left out where it makes no sense

    def forward(self, seed: int, rows: int = 2, loss: str = "both", ema: str | None = None) -> None:
        """A forward; ``loss`` says whether that of ``output``, of ``aux``, or ``both`` counts."""
        if len(self.losses) < 2:
            self.losses.append(self._both(seed, rows, loss, ema))

    def forget(self) -> None:
        """Drop what waits for a backward."""
        self.losses = []
        self.due.clear()

    def forward_without_grad(self, seed: int, rows: int = 2) -> None:
        with torch.no_grad():
            self._both(seed, rows)

    def backward(self, each: bool = False) -> None:
        pending, self.losses = self.losses, []
        for some in [[both] for both in pending] if each else [pending]:
            self._backward(some)
        self.is_unsynced &= not any(both.mine.requires_grad for both in pending)
        if any(both.mine.requires_grad for both in pending):
            self.ran.update(self.kinds | self.due)
        self.due.clear()

    def backward_each(self) -> None:
        """One backward for each forward."""
        if len(self.losses) > 1:
            self.due.add("two backwards")
        self.backward(each=True)

    def accumulate(self, seed: int, rows: int = 2) -> None:
        if not self.losses:
            with self.model.no_sync(), getattr(self.plain, "no_sync", nullcontext)():
                both = self._both(seed, rows)
                self._backward([both])
            self.is_unsynced |= both.mine.requires_grad

    def clip(self, largest: float, kind: float = 2.0) -> None:
        if self._is_settled():
            mine = self.model.clip_grad_norm_(largest, kind)
            self._compare("norm", mine, self._clip_reference(largest, kind))

    def scale_gradient(self, number: int, factor: float) -> None:
        """Change the gradient of a parameter, or of all (-1)."""
        for model in (self.model, self.plain):
            for param in _some(list(model.parameters()), number):
                if param.grad is not None:
                    param.grad.mul_(factor)

    def step(self) -> None:
        gradients = [param.grad for param in self.plain.parameters() if param.grad is not None]
        if any(not grad.abs().max() < _MAX_GRADIENT for grad in gradients if grad.numel()):
            self.has_left_range = True
        elif self._is_settled():
            for optimizer in self.optimizers:
                if optimizer is not None:
                    optimizer.step()

    def zero_grad(self, to_none: bool) -> None:
        if self._is_settled():
            self.model.zero_grad(to_none)
            self.plain.zero_grad(to_none)

    def summon(self) -> None:
        with (
            FSDP.summon_full_params(
                self.model, with_grads=self.compares_gradients, writeback=False
            ),
            self._whole_reference(writeback=False),
        ):
            theirs = dict(self._named_reference())
            for name, p in self.model.named_parameters():
                q = theirs.pop(name)
                self._compare(f"value of {name}", p, q)
                mine, wanted = (self._gradient_of(one) for one in (p, q))
                if self.is_unsynced or not self.compares_gradients:
                    continue
                if mine is None or wanted is None:
                    if mine is not wanted:
                        self.wrong.append(f"one gradient of {name} is None")
                else:
                    self._compare(f"gradient of {name}", mine, wanted)
            if theirs:
                self.wrong.append(f"no parameters {[*theirs]}")

    def write(self) -> None:
        """Change whole parameters."""
        if self._is_settled():
            with FSDP.summon_full_params(self.model), self._whole_reference(), torch.no_grad():
                for model in (self.model, self.plain):
                    for param in model.parameters():
                        param.mul_(0.75)

    def state_dict(self) -> None:
        theirs = self.plain.state_dict()
        mine = self.model.state_dict()
        if list(mine) != list(theirs):
            self.wrong.append(f"keys {list(mine)}, expected {list(theirs)}")
            return
        for name, value in theirs.items():
            self._compare(f"state of {name}", mine[name], value)

    def load(self) -> None:
        if self._is_settled():
            state = {name: value * 0.75 for name, value in self.plain.state_dict().items()}
            self.model.load_state_dict(state)
            self.plain.load_state_dict(state)

    def set_step(self, step: int) -> None:
        """Set the step of which the next forwards are."""
        self.step_number = step

    def train(self, mode: bool) -> None:
        self.model.train(mode)
        self.plain.train(mode)

    def deepcopy(self) -> None:
        if not self.losses and not self.is_unsynced:
            self.model, self.plain = copy.deepcopy((self.model, self.plain))
            self._begin()

    def save_checkpoint(self) -> None:
        if self._is_settled():
            mine, theirs = self.optimizers
            states = self.plain.state_dict(), theirs and theirs.state_dict()
            self.saved.append(copy.deepcopy(states))
            checkpoint.save(self.folder, self.model, _listed(mine), step=len(self.saved))

    def load_checkpoint(self) -> None:
        if self._is_settled() and self.saved:
            mine, theirs = self.optimizers
            checkpoint.load(self.folder, self.model, _listed(mine))
            values, state = self.saved[-1]
            self.plain.load_state_dict(values)
            if theirs is not None:
                theirs.load_state_dict(copy.deepcopy(state))

    def freeze(self, number: int, frozen: bool) -> None:
        """Freeze or train a parameter, or all (-1)."""
        both = list(zip(self.model.parameters(), self.plain.parameters(), strict=True))
        if both and self._is_settled():
            _freeze(both, number, frozen)

    def freeze_between(self, number: int, frozen: bool) -> None:
        """Freeze or train a parameter, or all (-1), between forward and backward."""
        both = list(zip(self.model.parameters(), self.plain.parameters(), strict=True))
        if both and self.losses:
            _freeze(both, number, frozen)
            self.due.add("frozen between" if frozen else "trained between")

    def change(self, number: int, how: str) -> None:
        """Change the values of a parameter, or of all (-1)."""
        if self._is_settled():
            for model in (self.model, self.plain):
                some = _some(list(model.parameters()), number)
                _move(how, some, [torch.zeros_like(param) for param in some])
            self.changed.add(f"changed by {how}")

    def ema(self, how: str) -> None:
        """Move the teacher towards the student."""
        for i, model in enumerate((self.model, self.plain)):
            if self.teachers:
                _move(how, self.teachers[i].parameters(), model.parameters())
            elif hasattr(model, "teacher"):
                _move(how, model.teacher.parameters(), model.student.parameters())
            else:
                return
        self.changed.add(f"teacher changed by {how}")

    def fail_in_forward(self) -> None:
        """With inputs that are too wide, which most models refuse: the exception is caught."""
        if not self.losses:
            x = torch.ones(2, trees.WIDTH + 1)
            theirs, mine = (
                _raises(lambda run=run: trees.call(self.boundary, run, x))
                for run in (self.plain_runs[0], self.runs[0])
            )
            self._drop_stored()
            if mine != theirs:
                self.wrong.append(f"{'no ' if theirs else ''}error in the forward")

    def fail_in_backward(self, seed: int, where: str) -> None:
        """An exception before or after all units' backward; caught, and gradients are dropped."""
        if self.losses:
            return
        errors = []
        for run in (self.plain_runs[0], self.runs[0]):
            x = self._inputs(seed, 2)[self.rank].requires_grad_()
            output = self._call(run, x)
            if not output.requires_grad:
                break
            (x if where == "input" else output).register_hook(_fail)
            errors.append(_raises(output.square().mean().backward))
        if len(set(errors)) > 1:
            self.wrong.append(f"error in the backward: {errors[1]}, expected {errors[0]}")
        self._drop_stored()
        self.is_unsynced = False
        self.zero_grad(True)

    # -- how

    compares_gradients = True

    def _make_reference(self, program: Program) -> Any:
        return built(program)

    def _clip_reference(self, largest: float, kind: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(self.plain.parameters(), largest, kind)

    def _whole_reference(self, **arguments: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def _named_reference(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.plain.named_parameters()

    def _gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        return param.grad

    def _begin(self) -> None:
        """Compile the model, and make optimizers."""
        models = (self.model, *self.teachers[:1])
        if self.calls_units:
            models = (self.model.student, self.model.teacher)
            self.plain_runs = [self.plain.student, self.plain.teacher]
        else:
            self.plain_runs = [self.plain, *self.teachers[1:]]
        self.runs = [in_mode(model, self.mode) for model in models]
        self.optimizers = _optimizer(self.model), _optimizer(self.plain)

    def state(self) -> list[torch.Tensor | None]:
        """Copies of this rank's values and gradients."""
        params = [p for model in (self.model, *self.teachers[:1]) for p in model.parameters()]
        tensors = [p.data for p in params] + [p.grad for p in params]
        return [one if one is None else one.detach().clone() for one in tensors]

    def _is_settled(self) -> bool:
        """Whether there is neither a forward to go back through nor a gradient to reduce."""
        return not self.losses and not self.is_unsynced

    def _inputs(self, seed: int, rows: int) -> list[torch.Tensor]:
        """Of all ranks; of two seeds in three, each rank has other numbers of rows.

        In eager mode, those of every other seed have gradients.
        """
        generator = torch.Generator().manual_seed(seed)
        sizes = [rows + seed % 3 * rank for rank in range(self.world_size)]
        inputs = [torch.randn(n, trees.WIDTH, generator=generator).to(self.dtype) for n in sizes]
        with_gradients = torch.is_grad_enabled() and self.mode == "eager" and seed % 2 == 1
        return [x.requires_grad_(with_gradients) for x in inputs]

    def _call(self, run: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A whole graph notices what is trained anew, and is made anew by the call that follows."""
        try:
            return trees.call(self.boundary, run, x)
        except FSDPStateError as error:
            if self.mode != "graph" or "expected parameters that are frozen" not in str(error):
                raise
            return trees.call(self.boundary, run, x)

    def _reference(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """The plain model's output; computed in float64 where the other one does."""
        if not self.is_widened:
            return trees.call(self.boundary, module, x)
        wide = {name: param.double() for name, param in module.named_parameters()}
        return trees.call(
            self.boundary, lambda given: functional_call(module, wide, (given,)), x.double()
        )

    def _both(self, seed: int, rows: int, loss: str = "both", ema: str | None = None) -> _Losses:
        """Losses of the reference, over all ranks, and of the model; outputs are compared."""
        inputs = self._inputs(seed, rows)
        own = inputs[self.rank].detach().clone().requires_grad_(inputs[0].requires_grad)
        theirs = []
        for number, x in enumerate(inputs):
            if isinstance(self.plain, _Distilled):  # each rank moves its teacher once
                self.plain.moves = self.moves and number == 0
            _be_local(self.plain, self.local[number])
            trees.set_step(self.plain, self.step_number)
            theirs.append((self._reference(self.plain_runs[0], x), trees.take_stored(self.plain)))
        self.plain.moves = self.moves
        _be_local(self.plain, self.local[self.rank])
        trees.set_step(self.model, self.step_number)
        mine = self._call(self.runs[0], own), trees.take_stored(self.model)
        if len(self.runs) > 1:
            if ema is not None:
                self.ema(ema)
            with torch.no_grad():
                targets = [self._reference(self.plain_runs[1], x) for x in inputs]
                target = self._call(self.runs[1], own)
            self._drop_stored()
            theirs = [(output - t, aux) for (output, aux), t in zip(theirs, targets, strict=True)]
            mine = mine[0] - target, mine[1]
        largest = torch.stack([output.detach().abs().max() for output, _ in theirs]).max()
        self.has_left_range |= not largest < _MAX_OUTPUT
        self._compare("output", mine[0], theirs[self.rank][0])
        if torch.is_grad_enabled():
            self.due |= self.changed
            self.changed.clear()
            if mine[1]:
                self.due.add({"aux": "stored alone", "output": "stored unused"}.get(loss, "stored"))
        total = sum((_loss(*one, loss) for one in theirs), torch.zeros(()))
        return _Losses(total / self.world_size, _loss(*mine, loss), inputs[self.rank], own)

    def _drop_stored(self) -> None:
        for model in (self.model, self.plain, *self.teachers):
            trees.take_stored(model)

    def _backward(self, pending: Sequence[_Losses]) -> None:
        for position in range(2):
            losses = [both[position] for both in pending if both[position].requires_grad]
            try:
                if losses:
                    torch.stack(losses).sum().backward()
            except RuntimeError as error:
                if position == 0:
                    raise ValueError("the reference raises: the program makes no sense") from error
                raise
        for both in pending:
            if both.x.grad is not None and both.own_x.grad is not None:
                wanted = both.x.grad * self.ranks_in_loss
                self._compare("gradient of the input", both.own_x.grad, wanted)
            elif both.x.grad is not both.own_x.grad:
                self.wrong.append("one gradient of the input is None")

    def _compare(self, what: str, got: Any, want: Any) -> None:
        got, want = torch.as_tensor(got), torch.as_tensor(want)
        got, want = got.double(), want.double()
        largest = want.nan_to_num(0, 0, 0).abs().max().item() if want.numel() else 0.0
        near = 1e-4 if self.dtype == torch.float32 else 1e-8
        near = 0.1 if self.is_low else near
        close = near * (0.01 + 0.1 * largest)  # what cancels leaves the rounding of what was large
        same = got.shape == want.shape and torch.allclose(got, want, near, close, equal_nan=True)
        if not same:
            self.wrong.append(f"{what}: {got.tolist()}, expected {want.tolist()}")


class _BesideFSDP1(_Pair):
    """The reference is FSDP1 on the same ranks and batches."""

    def __init__(self, program: Program, *arguments: Any) -> None:
        self.compares_gradients = program.precision != "kept"  # which neither shows whole
        super().__init__(program, *arguments)
        self.ranks_in_loss = 1

    def _make_reference(self, program: Program) -> Any:
        return sharded(program, built(program), fsdp1)

    def backward(self, each: bool = False) -> None:
        super().backward(each)
        self._reshard_reference()

    def _reshard_reference(self) -> None:
        """Frozen units, and others after a forward alone, would stay unsharded."""
        for unit in fsdp1.FullyShardedDataParallel.fsdp_modules(self.plain):
            handle = unit._handle
            if handle and not handle.is_sharded(handle.flat_param):
                handle.reshard(handle.uses_sharded_strategy)

    def _clip_reference(self, largest: float, kind: float) -> torch.Tensor:
        return self.plain.clip_grad_norm_(largest, kind)

    def _whole_reference(self, **arguments: Any) -> AbstractContextManager[None]:
        arguments["with_grads"] = self.compares_gradients
        return fsdp1.FullyShardedDataParallel.summon_full_params(self.plain, **arguments)

    def _named_reference(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self.plain.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), param

    def _gradient_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """FSDP1 makes zeros where there is none."""
        return None if param.grad is None or not param.grad.any() else param.grad

    def _both(self, seed: int, rows: int, *_: Any) -> _Losses:
        x = self._inputs(seed, rows)[self.rank]
        own = x.detach().clone().requires_grad_(x.requires_grad)
        theirs, mine = self.plain(x), self._call(self.runs[0], own)
        if not torch.is_grad_enabled():
            self._reshard_reference()
        self.has_left_range |= not theirs.detach().abs().max() < _MAX_OUTPUT
        self._compare("output", mine, theirs)
        return _Losses(_loss(theirs.float(), (), "both"), _loss(mine.float(), (), "both"), x, own)

    def _compare(self, what: str, got: Any, want: Any) -> None:
        if got.dtype != want.dtype and what != "norm":  # one of no gradients is float32 there
            self.wrong.append(f"{what}: {got.dtype}, expected {want.dtype}")
        super()._compare(what, got, want)


def _some(params: list[nn.Parameter], number: int) -> list[nn.Parameter]:
    """The parameter of a number, or all (-1)."""
    return params if number < 0 else params[number % max(1, len(params)) :][:1]


def _local_of(model: nn.Module) -> list[dict[str, Any]]:
    """Copies of what modules hold that differs between ranks."""
    return [
        {name: copy.deepcopy(vars(node)[name]) for name in unit_kinds.LOCAL}
        for node in trees.nodes_of(model)
    ]


def _be_local(model: nn.Module, local: Sequence[dict[str, Any]]) -> None:
    """Give the reference what one rank's modules hold."""
    for node, values in zip(trees.nodes_of(model), local, strict=True):
        vars(node).update(values)


def _listed(optimizer: torch.optim.Optimizer | None) -> list[torch.optim.Optimizer]:
    return [] if optimizer is None else [optimizer]


def _fail(*_: Any) -> None:
    raise ValueError("as asked")


def _raises(action: Callable[[], object]) -> bool:
    try:
        action()
    except Exception:
        return True
    return False


def _loss(output: torch.Tensor, stored: Sequence[torch.Tensor], which: str) -> torch.Tensor:
    """Loss of an output, of what modules stored, or of both."""
    losses = [] if stored and which == "aux" else [output.square().mean()]
    if which != "output":
        losses += [one.square().mean() if one.dim() else one.to(output.dtype) for one in stored]
    return sum(losses[1:], losses[0])


def _freeze(both: Sequence[Sequence[nn.Parameter]], number: int, frozen: bool) -> None:
    for pair in both if number < 0 else [both[number % len(both)]]:
        for param in pair:
            param.requires_grad_(not frozen)


def _kinds_of(program: Program) -> set[str]:
    """What every backward of a program exercises: boundaries of units, and the teacher."""

    def of(tree: Any, is_unit: bool) -> Iterator[str]:
        if is_unit:
            boundary = tree.boundary
            if boundary.view is not None and boundary.change is not None:
                yield f"{boundary.view} changed by {boundary.change}"
            if boundary.container is not None:
                yield f"{boundary.container} as input and output"
            if boundary.detached:
                yield "detached input"
            if boundary.number is not None:
                yield f"{boundary.number} set by {boundary.set_by}"
            if boundary.result is not None:
                yield f"result: {boundary.result}"
            if boundary.fills is not None:
                yield f"fills {boundary.fills}"
        if getattr(tree, "kind", "") in trees.NORMS:
            yield tree.kind
        for child in getattr(tree, "children", ()):
            yield from of(child, child.wrapped)

    kinds = {*of(program.tree, True)}
    return kinds if program.teacher == "none" else {*kinds, f"teacher: {program.teacher}"}


KINDS = (
    *(f"{view} changed by {change}" for view in trees.VIEWS for change in ("add_", "relu_")),
    *(f"{container} as input and output" for container in trees.CONTAINERS),
    *("detached input", "stored", "stored alone", "stored unused", "two backwards"),
    *(f"{what}changed by {how}" for what in ("", "teacher ") for how in CHANGES),
    *(f"teacher: {where}" for where in ("model", "unit", "called units", "moves")),
    *("frozen between", "trained between"),
    *(f"{name} set by {who}" for name in unit_kinds.NUMBERS for who in unit_kinds.SETTERS),
    *(f"result: {name}" for name in unit_kinds.RESULTS),
    *(f"fills {name}" for name in unit_kinds.FILLS),
    *trees.NORMS,
)
"""What a campaign counts, by mode and outcome."""


class Result(NamedTuple):
    """What came of a program.

    Attributes:
        wrong: what was, with the call after which it was seen.
        has_left_range: whether it ended before its last call, as its outputs or gradients were too
            large.
        refused: this package's error, or autograd's, that ended it, before values or gradients
            changed.
        ran: how many backwards exercised which of ``KINDS``; of what is refused, once each.
        crashed: whether ranks raised, died or hung.
    """

    wrong: list[str]
    has_left_range: bool = False
    refused: str = ""
    ran: Counter[str] = Counter()
    crashed: bool = False


def run_program(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """Run a program, and compare after each call.

    Args:
        folder: for checkpoints, empty.
    """
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
        warnings.simplefilter("ignore")
        return _run(rank, world_size, program, folder)


def _run(rank: int, world_size: int, program: Program, folder: str) -> Result:
    kind = _BesideFSDP1 if program.beside_fsdp1 else _Pair
    pair = kind(program, rank, world_size, folder)
    for number, (name, *arguments) in enumerate((*program.calls, ("backward",), ("summon",))):
        call: Callable[..., None] = getattr(pair, name)
        before, refused = pair.state(), ""
        try:
            call(*arguments)
        except RuntimeError as error:
            due = pair.kinds | pair.due | pair.changed
            error = getattr(error, "inner_exception", error)  # a backend's, as Dynamo raises it
            has_views = any("changed by" in kind or "stored" in kind for kind in due)
            is_refusal = isinstance(error, FSDPError) or (has_views and "inplace" in str(error))
            is_refusal &= not isinstance(error, DivergenceError) and not program.beside_fsdp1
            if not due or not is_refusal:
                raise
            refused = f"{type(error).__name__}: {error}"
            pair.ran = Counter(due)
            if not _same(before, pair.state()):
                pair.wrong.append(f"changed before it raised {refused}")
        seen: list[Any] = [None] * world_size
        dist.all_gather_object(seen, (bool(pair.wrong), bool(refused), pair.has_left_range))
        if any(has_left for *_, has_left in seen):
            return Result([], True)
        if len({refuses for _, refuses, _ in seen}) > 1:
            pair.wrong.append(f"refused by some ranks only: {refused}")
        if any(is_wrong for is_wrong, *_ in seen) or pair.wrong:
            call_text = f"call {number}, {name}{tuple(arguments)}"
            return Result([f"{call_text}: {text}" for text in pair.wrong])
        if refused:
            return Result([], refused=refused, ran=pair.ran)
    return Result([], ran=pair.ran)


def _same(one: Sequence[torch.Tensor | None], other: Sequence[torch.Tensor | None]) -> bool:
    return all(
        a is b or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def run_with_weights_off(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """``run_program`` with a fault: weights are off by a tenth of what float32 programs may be."""
    make = sharded

    def wrong(program: Program, inner: nn.Module, package: Any = fsdp_dynamo) -> Any:
        model = make(program, inner, package)
        if package is fsdp_dynamo:
            with FSDP.summon_full_params(model), torch.no_grad():
                for param in model.parameters():
                    param.mul_(1 + 1e-5)
        return model

    with patch.dict(globals(), sharded=wrong):
        return run_program(rank, world_size, program, folder)


# -- in the process that tests -------------------------------------------------------------------


def wrong_on_any_rank(
    ranks: RankPool,
    program: Program,
    run: Callable[..., Result] = run_program,
    world_size: int = 2,
) -> list[str]:
    """What is wrong with a program on any rank; perhaps tracebacks."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = ranks.run(run, world_size, program, folder)
        except RankFailedError as error:
            return [str(error)]
    return [text for result in results for text in result.wrong]


def shrink(program: Program, fails: Callable[[Program], bool], tries: int) -> Program:
    """A smaller program that fails as well."""
    candidates = _smaller(program)
    for _ in range(tries):
        candidate = next(candidates, None)
        if candidate is None:
            break
        if fails(candidate):
            program, candidates = candidate, _smaller(candidate)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest first."""
    calls = program.calls
    for size in (len(calls) // 2, 1) if len(calls) > 3 else (1,):
        for end in range(len(calls), 0, -size):
            yield replace(program, calls=calls[: max(0, end - size)] + calls[end:])
    plain = Program(program.tree, "FULL_SHARD", "eager", "none", calls)
    arguments = ("mode", "strategy", "precision", "policy", "prefetch", "ignored")
    for name in (*arguments, "teacher", "freezes_teacher"):
        if getattr(program, name) != getattr(plain, name):
            yield replace(program, **{name: getattr(plain, name)})
    for tree in smaller_trees(program.tree):
        if isinstance(tree, trees.Branch) and leaves_of(tree):
            yield replace(program, tree=tree)
