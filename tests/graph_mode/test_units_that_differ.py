"""Graph mode with units that are equal, but for something that a trace or a step depends on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

NUM_BLOCKS = 4
DIM = 8


class Block(nn.Module):
    """A block with all that a trace may depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.0)
        self.norm: nn.Module = nn.Identity()
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.register_buffer("offset", torch.full((1,), 0.25))
        self.scales = [1.0, 2.0]
        self.factors = {"a": 0.5, "b": 2.0}
        self.num_calls = 0
        self.seen: list[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.act(self.inner(x)) + self.offset) * self.scales[0] / self.scales[-1]
        for factor in self.factors.values():
            hidden = hidden * factor
        return x + self.dropout(hidden)


def _halved(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output / 2


class _Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.inner.register_forward_hook(_halved)


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
        if self.seen is not None:
            self.seen.append(x)
            x = x * len(self.seen)
        return super().forward(x)


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

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x[-1] + x[1] if isinstance(x, list) else x)


def _wrapped(model: Model, style: str = "wrapper") -> nn.Module:
    kind = type(model.blocks[0])
    if style == "wrapper":
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({kind}))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _x(rank: int = 0) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * DIM).view(3, DIM) + rank / 4


# -- units that differ -----------------------------------------------------------------------------


def _shift(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 1


def _widen(block: Block) -> None:
    block.offset = torch.linspace(0, 1, DIM)


def _other_class(block: Block) -> None:
    block.dropout = nn.Sequential(nn.Tanh())  # type: ignore[assignment]


DIFFERENCES: dict[str, Callable[[Block], Any]] = {
    "a probability": lambda block: setattr(block.dropout, "p", 1.0),
    "an item of a list": lambda block: block.scales.__setitem__(1, 5.0),
    "a number of another type": lambda block: block.scales.__setitem__(0, 1),
    "the length of a list": lambda block: block.scales.append(5.0),
    "the order of a dict": lambda block: setattr(block, "factors", {"b": 2.0, "a": 0.5}),
    "a function": lambda block: setattr(block, "act", torch.sigmoid),
    "a class": _other_class,
    "a hook": lambda block: block.inner.register_forward_hook(_shift),
    "a forward of its own": lambda block: setattr(block.dropout, "forward", torch.tanh),
    "training": lambda block: block.dropout.eval(),
    "the shape of a buffer": _widen,
}


def _outputs(model: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model computes, and the gradient of its input."""
    x = _x(rank).requires_grad_()
    output = model(x)
    output.square().sum().backward()
    assert x.grad is not None
    return output.detach(), x.grad


def _compared(rank: int, world_size: int, change: str, when: str, style: str) -> Any:
    """Results after a change of a block, and those expected."""
    torch._dynamo.reset()
    plain = Model()
    for block in plain.blocks:
        block.dropout.p = 0.5 if change == "training" else 0.0
    model = _wrapped(copy.deepcopy(plain), style)
    compiled = torch.compile(model, backend="fsdp_dynamo_aot_eager", fullgraph=True)
    if when == "later":
        _outputs(compiled, rank)
    for one in (plain, model):
        blocks = one.module.blocks if isinstance(one, FSDP) else one.blocks
        block = blocks[2].module if isinstance(blocks[2], FSDP) else blocks[2]
        DIFFERENCES[change](block)
        if change == "training":
            for other in blocks:
                other.get_submodule("dropout").eval()
            block.get_submodule("dropout").train().p = 1.0
    return _outputs(compiled, rank), _outputs(plain, rank)


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_unit_that_differs(ranks: RankPool, change: str) -> None:
    """Of four blocks the third one differs: the second and the fourth equal the first."""
    for found, expected in ranks.run(_compared, 2, change, "before", "wrapper"):
        torch.testing.assert_close(found, expected)


LATER = [change for change in DIFFERENCES if change != "a hook"]
"""Dynamo guards no hooks of modules that had none (``skip_nnmodule_hook_guards``)."""


@pytest.mark.parametrize("style", ["wrapper", pytest.param("fully_shard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", LATER)
def test_a_unit_that_differs_later(ranks: RankPool, change: str, style: str) -> None:
    for found, expected in ranks.run(_compared, 2, change, "later", style):
        torch.testing.assert_close(found, expected)


# -- units that change something -------------------------------------------------------------------


def _trained(rank: int, world_size: int, block: type[Block]) -> Any:
    """Results of two steps in eager and graph mode, and calls counted by blocks."""
    torch._dynamo.reset()
    plain = Model(block)
    for one in plain.blocks:
        one.seen = []
    models = _wrapped(copy.deepcopy(plain)), _wrapped(plain)
    compiled = torch.compile(models[1], backend="fsdp_dynamo_aot_eager", fullgraph=True)
    results = [[_outputs(one, rank) for _ in range(2)] for one in (models[0], compiled)]
    return results, [one.module.num_calls for one in models[1].module.blocks]


@pytest.mark.parametrize(
    "block",
    [_Counting, _CheckpointedAndCounting, _Listing, _Given, _Constant, _Normed, _InPlace, _Viewing],
)
def test_what_changes_something(ranks: RankPool, block: type[Block]) -> None:
    for (eager, compiled), num_calls in ranks.run(_trained, 2, block):
        torch.testing.assert_close(compiled, eager)
        counts = block in (_Counting, _CheckpointedAndCounting)
        assert num_calls == [2 if counts else 0] * NUM_BLOCKS


# -- numbers that differ, and change between steps -------------------------------------------------


class _Config:
    """What all blocks of a model share."""

    scale = 1.0


CONFIG, SHARED = {"scale": 1.0}, _Config()


class _Scaled(nn.Module):
    """Depends on numbers, its own and others'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.scale = 1.0
        self.choice = 0
        self.config = SHARED

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale * self.config.scale * CONFIG["scale"]
        return x + (y.sin() if self.choice == 1 else y.tanh() if self.choice == 2 else y)


class _Returning(_Scaled):
    """Returns its number beside its output."""

    def forward(self, x: Any) -> Any:
        x = x[0] * x[1] if isinstance(x, tuple) else x
        return super().forward(x), self.scale


class _Stack(nn.Module):
    """Blocks, one after another.

    Args:
        num_blocks: how many.
        block: their class.
        sets: what the root sets before it calls block ``i`` in a step: called with the block, ``i``
            and the step.
    """

    def __init__(
        self,
        num_blocks: int,
        block: type[_Scaled] = _Scaled,
        sets: Callable[[Any, int, int], None] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        self.step = 0
        self.sets = sets

    def forward(self, x: Any) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if self.sets is not None:
                self.sets(block, i, self.step)
            x = block(x)
        return x[0] * x[1] if isinstance(x, tuple) else x


def _set_own_scale(block: Any, i: int, step: int) -> None:
    block.scale = 0.25 + 0.5 * i + step


def _set_common_scale(block: Any, i: int, step: int) -> None:
    block.scale = 0.5 + step


def _set_choice(block: Any, i: int, step: int) -> None:
    block.choice = (i + step) % 3


def _set_config(block: Any, i: int, step: int) -> None:
    block.config.scale = 0.25 + 0.5 * i + step


def _set_global(block: Any, i: int, step: int) -> None:
    CONFIG["scale"] = 0.25 + 0.5 * i + step


SETTERS = [_set_own_scale, _set_common_scale, _set_choice, _set_config, _set_global]


def _stepped(
    rank: int, world_size: int, num_blocks: int, setter: Any, sets_in_root: bool, block: Any
) -> Any:
    """Results of four steps in graph mode, and those of the plain model."""
    torch._dynamo.reset()
    plain = _Stack(num_blocks, block, setter if sets_in_root else None)
    model = copy.deepcopy(plain)
    for one in model.blocks:
        fully_shard(one)
    fully_shard(model)
    compiled = torch.compile(model, backend="fsdp_dynamo_aot_eager", fullgraph=True)
    found: list[Any] = [[], []]
    for step in range(4):
        for run, own, results in ((compiled, model, found[0]), (plain, plain, found[1])):
            CONFIG["scale"] = SHARED.scale = 1.0
            own.step = step
            for i, one in enumerate(own.blocks if not sets_in_root else ()):
                setter(one, i, step)
            results.append(_outputs(run, rank))
    CONFIG["scale"] = SHARED.scale = 1.0
    return found


@pytest.mark.parametrize("num_blocks", [3, 12])
@pytest.mark.parametrize("setter", [_set_own_scale, _set_common_scale, _set_choice])
@pytest.mark.parametrize("block", [_Scaled, _Returning])
def test_numbers_that_change_between_steps(
    ranks: RankPool, num_blocks: int, setter: Any, block: Any
) -> None:
    for found, expected in ranks.run(_stepped, 2, num_blocks, setter, False, block):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("num_blocks", [3, 12])
@pytest.mark.parametrize("setter", SETTERS)
def test_the_root_sets_what_the_next_unit_reads(
    ranks: RankPool, num_blocks: int, setter: Any
) -> None:
    for found, expected in ranks.run(_stepped, 2, num_blocks, setter, True, _Scaled):
        torch.testing.assert_close(found, expected)
