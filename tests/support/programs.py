"""Sequences of user's calls on a random model, against the same calls on one process.

A ``Program`` is data, so that hypothesis can make and shrink it, and a found failure can be kept.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import module_trees as trees
import torch
import torch.distributed as dist
from fsdp1_programs import draw_branch, leaves_of, map_leaves
from modes import in_mode
from torch import nn
from torch.func import functional_call

from fsdp_dynamo import FSDP, FSDPStateError, MixedPrecision, ShardingStrategy, checkpoint
from fsdp_dynamo.wrap_policy import CustomPolicy

Call = tuple[Any, ...]
"""Its name, and its arguments."""


@dataclass(frozen=True)
class Program:
    """A model, how it is sharded and run, and what is done with it.

    Attributes:
        tree: the model.
        strategy: name of the sharding strategy.
        mode: of running it.
        widened: whether it computes and reduces in float64, which the reference need not do.
        calls: in order; those that make no sense where they stand are left out when it runs.
        by_hand: whether units are wrapped one by one, the innermost first, and none are tied.
        in_float64: whether parameters and inputs are, so that rounding explains no difference.
    """

    tree: trees.Branch
    strategy: str
    mode: str
    widened: bool
    calls: tuple[Call, ...]
    by_hand: bool = False
    in_float64: bool = False


def draw(seed: int) -> Program:
    """The program of a seed."""
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
        rng.random() < 0.3,
        tuple(call for _ in range(_NUM_CALLS) for call in _draw_calls(rng)),
        by_hand=rng.random() < 0.3,
    )


_NUM_CALLS = 10
_MAX_OUTPUT = 1e6
"""Of the reference: beyond it, rounding and overflows differ, and the program ends."""


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


def _wrapped(program: Program) -> FSDP:
    wide = MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)
    arguments: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[program.strategy],
        "mixed_precision": wide if program.widened else None,
    }
    inner = _built(program)
    units = [m for m in inner.modules() if trees.wants_unit(m) and m is not inner]
    if not program.by_hand:
        policy = CustomPolicy(trees.wants_unit) if units else None
        return FSDP(inner, auto_wrap_policy=policy, **arguments)
    for parent in reversed(list(inner.modules())):
        for name, child in list(parent.named_children()):
            if trees.wants_unit(child):
                setattr(parent, name, FSDP(child, **arguments))
    return FSDP(inner, **arguments)


def _built(program: Program) -> nn.Module:
    """Of units wrapped one by one, none may hold what is tied to a parameter of another."""
    tree = program.tree
    if program.by_hand:
        tree = map_leaves(tree, lambda leaf: replace(leaf, tied_to=None))
    module = trees.build(tree)
    return module.double() if program.in_float64 else module


def _optimizer(model: nn.Module) -> torch.optim.Optimizer | None:
    """SGD, which sees the scale of gradients, with a state."""
    parameters = list(model.parameters())
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5) if parameters else None


class _Pair:
    """The sharded model of this rank, and the reference, which does what all ranks do."""

    def __init__(self, program: Program, rank: int, world_size: int, folder: str) -> None:
        self.rank, self.world_size, self.folder = rank, world_size, Path(folder)
        self.mode, self.is_widened = program.mode, program.widened
        self.dtype = torch.float64 if program.in_float64 else torch.float32
        self.plain = _built(program)
        self.model = _wrapped(program)
        self.saved: list[Any] = []
        self._begin()
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_unsynced = False
        self.wrong: list[str] = []
        self.has_left_range = False

    # -- what can be called; each is left out where it makes no sense

    def forward(self, seed: int, rows: int = 2) -> None:
        if len(self.losses) < 2:
            self.losses.append(self._both(seed, rows))

    def forward_without_grad(self, seed: int, rows: int = 2) -> None:
        with torch.no_grad():
            self._both(seed, rows)

    def backward(self) -> None:
        pending, self.losses = self.losses, []
        self._backward(pending)
        self.is_unsynced &= not any(mine.requires_grad for _, mine in pending)

    def accumulate(self, seed: int, rows: int = 2) -> None:
        if not self.losses:
            with self.model.no_sync():
                both = self._both(seed, rows)
                self._backward([both])
            self.is_unsynced |= both[1].requires_grad

    def clip(self, largest: float) -> None:
        if self._is_settled():
            mine = self.model.clip_grad_norm_(largest)
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), largest)
            self._compare("norm", mine, norm)

    def step(self) -> None:
        if self._is_settled():
            for optimizer in self.optimizers:
                if optimizer is not None:
                    optimizer.step()

    def zero_grad(self, to_none: bool) -> None:
        if self._is_settled():
            self.model.zero_grad(to_none)
            self.plain.zero_grad(to_none)

    def summon(self) -> None:
        with FSDP.summon_full_params(self.model, with_grads=True, writeback=False):
            for (name, p), q in zip(
                self.model.named_parameters(), self.plain.parameters(), strict=True
            ):
                self._compare(f"value of {name}", p, q)
                if not self.is_unsynced:
                    zeros = torch.zeros_like(q)
                    self._compare(
                        f"gradient of {name}",
                        zeros if p.grad is None else p.grad,
                        zeros if q.grad is None else q.grad,
                    )

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
        both = list(zip(self.model.parameters(), self.plain.parameters(), strict=True))
        if both and self._is_settled():
            for param in both[number % len(both)]:
                param.requires_grad_(not frozen)

    def fail_in_forward(self) -> None:
        """With inputs that are too wide, which most models refuse: the exception is caught."""
        if not self.losses:
            x = torch.ones(2, trees.WIDTH + 1)
            theirs, mine = (
                _raises(lambda model=model: model(x)) for model in (self.plain, self.run)
            )
            if mine != theirs:
                self.wrong.append(f"{'no ' if theirs else ''}error in the forward")

    def fail_in_backward(self, seed: int, where: str) -> None:
        """An exception before or after all units' backward; caught, and gradients are dropped."""
        if self.losses:
            return
        for model in (self.plain, self.run):
            x = self._inputs(seed, 2)[self.rank].requires_grad_()
            output = self._call(model, x)
            (x if where == "input" else output).register_hook(_fail)
            if not _raises(output.square().mean().backward):
                self.wrong.append("no error in the backward")
        self.is_unsynced = False
        self.zero_grad(True)

    # -- how

    def _begin(self) -> None:
        """Compile the model, and make optimizers."""
        self.run = in_mode(self.model, self.mode)
        self.optimizers = _optimizer(self.model), _optimizer(self.plain)

    def _is_settled(self) -> bool:
        """Whether there is neither a forward to go back through nor a gradient to reduce."""
        return not self.losses and not self.is_unsynced

    def _inputs(self, seed: int, rows: int) -> list[torch.Tensor]:
        """Of all ranks; of two seeds in three, each rank has other numbers of rows."""
        generator = torch.Generator().manual_seed(seed)
        sizes = [rows + seed % 3 * rank for rank in range(self.world_size)]
        return [
            torch.randn(size, trees.WIDTH, generator=generator).to(self.dtype) for size in sizes
        ]

    def _call(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """A whole graph notices what is trained anew, and is made anew by the call that follows."""
        try:
            output: torch.Tensor = model(x)
        except FSDPStateError as error:
            if self.mode != "graph" or "expected parameters that are frozen" not in str(error):
                raise
            output = model(x)
        return output

    def _reference(self, x: torch.Tensor) -> torch.Tensor:
        """The plain model's output; computed in float64 where the other one does."""
        if not self.is_widened:
            return self.plain(x)
        wide = {name: param.double() for name, param in self.plain.named_parameters()}
        return functional_call(self.plain, wide, (x.double(),))

    def _both(self, seed: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of the reference, over all ranks, and of the model; outputs are compared."""
        inputs = self._inputs(seed, rows)
        outputs = [self._reference(x) for x in inputs]
        largest = torch.stack([output.detach().abs().max() for output in outputs]).max()
        self.has_left_range |= not largest < _MAX_OUTPUT
        mine = self._call(self.run, inputs[self.rank])
        self._compare("output", mine, outputs[self.rank])
        total = sum((output.square().mean() for output in outputs), torch.zeros(()))
        return total / self.world_size, mine.square().mean()

    @staticmethod
    def _backward(pending: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for position in range(2):
            losses = [both[position] for both in pending if both[position].requires_grad]
            if losses:
                torch.stack(losses).sum().backward()

    def _compare(self, what: str, got: Any, want: Any) -> None:
        got, want = torch.as_tensor(got), torch.as_tensor(want)
        got, want = got.double(), want.double()
        largest = want.nan_to_num(0, 0, 0).abs().max().item() if want.numel() else 0.0
        near = 1e-4 if self.dtype == torch.float32 else 1e-8
        close = near * (0.01 + 0.1 * largest)  # what cancels leaves the rounding of what was large
        same = got.shape == want.shape and torch.allclose(got, want, near, close, equal_nan=True)
        if not same:
            self.wrong.append(f"{what}: {got.tolist()}, expected {want.tolist()}")


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


def _any_rank(mine: bool) -> bool:
    """So that all ranks stop where one has found something."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


class Result(NamedTuple):
    """What came of a program.

    Attributes:
        wrong: what was, with the call after which it was seen.
        has_left_range: whether it ended before its last call, as its outputs were too large.
    """

    wrong: list[str]
    has_left_range: bool


def run_program(rank: int, world_size: int, program: Program, folder: str) -> Result:
    """Run a program, and compare after each call.

    Args:
        folder: for checkpoints, empty.
    """
    pair = _Pair(program, rank, world_size, folder)
    for number, (name, *arguments) in enumerate((*program.calls, ("backward",), ("summon",))):
        call: Callable[..., None] = getattr(pair, name)
        call(*arguments)
        if pair.has_left_range:  # the same on all ranks: it is the reference's
            return Result([], True)
        if _any_rank(bool(pair.wrong)):
            call_text = f"call {number}, {name}{tuple(arguments)}"
            return Result([f"{call_text}: {text}" for text in pair.wrong], False)
    return Result([], False)
