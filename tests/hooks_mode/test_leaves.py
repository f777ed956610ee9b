"""Units as nodes of the graph around them: what that graph must not take for granted."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from loops import different, whole_gradients
from models import average_gradients
from pool import on_ranks
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
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.inner(x)


class _ReturnsANumber(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        return self.inner(x), self.scale


class _ReturnsNone(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return y, y.square().mean() if self.flag else None


class _ReturnsMoreInTraining(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        return (y, y.square().mean()) if self.training else y


class _ReturnsAnotherDtypeAndShape(Block):
    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x.float())
        return y.double().sum(0, keepdim=True) if self.flag else y


class _ChangesItself(Block):
    """A list, a number, and an attribute that is not there before; the root reads the latter two.

    Tracing runs a nested unit's forward on fake tensors: nothing of that is left.
    """

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        y = self.inner(x)
        self.aux: torch.Tensor = y.square().mean()
        self.num_calls += 1
        self.seen.append(y)
        return y * len(self.seen)


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
        self.blocks = nn.ModuleList(block() for _ in range(2))
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
            if isinstance(block, _StoresInABuffer):
                extra = extra + block.buffered
            if isinstance(block, _ChangesItself):
                x, extra = x * block.num_calls, extra + block.aux
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
        x = self.embedding((x[:, 0] * 4.9).long()) * self.temperature
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


class _Selects(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0.3).nonzero().squeeze(1)
        for block in self.blocks:
            x = block(x)
        return x[chosen].square().sum()


# -- as without it ---------------------------------------------------------------------------------


def _require_right(rank: int, plain: Model, **options: Any) -> None:
    """Gradients are the plain model's in each step, while flags and numbers change."""
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    run = torch.compile(model, **options)
    for step in range(3):
        for one in (plain, model):
            one.zero_grad()
            one.train(step % 2 == 0)
            one.temperature = 1.0 + step
            for i, block in enumerate(one.blocks):
                block.flag = i == 1 and step >= 1
                block.scale = 1.0 + i + max(step - 1, 0)
        rows = 3 + step if options.get("dynamic") else 3
        x = torch.rand(rows, DIM, generator=torch.Generator().manual_seed(2 * step + rank))
        for each in (plain, run):
            random.seed(step)
            each(x).backward()
        average_gradients(plain)
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        assert different(whole_gradients(model), expected) == [], step


KINDS = [
    _ReturnsANumber,
    _ReturnsNone,
    _ReturnsMoreInTraining,
    _ReturnsAnotherDtypeAndShape,
    _ChangesItself,
    _StoresInABuffer,
    _Draws,
]


@pytest.mark.parametrize("block", KINDS)
@on_ranks(2)
def test_what_a_unit_returns_and_changes(rank: int, block: type[Block]) -> None:
    _require_right(rank, Model(block), backend="aot_eager")


@on_ranks(2)
def test_lists_and_dicts_that_units_fill(rank: int) -> None:
    _require_right(rank, _WithLists(_Fills), backend="aot_eager")


@pytest.mark.parametrize(
    ("model", "dynamic", "backend"),
    [
        (_WithTemperature, None, "aot_eager"),
        (_WithTemperature, True, "inductor"),
        (_WithPower, None, "aot_eager"),  # Inductor fails on it, with and without units
    ],
)
@on_ranks(2)
def test_numbers_that_change_in_the_root(
    rank: int, model: type[Model], dynamic: bool | None, backend: str
) -> None:
    _require_right(rank, model(), backend=backend, dynamic=dynamic)


@pytest.mark.parametrize("model", [_Selects, _WritesWhatItHasRead])
@on_ranks(2)
def test_numbers_and_sizes_that_depend_on_data(rank: int, model: type[Model]) -> None:
    captures = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(captures):
        _require_right(rank, model(), backend="aot_eager")


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


