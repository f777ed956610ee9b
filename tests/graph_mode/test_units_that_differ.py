"""Graph mode with units that are equal, but for something that a trace or a step depends on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 8


class Block(nn.Module):
    """A block with all that a trace may depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.0)
        self.dropped = nn.Dropout(1.0).eval()
        self.last: nn.Module = nn.Identity()
        self.norm: nn.Module = nn.Identity()
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.register_buffer("offset", torch.full((1,), 0.25))
        self.scales = [1.0, 2.0]
        self.factors = {"a": 0.5, "b": 2.0}
        self.num_calls = 0
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.act(self.inner(x)) + self.offset) * self.scales[0] / self.scales[-1]
        for factor in self.factors.values():
            hidden = hidden * factor + factor
        return self.last(self.dropped(x) / 2 + self.dropout(hidden))


class _Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


class _Counting(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return super().forward(x) * self.num_calls


class _CheckpointedAndCounting(_Checkpointed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.num_calls += 1
        return x * self.num_calls


class _Listing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return super().forward(x * len(self.seen))


class _Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)


class _InPlace(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1) + x.mul_(2)


class _Viewing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act(self.inner(x))
        return x.view(-1, 2, DIM // 2).flatten(1)


class _Constant(Block):
    """Of each block another number, which Dynamo doesn't guard."""

    def __init__(self) -> None:
        super().__init__()
        self.number = float(torch.rand(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.factor()

    @torch.compiler.assume_constant_result
    def factor(self) -> float:
        return self.number


class _Given(Block):
    """Is given a list, to which it adds, and gives it on."""

    def forward(self, x: Any) -> Any:
        seen = x if isinstance(x, list) else [x]
        seen.append(super().forward(seen[-1]) * len(seen))
        return seen


class Model(nn.Module):
    """Blocks, one after another."""

    def __init__(self, blocks: Iterable[type[Block]]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x[-1] + x[1] if isinstance(x, list) else x)


def _compiled(model: nn.Module) -> Any:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return torch.compile(model, backend="fsdp_dynamo_aot_eager", fullgraph=True)


def _results(model: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model computes, and the gradient of its input."""
    x = (torch.linspace(-1, 1, 3 * DIM).view(3, DIM) + rank / 4).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


# -- units that differ -----------------------------------------------------------------------------


def _shift(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def _widen(block: Block) -> None:
    block.offset = torch.linspace(0, 1, DIM)


DIFFERENCES: dict[str, Callable[[Block], Any]] = {
    "an item of a list": lambda block: block.scales.__setitem__(1, 5.0),
    "a number of another type": lambda block: block.scales.__setitem__(0, 1),
    "the length of a list": lambda block: block.scales.append(3.0),
    "the order of a dict": lambda block: setattr(block, "factors", {"b": 2.0, "a": 0.5}),
    "a function": lambda block: setattr(block, "act", torch.sigmoid),
    "the shape of a buffer": _widen,
    "a forward of its own": lambda block: setattr(block.last, "forward", torch.tanh),
    "training": lambda block: block.dropped.train(),
    "a class": lambda block: setattr(block, "last", nn.Sequential(nn.Sigmoid())),
    "a probability": lambda block: setattr(block.dropout, "p", 1.0),
}
LATER = ("an item of a list", "a function", "the shape of a buffer", "training", "a class")
"""One after another, none hides what the next ones change."""


@on_ranks(2)
def test_units_that_differ(rank: int) -> None:
    """All between the first and the last one, which are equal, each in another way."""
    changes = [*DIFFERENCES.values(), lambda block: block.inner.register_forward_hook(_shift)]
    plain = Model([Block] * (len(changes) + 2))
    for block, change in zip(plain.blocks[1:-1], changes, strict=True):
        change(block)
    wrapped = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({Block}))
    compiled = torch.compile(wrapped, backend="fsdp_dynamo_aot_eager", fullgraph=True)
    torch.testing.assert_close(_results(compiled, rank), _results(plain, rank))


@on_ranks(2)
def test_a_unit_that_differs_later(rank: int) -> None:
    """After each change of one of two blocks.

    No hooks: Dynamo guards none of modules that had none (``skip_nnmodule_hook_guards``).
    """
    plain = Model([Block] * 2)
    model = copy.deepcopy(plain)
    compiled = _compiled(model)
    expected = _results(plain, rank)
    torch.testing.assert_close(_results(compiled, rank), expected)
    with torch._dynamo.config.patch(recompile_limit=len(LATER) + 1):
        for name in LATER:
            for one in (plain, model):
                DIFFERENCES[name](one.blocks[1])
            before, expected = expected, _results(plain, rank)
            assert not torch.equal(before[0], expected[0])
            torch.testing.assert_close(_results(compiled, rank), expected, msg=name)


# -- units that change something -------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds",
    [
        [_Counting, _CheckpointedAndCounting],
        [_Listing, _Given],
        [_Constant, _Normed, _InPlace, _Viewing],
    ],
)
@on_ranks(2)
def test_what_changes_something(rank: int, kinds: list[type[Block]]) -> None:
    """Two steps in eager and graph mode."""
    plain = Model(sorted(2 * kinds, key=lambda kind: kind is _Given))
    model = copy.deepcopy(plain)
    compiled = _compiled(model)
    for step in range(2):
        torch.testing.assert_close(_results(compiled, rank), _results(plain, rank))
        for block in model.blocks:
            assert block.num_calls == (step + 1 if type(block).__name__.endswith("Counting") else 0)
    for name, buffer in model.named_buffers():
        assert torch.allclose(buffer, plain.get_buffer(name)), name


# -- numbers that differ, and change between steps -------------------------------------------------


class _Scaled(nn.Module):
    """Depends on numbers, and returns one beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.scale = 1.0
        self.choice = 0

    def forward(self, x: Any) -> Any:
        x = x[0] * x[1] if isinstance(x, tuple) else x
        y = self.inner(x) * self.scale
        y = y.sin() if self.choice == 1 else y.tanh() if self.choice == 2 else y
        return x + y, self.scale


class _Stack(nn.Module):
    """Blocks, one after another.

    Args:
        num_blocks: how many.
        sets: what the root sets before it calls block ``i`` in a step: called with the block, ``i``
            and the step.
    """

    def __init__(self, num_blocks: int, sets: Callable[[Any, int, int], None] | None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(_Scaled() for _ in range(num_blocks))
        self.step = 0
        self.sets = sets

    def forward(self, x: Any) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if self.sets is not None:
                self.sets(block, i, self.step)
            x = block(x)
        return x[0] * x[1]


def _set_scale(block: Any, i: int, step: int) -> None:
    block.scale = 0.25 + 0.5 * i + step


def _set_choice(block: Any, i: int, step: int) -> None:
    block.choice = (i + step) % 3


@pytest.mark.parametrize(
    ("num_blocks", "setter", "sets_in_root"),
    [
        (10, _set_scale, False),  # more numbers than Dynamo keeps graphs of one function
        (3, _set_scale, True),
        (3, _set_choice, True),
    ],
)
@on_ranks(2)
def test_numbers_that_change_between_steps(
    rank: int, num_blocks: int, setter: Any, sets_in_root: bool
) -> None:
    plain = _Stack(num_blocks, setter if sets_in_root else None)
    model = copy.deepcopy(plain)
    compiled = _compiled(model)
    for step in range(3):
        for own in (model, plain):
            own.step = step
            for i, one in enumerate(own.blocks if not sets_in_root else ()):
                setter(one, i, step)
        torch.testing.assert_close(_results(compiled, rank), _results(plain, rank))
