"""Sequences of user's calls on a random model, against the same calls on one process.

A ``Program`` is data, so that hypothesis can make and shrink it, and a found failure can be kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import module_trees as trees
import torch
import torch.distributed as dist
from modes import in_mode
from torch import nn

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy
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
    """

    tree: trees.Branch
    strategy: str
    mode: str
    widened: bool
    calls: tuple[Call, ...]


class _Pair:
    """The sharded model of this rank, and the reference, which does what all ranks do."""

    def __init__(self, program: Program, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.mode = program.mode
        self.plain = trees.build(program.tree)
        inner = trees.build(program.tree)
        has_units = any(trees.wants_unit(m) for m in inner.modules() if m is not inner)
        wide = MixedPrecision(param_dtype=torch.float64, reduce_dtype=torch.float64)
        self.model = FSDP(
            inner,
            auto_wrap_policy=CustomPolicy(trees.wants_unit) if has_units else None,
            sharding_strategy=ShardingStrategy[program.strategy],
            mixed_precision=wide if program.widened else None,
        )
        self.run = in_mode(self.model, self.mode)
        self.losses: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.is_unsynced = False
        self.wrong: list[str] = []

    # -- what can be called; each is left out where it makes no sense

    def forward(self, seed: int) -> None:
        if len(self.losses) < 2:
            self.losses.append(self._both(seed))

    def forward_without_grad(self, seed: int) -> None:
        with torch.no_grad():
            self._both(seed)

    def backward(self) -> None:
        pending, self.losses = self.losses, []
        self._backward(pending)
        self.is_unsynced &= not any(mine.requires_grad for _, mine in pending)

    def accumulate(self, seed: int) -> None:
        if not self.losses:
            with self.model.no_sync():
                both = self._both(seed)
                self._backward([both])
            self.is_unsynced |= both[1].requires_grad

    def clip(self, largest: float) -> None:
        if self._is_settled():
            mine = self.model.clip_grad_norm_(largest)
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), largest)
            self._compare("norm", mine, norm)

    def step(self) -> None:
        if self._is_settled():
            for model in (self.model, self.plain):
                parameters = list(model.parameters())
                if parameters:
                    torch.optim.SGD(parameters, lr=0.1).step()

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
            self.run = in_mode(self.model, self.mode)

    # -- how

    def _is_settled(self) -> bool:
        """Whether there is neither a forward to go back through nor a gradient to reduce."""
        return not self.losses and not self.is_unsynced

    def _both(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of the reference, over all ranks, and of the model; outputs are compared."""
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.world_size, 2, trees.WIDTH, generator=generator)
        outputs = [self.plain(x) for x in inputs]
        mine = self.run(inputs[self.rank])
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
        close = 1e-6 + 1e-5 * largest  # what cancels leaves the rounding of what was large
        same = got.shape == want.shape and torch.allclose(got, want, 1e-4, close, equal_nan=True)
        if not same:
            self.wrong.append(f"{what}: {got.tolist()}, expected {want.tolist()}")


def _any_rank(mine: bool) -> bool:
    """So that all ranks stop where one has found something."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def run_program(rank: int, world_size: int, program: Program) -> list[str]:
    """What was wrong, with the call after which it was seen."""
    pair = _Pair(program, rank, world_size)
    for number, (name, *arguments) in enumerate((*program.calls, ("backward",), ("summon",))):
        call: Callable[..., None] = getattr(pair, name)
        call(*arguments)
        if _any_rank(bool(pair.wrong)):
            return [f"call {number}, {name}{tuple(arguments)}: {text}" for text in pair.wrong]
    return []
