"""Models that are built on the meta device and get their values while they are wrapped."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from models import Transformer, batch, loss_of, wrap
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo import (
    FSDP,
    FSDPError,
    FSDPValueError,
    RankFailedError,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class Resettable(Transformer):
    """The transformer, whose own parameter can be initialised again."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def _on_meta(**kwargs: Any) -> Resettable:
    with torch.device("meta"):
        return Resettable(**kwargs)


def _assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names in the same order, and bitwise equal values."""
    assert list(got) == list(expected)
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []


@pytest.mark.parametrize(("tied", "strategy"), [(True, "FULL_SHARD"), (False, "NO_SHARD")])
@on_ranks(2)
def test_equals_eager_init(rank: int, tied: bool, strategy: str) -> None:
    torch.manual_seed(3)
    eager = Resettable(num_blocks=2, tied=tied)
    torch.manual_seed(3)
    model = wrap(_on_meta(num_blocks=2, tied=tied), sharding_strategy=ShardingStrategy[strategy])
    assert model.head.weight is model.embed.weight or not tied
    _assert_equal(model.state_dict(), eager.state_dict())


NUM_LAYERS, DIM = 8, 64


@pytest.mark.parametrize(("door", "sync"), [("wrapper", False), ("fully_shard", True)])
@on_ranks(2)
def test_no_rank_holds_the_model(rank: int, door: str, sync: bool) -> None:
    """Beside the shards there are three units at most: the one that is sharded, copies of it."""
    with torch.device("meta"):
        model: Any = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = ModuleWrapPolicy({nn.Linear})
    values: list[StorageWeakRef] = []
    most_units = 0

    def num_units() -> int:
        return sum(not value.expired() for value in values)

    def init(module: nn.Module) -> None:
        nonlocal most_units
        deadline = time.monotonic() + 10
        while num_units() > 1 and time.monotonic() < deadline:
            time.sleep(0.001)  # gloo's thread lets go of a tensor after whoever waited went on
        values.append(StorageWeakRef(module.weight.untyped_storage()))  # type: ignore[operator,union-attr]
        most_units = max(most_units, num_units())
        module.reset_parameters()  # type: ignore[operator]

    with peak_bytes() as peak:
        if door == "wrapper":
            FSDP(model, auto_wrap_policy=policy, param_init_fn=init, sync_module_states=sync)
        else:
            fully_shard(model, policy=policy, param_init_fn=init, sync_module_states=sync)
    assert most_units <= 2
    # What gloo's threads free, the profiler does not see.
    assert sync or peak[0] <= (NUM_LAYERS / 2 + 3) * DIM * DIM * 4
    with pytest.raises(FSDPError, match="parameters of the sharded model"):
        optimizer.step()


class WithTable(nn.Module):
    """Holds a buffer that only its constructor computes, and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.linear(x)) * self.table
        return out


class Mended(WithTable):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0))


@on_ranks(2)
def test_lists_what_nobody_initialised(rank: int) -> None:
    with torch.device("meta"):
        model = Mended()
    before = [*model.parameters(), *model.buffers()]

    def forgetful(module: nn.Module) -> None:
        if isinstance(module, nn.BatchNorm1d):
            nn.init.ones_(module.weight)
        elif not isinstance(module, Mended):
            module.reset_parameters()  # type: ignore[operator]

    with pytest.raises(FSDPValueError) as error:
        FSDP(model, param_init_fn=forgetful)
    message = str(error.value)
    for name in ("norm.bias", "norm.running_mean", "norm.num_batches_tracked", "table"):
        assert repr(name) in message
    assert "linear" not in message
    assert "'norm.weight'" not in message
    after = [*model.parameters(), *model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))

    wrapped = FSDP(model)
    wrapped(torch.ones(3, 4)).sum().backward()
    assert wrapped.module.norm.num_batches_tracked == 1
    assert model.table.tolist() == [0, 1, 2, 3]


def _replaces(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.full(parameter.shape, 2.0)))


@on_ranks(2)
def test_an_init_may_register_other_parameters(rank: int) -> None:
    model = wrap(_on_meta(num_blocks=1, tied=True), param_init_fn=_replaces)
    assert {float(x) for value in model.state_dict().values() for x in value.view(-1)} == {2.0}


