"""Equal units are traced once by Dynamo, and what that must not change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.dynamo.private_api import GRAPH_MODE, declare_mode
from fsdp_dynamo.dynamo.repeats import guards, operator
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

NUM_BLOCKS = 4
DIM = 8

pytestmark = pytest.mark.skipif(not guards.SPECS, reason="torch can't ask a guard of two objects")


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


def _num_repeated() -> int:
    return int(counters["fsdp_dynamo"]["repeated_calls"])


# -- the same graph and guards ---------------------------------------------------------------------


class _Recorder:
    """A backend that keeps what it is given, in words."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.guards: set[tuple[str, str]] = set()

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        assert not any(trace.notes for trace in operator._traces.values())  # they hold the graph
        self.nodes += _in_words(gm)
        found = TracingContext.get().guards_context.dynamo_guards
        self.guards |= {(g.name, g.create_fn_name()) for g in found if g.name.startswith("L[")}
        return gm.forward


def _in_words(gm: fx.GraphModule) -> list[Any]:
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    words = []
    for node in gm.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda one: f"%{numbers[one]}")
        values = [
            (value.shape, value.stride(), value.dtype, value.requires_grad, value.is_leaf)
            for value in torch.utils._pytree.tree_leaves(node.meta.get("example_value"))
            if isinstance(value, torch.Tensor)
        ]
        path = [name for name, _ in node.meta.get("nn_module_stack", {}).values()]
        is_input = node.op == "placeholder"
        target = "" if is_input or node.op == "get_attr" else str(node.target)
        marks, where = node.meta.get("custom"), None if is_input else path
        words.append((node.op, target, str(arguments), values, marks, where))
        if node.op == "get_attr":
            words += _in_words(getattr(gm, node.target))
    return words


def _recorded(rank: int, world_size: int, style: str, block: type[Block], repeats: bool) -> Any:
    torch._dynamo.reset()
    counters.clear()
    backend = _Recorder()
    declare_mode(backend, GRAPH_MODE)
    model = _wrapped(Model(block), style)
    torch.compile(model, backend=backend, fullgraph=True, options={"regions": repeats})(_x())
    return backend.nodes, backend.guards, _num_repeated()


@pytest.mark.parametrize("style", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("block", [Block, _Hooked, _Checkpointed])
def test_graph_and_guards_are_those_of_a_trace(
    ranks: RankPool, style: str, block: type[Block]
) -> None:
    nodes, found, num_repeated = ranks.run(_recorded, 2, style, block, False)[0]
    again, installed, repeated = ranks.run(_recorded, 2, style, block, True)[0]
    assert (num_repeated, repeated) == (0, NUM_BLOCKS - 1)
    assert again == nodes
    classes = {one for one in found if one[0].startswith("type(")}
    assert installed | classes == found


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
    """Calls repeated at first and after a change of a block, results, and those expected."""
    torch._dynamo.reset()
    counters.clear()
    plain = Model()
    for block in plain.blocks:
        block.dropout.p = 0.5 if change == "training" else 0.0
    model = _wrapped(copy.deepcopy(plain), style)
    compiled = torch.compile(model, backend="fsdp_dynamo_aot_eager", fullgraph=True)
    counts = []
    if when == "later":
        _outputs(compiled, rank)
        counts.append(_num_repeated())
    for one in (plain, model):
        blocks = one.module.blocks if isinstance(one, FSDP) else one.blocks
        block = blocks[2].module if isinstance(blocks[2], FSDP) else blocks[2]
        DIFFERENCES[change](block)
        if change == "training":
            for other in blocks:
                other.get_submodule("dropout").eval()
            block.get_submodule("dropout").train().p = 1.0
    found = _outputs(compiled, rank)
    return [*counts, _num_repeated() - sum(counts)], found, _outputs(plain, rank)


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_unit_that_differs_is_traced(ranks: RankPool, change: str) -> None:
    """Of four blocks the third one differs: the second and the fourth equal the first."""
    for counts, found, expected in ranks.run(_compared, 2, change, "before", "wrapper"):
        assert counts == [2]
        torch.testing.assert_close(found, expected)


LATER = [change for change in DIFFERENCES if change != "a hook"]
"""Dynamo guards no hooks of modules that had none (``skip_nnmodule_hook_guards``)."""


@pytest.mark.parametrize("style", ["wrapper", pytest.param("fully_shard", marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", LATER)
def test_a_later_change_of_a_unit_that_was_not_traced(
    ranks: RankPool, change: str, style: str
) -> None:
    for counts, found, expected in ranks.run(_compared, 2, change, "later", style):
        assert counts == [3, 2]
        torch.testing.assert_close(found, expected)


def _unguarded(rank: int, world_size: int) -> Any:
    install = guards.GuardNote.install
    guards.GuardNote.install = lambda *args: None  # type: ignore[method-assign]
    try:
        return _compared(rank, world_size, "a function", "later", "wrapper")
    finally:
        guards.GuardNote.install = install  # type: ignore[method-assign]


def test_without_its_guards_a_later_change_would_not_be_noticed(ranks: RankPool) -> None:
    counts, found, expected = ranks.run(_unguarded, 2)[0]
    assert counts == [3, 0]
    assert not torch.allclose(found[0], expected[0])


# -- calls that can't be repeated ------------------------------------------------------------------


def _trained(rank: int, world_size: int, block: type[Block]) -> Any:
    """Calls repeated, and results of two steps in eager and graph mode."""
    torch._dynamo.reset()
    counters.clear()
    plain = Model(block)
    for one in plain.blocks:
        one.seen = []
    models = _wrapped(copy.deepcopy(plain)), _wrapped(plain)
    compiled = torch.compile(models[1], backend="fsdp_dynamo_aot_eager", fullgraph=True)
    results = [[_outputs(one, rank) for _ in range(2)] for one in (models[0], compiled)]
    return _num_repeated(), results, [one.module.num_calls for one in models[1].module.blocks]


@pytest.mark.parametrize(
    "block",
    [_Counting, _CheckpointedAndCounting, _Listing, _Given, _Constant, _Normed, _InPlace, _Viewing],
)
def test_what_changes_something_is_traced(ranks: RankPool, block: type[Block]) -> None:
    for num_repeated, (eager, compiled), num_calls in ranks.run(_trained, 2, block):
        assert num_repeated == 0
        torch.testing.assert_close(compiled, eager)
        counts = block in (_Counting, _CheckpointedAndCounting)
        assert num_calls == [2 if counts else 0] * NUM_BLOCKS