@pytest.mark.parametrize(
    ("door", "block"), [("wrapper", _ReturnsBySwitch), ("fully_shard", _ReturnsANumberBySwitch)]
)
@on_ranks(2)
def test_an_output_that_is_not_as_assumed(rank: int, door: str, block: type[Block]) -> None:
    """The first forward after a change is refused, and the next one is right."""
    plain = Model(block)
    model, policy = copy.deepcopy(plain), ModuleWrapPolicy({block})
    if door == "wrapper":
        model = FSDP(model, auto_wrap_policy=policy)
    else:
        fully_shard(model, policy=policy)
    run = torch.compile(model, backend="aot_eager")
    x = torch.ones(3, DIM)
    run(x).backward()
    model.zero_grad()
    with mock.patch.dict(_switch, is_on=True):
        expected = "^unit 'blocks.0': expected an output of the structure"
        with pytest.raises(FSDPStateError, match=expected):
            run(x)
        run(x).backward()
        plain(x).backward()
    grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert different(whole_gradients(model), grads) == []


# -- changes outside of a unit ---------------------------------------------------------------------

_table = {"n": 0}
_outputs: list[torch.Tensor] = []
_deep = SimpleNamespace(inner=SimpleNamespace(table={"n": [0]}))
_numbers = itertools.count(1)
_newest = 0


class _Tracker:
    num_calls = num_adds = 0

    @classmethod
    def count(cls) -> None:
        cls.num_calls += 1

    def add(self) -> None:
        type(self).num_adds += 1


_tracker = _Tracker()


def _counter() -> Callable[[int], int]:
    num_calls = 0

    def count(step: int) -> int:
        nonlocal num_calls
        num_calls += step
        return num_calls

    return count


_count = _counter()


def _through_calls(times: int) -> None:
    if times:
        _through_others(times - 1)
    else:
        _deep.inner.table["n"][0] += 1


def _through_others(times: int) -> None:
    _through_calls(times)


def _in_a_list(x: torch.Tensor) -> None:
    _outputs.append(x.detach())


def _by_an_iterator(x: torch.Tensor) -> None:
    global _newest
    _newest = next(_numbers)


class _ChangesOutside(Block):
    def __init__(self, change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        self.change(x)
        return self.inner(x)


CHANGES: dict[str, tuple[Callable[[torch.Tensor], object], Callable[[], int]]] = {
    "a dict": (lambda x: _table.update(n=_table["n"] + 1), lambda: _table["n"]),
    "a list": (_in_a_list, lambda: len(_outputs)),
    "a class": (lambda x: _Tracker.count(), lambda: _Tracker.num_calls),
    "the class of an object": (lambda x: _tracker.add(), lambda: _Tracker.num_adds),
    "a closure": (lambda x: _count(1), lambda: _count(0)),
    "through calls": (lambda x: _through_calls(8), lambda: _deep.inner.table["n"][0]),
    "a function": (
        lambda x: setattr(_in_a_list, "num_calls", vars(_in_a_list).get("num_calls", 0) + 1),
        lambda: vars(_in_a_list).get("num_calls", 0),
    ),
}
"""What changes, and how often it has changed."""


@pytest.mark.parametrize("where", CHANGES)
def test_changes_outside_of_a_unit_are_put_back(where: str) -> None:
    change, count = CHANGES[where]
    block, before = _ChangesOutside(change), count()
    states = ObjectStates([block])
    assert states.opaque is None
    block(torch.ones(3, DIM))
    assert count() == before + 1
    assert states.put_back()
    assert count() == before


@on_ranks(2)
def test_changes_outside_of_a_unit(rank: int) -> None:
    """They happen once a call, as those of an iterator do, which nothing can put back."""
    model = Model()
    model.blocks = nn.ModuleList(map(_ChangesOutside, [_in_a_list, _by_an_iterator] * 2))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    run = torch.compile(model, backend="aot_eager")
    before = len(_outputs), _newest
    for _ in range(2):
        run(torch.ones(3, DIM)).backward()
    assert (len(_outputs) - before[0], _newest - before[1]) == (4, 4)
    assert {type(output) for output in _outputs} == {torch.Tensor}


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