@pytest.mark.parametrize(
    ("fault", "words"), [("weak", "'1.weight'.*weakref"), ("tie", "ties it to '0.weight'")]
)
@on_ranks(2)
def test_what_cannot_be_initialised(rank: int, fault: str, words: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = list(model.parameters())
    weak = weakref.ref(model[1].weight) if fault == "weak" else None

    def init(module: nn.Module) -> None:
        module.reset_parameters()  # type: ignore[operator]
        if fault == "tie" and module is model[1]:
            model[1].weight = model[0].weight

    with pytest.raises(FSDPValueError, match=words):
        FSDP(model, param_init_fn=init)
    assert weak is None or weak() is model[1].weight
    assert all(a is b and b.is_meta for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(3)
def test_only_rank_0_has_values(rank: int) -> None:
    torch.manual_seed(11)
    plain = Resettable(num_blocks=1)
    expected = float(loss_of(plain, batch(0, 0)))
    wrapped = wrap(
        _on_meta(num_blocks=1) if rank else plain,
        sync_module_states=True,
        param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False),
    )
    loss = loss_of(wrapped, batch(0, 0))
    loss.backward()
    assert float(loss) == pytest.approx(expected, rel=1e-6)


class Scale(nn.Module):
    """Has no ``reset_parameters()``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.offset


@on_ranks(2)
def test_what_rank_0_overwrites_needs_no_initialiser(rank: int) -> None:
    torch.manual_seed(3)
    plain = Scale()
    expected = float(plain(torch.ones(3)).sum())
    with torch.device("meta"):
        empty = Scale()
    model = FSDP(empty if rank else plain, sync_module_states=True)
    assert float(model(torch.ones(3)).sum()) == pytest.approx(expected)


def _raise(module: nn.Module) -> None:
    raise FSDPValueError("no file to read from")


@pytest.mark.parametrize(
    ("fault", "message", "has_replicas"),
    [
        ("argument", "modules that are no units", False),
        ("unwritten", "no values for '0.weight'", True),
        ("raises", "no file to read from", False),
        ("raises", "no file to read from", True),
    ],
)
@on_ranks(4)
def test_all_ranks_refuse_together(rank: int, fault: str, message: str, has_replicas: bool) -> None:
    """Otherwise the other ranks would wait in a broadcast for the one that has raised."""
    kwargs: dict[str, Any] = {}
    if has_replicas:
        kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        kwargs["device_mesh"] = init_device_mesh("cpu", (2, 2))
    odd = 3 if fault == "argument" else 0
    if fault == "argument" and rank == odd:
        kwargs["ignored_modules"] = [3]
    if fault in ("unwritten", "raises"):
        kwargs["param_init_fn"] = lambda module: None
    if fault == "raises" and rank == odd:
        kwargs["param_init_fn"] = _raise
    with torch.device("cpu" if fault == "argument" else "meta"):
        model = nn.Sequential(nn.Linear(4, 4), Scale())
    with pytest.raises(FSDPValueError if rank == odd else RankFailedError, match=message):
        FSDP(model, sync_module_states=True, **kwargs)


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2)
def test_memory_of_the_initialisation_is_trusted(rank: int, sync: bool) -> None:
    """Recycled memory holds a NaN on one rank; a checkpoint may be loaded afterwards."""
    calls: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        calls.append(module)
        module.to_empty(device="cpu", recurse=False)
        for param in module.parameters(recurse=False):
            param.data.fill_(torch.nan if rank == 0 else 0.0)

    plain = Resettable(num_blocks=1)
    expected = float(loss_of(plain, batch(0, 0)))
    model = wrap(_on_meta(num_blocks=1), param_init_fn=init, sync_module_states=sync)
    assert len(calls) == len(set(calls))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(plain.state_dict())
    assert float(loss_of(model, batch(0, 0))) == pytest.approx(expected, rel=1e-6)


def _if_meta(module: nn.Module) -> None:
    """As scripts for FSDP1 have it: what is not on the meta device has its values."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(tensor.is_meta for tensor in tensors):
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]


@on_ranks(2)
def test_functions_that_ask_for_meta_tensors(rank: int) -> None:
    with torch.device("meta"):
        model = nn.Sequential(Mended(), Mended())
    policy = ModuleWrapPolicy({Mended, nn.Linear})
    torch.manual_seed(3)
    wrapped = FSDP(model, param_init_fn=_if_meta, auto_wrap_policy=policy)
    torch.manual_seed(3)
    _assert_equal(wrapped.state_dict(), nn.Sequential(Mended(), Mended()).state_dict())
