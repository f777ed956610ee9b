"""Units as nodes of the graph around them: what that graph must not take for granted."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops import different, whole_gradients
from models import DOORS
from pool import RankPool, on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPStateError, fully_shard
from fsdp_dynamo.hooks_mode.side_effects import ObjectStates
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 4

# -- models ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """Of what a unit may depend on, and what it may change."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.flag = False
        self.scale = 1.0
        self.num_calls = 0
        self.stats = {"n": 0}
        self.seen: list[torch.Tensor] = []
        self.state = SimpleNamespace(history=deque([0], maxlen=2))
        self.aux: Any = None

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.inner(x)


class _ReturnsANumber(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.inner(x), self.scale


class _ReturnsMoreInTraining(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return (y, y.square().mean()) if self.training else y


class _ReturnsNone(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return y, y.square().mean() if self.flag else None


class _ReturnsAnotherDtype(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x.float())
        return y.double() if self.flag else y


class _ReturnsAnotherShape(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return y.sum(0, keepdim=True) if self.flag else y


class _CountsInADict(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        self.stats["n"] += 1
        return self.inner(x) / self.stats["n"]


class _Collects(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        self.seen.append(y)
        return y * len(self.seen)


class _ChangesAnObject(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        self.state.history.append(self.state.history[-1] + 1)
        return self.inner(x) * self.state.history[-1]


class _Stores(Block):
    """The root reads ``aux``."""

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        self.aux = y.square().mean()
        return y


class _Counts(Block):
    """The root reads ``num_calls``."""

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        self.num_calls += 1
        return self.inner(x)


class _StoresInABuffer(Block):
    """The root reads ``buffered``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffered", torch.zeros(()))

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        self.buffered = y.square().mean()
        return y


class _Draws(Block):
    """Is left out by chance, the same on all ranks and in both models."""

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return x if random.random() < 0.5 else self.inner(x)


class _Fills(Block):
    """Fills a list or a dict that it is given."""

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        for other in others:
            if isinstance(other, list):
                other.append(y.square().mean())
            else:
                other[len(other)] = y.square().mean()
        return y


class Model(nn.Module):
    """Blocks, one after another."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.embedding = nn.Embedding(5, DIM)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = torch.zeros(())
        for block in self.blocks:
            x = block(x)
            if isinstance(x, tuple):
                x, other = x
                if isinstance(other, float):
                    x = x * other
                elif other is not None:
                    extra = extra + other
            if isinstance(block, _Stores):
                extra = extra + block.aux
            if isinstance(block, _StoresInABuffer):
                extra = extra + block.buffered
            if isinstance(block, _Counts):
                x = x * block.num_calls
        return x.square().sum() + extra


class _WithLists(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        named: dict[int, torch.Tensor] = {}
        for block in self.blocks:
            x = block(x, found, named)
        return x.square().sum() + sum(found) + sum(named.values())


class _WithTemperature(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = self.temperature * 2 + 1
        x = x * self.temperature
        for block in self.blocks:
            x = block(x) * self.temperature
        return (x * after).square().sum()


class _WithPower(Model):
    """A number of which a part of the code is made for one value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.pow(x.abs() + 1, self.temperature).sum() * self.temperature


class _WritesWhatItHasRead(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum()
        number = self.total.item()
        self.total.zero_()
        for block in self.blocks:
            x = block(x)
        return (x * number).square().sum()


class _Embeds(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding((x[:, 0] * 4.9).long())
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


class _ReadsANumber(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = x.sum().item()
        for block in self.blocks:
            x = block(x)
        return (x * number).square().sum()


class _Selects(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0.3).nonzero().squeeze(1)
        for block in self.blocks:
            x = block(x)
        return x[chosen].square().sum()


# -- as without it ---------------------------------------------------------------------------------


def _wrong(rank: int, world_size: int, plain: Model, options: dict[str, Any]) -> list[Any]:
    """Steps in which gradients differ from the plain model's, while flags and numbers change."""
    torch._dynamo.reset()
    plain = copy.deepcopy(plain)  # tensors are sent in memory that both ranks would write
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    run = torch.compile(model, **options)
    wrong = []
    for step in range(4):
        for one in (plain, model):
            one.zero_grad()
            one.train(step % 2 == 0)
            one.temperature = 1.0 + step
            for i, block in enumerate(one.blocks):
                block.flag = i == 1 and step >= 1
                block.scale = 1.0 + i + max(step - 1, 0)
        rows = 3 + step if options.get("dynamic") else 3
        x = torch.rand(rows, DIM, generator=torch.Generator().manual_seed(step))
        random.seed(step)
        plain(x).backward()
        random.seed(step)
        run(x).backward()
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        if different(whole_gradients(model), expected):
            wrong.append(step)
    return wrong


KINDS = [
    _ReturnsANumber,
    _ReturnsMoreInTraining,
    _ReturnsNone,
    _ReturnsAnotherDtype,
    _ReturnsAnotherShape,
    _CountsInADict,
    _Collects,
    _ChangesAnObject,
    _Stores,
    _Counts,
    _StoresInABuffer,
    _Draws,
]


@pytest.mark.parametrize("block", KINDS)
def test_what_a_unit_returns_and_changes(ranks: RankPool, block: type[Block]) -> None:
    assert ranks.run(_wrong, 2, Model(block), {"backend": "aot_eager"}) == [[], []]


def test_lists_and_dicts_that_units_fill(ranks: RankPool) -> None:
    assert ranks.run(_wrong, 2, _WithLists(_Fills), {"backend": "aot_eager"}) == [[], []]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("model", "dynamic"),
    [(_WithTemperature, None), (_WithTemperature, True), (_Embeds, True)],
)
def test_numbers_that_change_in_the_root(
    ranks: RankPool, model: type[Model], dynamic: bool | None, backend: str
) -> None:
    options = {"backend": backend, "dynamic": dynamic}
    assert ranks.run(_wrong, 2, model(), options) == [[], []]


def test_a_number_for_one_value_of_which_code_is_made(ranks: RankPool) -> None:
    """Inductor fails on it, with and without units."""
    assert ranks.run(_wrong, 2, _WithPower(), {"backend": "aot_eager"}) == [[], []]


def _wrong_with_captures(rank: int, world_size: int, plain: Model) -> list[Any]:
    captures = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(captures):
        return _wrong(rank, world_size, plain, {"backend": "aot_eager"})


@pytest.mark.parametrize("model", [_ReadsANumber, _Selects, _WritesWhatItHasRead])
def test_numbers_and_sizes_that_depend_on_data(ranks: RankPool, model: type[Model]) -> None:
    assert ranks.run(_wrong_with_captures, 2, model()) == [[], []]


# -- what no guard sees ----------------------------------------------------------------------------


_switch = {"is_on": False}  # seen by no guard of the graph around a unit


class _ReturnsBySwitch(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return (y, y.square().mean()) if _switch["is_on"] else y


class _ReturnsANumberBySwitch(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return (y, 2.0) if _switch["is_on"] else y


def _switched(rank: int, world_size: int, block: type[Block], door: str) -> tuple[str, bool]:
    """The error of the first forward after a change, and whether the next one is right."""
    plain = Model(block)
    policy = ModuleWrapPolicy({block})
    if door == "wrapper":
        model: nn.Module = FSDP(copy.deepcopy(plain), auto_wrap_policy=policy)
    else:
        model = fully_shard(copy.deepcopy(plain), policy=policy)
    run = torch.compile(model, backend="aot_eager")
    x = torch.ones(3, DIM)
    run(x).backward()
    model.zero_grad()
    _switch["is_on"] = True
    try:
        with pytest.raises(FSDPStateError) as found:
            run(x)
        run(x).backward()
        plain(x).backward()
    finally:
        _switch["is_on"] = False
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return str(found.value), not different(whole_gradients(model), expected)


@pytest.mark.parametrize("block", [_ReturnsBySwitch, _ReturnsANumberBySwitch])
@pytest.mark.parametrize("door", DOORS)
def test_an_output_that_is_not_as_assumed(ranks: RankPool, door: str, block: type[Block]) -> None:
    for message, is_right in ranks.run(_switched, 2, block, door):
        assert message.startswith("unit 'blocks.0': expected an output of the structure")
        assert is_right


# -- changes outside of a unit ---------------------------------------------------------------------

_table = {"n": 0}
_outputs: list[torch.Tensor] = []
_num_calls = 0


class _Tracker:
    num_calls = 0

    @classmethod
    def add(cls) -> None:
        cls.num_calls += 1


def _counter() -> Callable[[int], int]:
    num_calls = 0

    def count(step: int) -> int:
        nonlocal num_calls
        num_calls += step
        return num_calls

    return count


_count = _counter()


class _Meter:
    total = 0

    def add(self) -> None:
        type(self).total += 1


def _on_a_function(x: torch.Tensor) -> None:
    _on_a_function.num_calls += 1  # type: ignore[attr-defined]


_on_a_function.num_calls = 0  # type: ignore[attr-defined]
_numbers = itertools.count(1)
_newest = 0


def _by_an_iterator(x: torch.Tensor) -> None:
    global _newest
    _newest = next(_numbers)


_deep = SimpleNamespace(inner=SimpleNamespace(table={"n": [0]}))


def _through_calls(x: torch.Tensor, times: int = 8) -> None:
    _through_others(x, times)


def _through_others(x: torch.Tensor, times: int) -> None:
    if times:
        _through_calls(x, times - 1)
    else:
        _deep.inner.table["n"][0] += 1


def _in_a_table(x: torch.Tensor) -> None:
    _table["n"] += 1


def _in_a_list(x: torch.Tensor) -> None:
    _outputs.append(x.detach())


def _in_a_global(x: torch.Tensor) -> None:
    global _num_calls
    _num_calls += 1


def _on_a_class(x: torch.Tensor) -> None:
    _Tracker.add()


def _in_a_closure(x: torch.Tensor) -> None:
    _count(1)


def _num_changes() -> int:
    others = _on_a_function.num_calls + _newest + _deep.inner.table["n"][0]
    return (
        others
        + _table["n"]
        + len(_outputs)
        + _num_calls
        + _Tracker.num_calls
        + _Meter.total
        + _count(0)
    )


class _ChangesOutside(Block):
    change: Callable[[torch.Tensor], None]

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        self.change(x)
        return self.inner(x)


_meter = _Meter()


def _by_an_object(x: torch.Tensor) -> None:
    _meter.add()


CHANGES = [
    _on_a_function,
    _by_an_iterator,
    _through_calls,
    _by_an_object,
    _in_a_table,
    _in_a_list,
    _in_a_global,
    _on_a_class,
    _in_a_closure,
]


@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_changes_outside_of_a_unit(rank: int, change: Callable[[torch.Tensor], None]) -> None:
    model = Model(_ChangesOutside)
    for block in model.blocks:
        block.change = change
        fully_shard(block)
    fully_shard(model)
    run = torch.compile(model, backend="aot_eager")
    before = _num_changes()
    for _ in range(3):
        run(torch.ones(3, DIM)).backward()
    assert _num_changes() - before == 3 * len(model.blocks)
    assert {type(output) for output in _outputs} <= {torch.Tensor}


# -- the state of objects --------------------------------------------------------------------------


class _Instances(OrderedDict):  # as transformers' table of activations
    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


class _Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 1

    def __repr__(self) -> str:
        return str(self.number)


class _Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slots = _Slots()
        self.instances = _Instances(a=list)
        self.number, self.names = 1, ["a"]
        self.table = {"x": [1], "y": {2}}
        self.other = SimpleNamespace(queue=deque([1, 2]), table={"deep": [3]})


def _changes() -> Iterator[Any]:
    yield lambda one: setattr(one, "number", 2)
    yield lambda one: setattr(one, "new", 2)
    yield lambda one: delattr(one, "number")
    yield lambda one: one.names.append("b")
    yield lambda one: one.instances.update(b=dict)
    yield lambda one: one.table.pop("x")
    yield lambda one: one.table["x"].append(2)
    yield lambda one: one.table["y"].discard(2)
    yield lambda one: one.other.queue.rotate(1)
    yield lambda one: setattr(one.other, "queue", None)
    yield lambda one: one.other.table["deep"].clear()
    yield lambda one: setattr(one.slots, "number", 2)


def _in_words(one: _Owner) -> str:
    return repr({k: v for k, v in vars(one).items() if k[0] != "_"})


@pytest.mark.parametrize("change", _changes())
def test_changes_of_objects_are_put_back(change: Any) -> None:
    owner = _Owner()
    before = _in_words(owner)
    states = ObjectStates([owner])
    assert states.put_back() is None
    change(owner)
    assert _in_words(owner) != before
    assert str(states.put_back()).startswith("_Owner")
    assert _in_words(owner) == before
    assert states.put_back() is None
