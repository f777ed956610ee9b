"""Models that are built on the meta device and get their values while they are wrapped."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import torch
from allocations import peak_bytes
from loops import error_of
from models import DOORS, Block, Transformer, batch, loss_of, wrap
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_dynamo import (
    FSDP,
    FSDPError,
    FSDPValueError,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class Resettable(Transformer):
    """The transformer, whose own parameter can be initialised again."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def _on_meta(**kwargs: Any) -> Resettable:
    with torch.device("meta"):
        return Resettable(**kwargs)


def _same_seed(rank: int, world_size: int, tied: bool, strategy: ShardingStrategy) -> list[bool]:
    torch.manual_seed(3)
    eager = Resettable(num_blocks=2, tied=tied)
    torch.manual_seed(3)
    model = wrap(_on_meta(num_blocks=2, tied=tied), sharding_strategy=strategy)
    assert model.head.weight is model.embed.weight or not tied
    expected = eager.state_dict()
    got = model.state_dict()
    assert list(got) == list(expected)
    return [bool(torch.equal(got[name], expected[name])) for name in expected]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_equals_eager_init(ranks: RankPool, tied: bool, strategy: ShardingStrategy) -> None:
    for same in ranks.run(_same_seed, 2, tied, strategy):
        assert all(same)


def _unit_by_unit(rank: int, world_size: int) -> list[list[int]]:
    """Elements of each block's parameters on this rank at the time when each block's last module
    is initialised."""
    model = _on_meta(num_blocks=3)
    seen: list[list[int]] = []

    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        module.reset_parameters()  # type: ignore[operator]
        if any(module is block.down for block in model.blocks):
            held = [[p for p in block.parameters() if not p.is_meta] for block in blocks]
            seen.append([sum(local_of(p).numel() for p in params) for params in held])

    blocks = list(model.blocks)
    wrap(model, param_init_fn=init)
    return seen


def test_units_are_sharded_as_soon_as_they_have_values(ranks: RankPool) -> None:
    whole = sum(p.numel() for p in Block(16).parameters())
    for seen in ranks.run(_unit_by_unit, 2):
        (a, b, c), (a2, b2, c2), (a3, b3, c3) = seen
        assert (a, b, c) == (whole, 0, 0)
        assert a2 < whole
        assert (b2, c2) == (whole, 0)
        assert a3 == a2
        assert b3 < whole
        assert c3 == whole


NUM_LAYERS, DIM = 8, 64


def _held_while_sharded(rank: int, world_size: int, door: str, sync: bool) -> tuple[int, int, str]:
    """Peak in bytes, the most units that had whole values at once, and what an optimizer says that
    was made before."""
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
    return peak[0], most_units, error_of(optimizer.step)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("door", DOORS)
def test_no_rank_holds_the_model(ranks: RankPool, door: str, sync: bool) -> None:
    """Beside the shards there are three units at most: the one that is sharded, copies of it."""
    unit = DIM * DIM * 4
    for peak, most_units, message in ranks.run(_held_while_sharded, 2, door, sync):
        assert most_units <= 2
        # What gloo's threads free, the profiler does not see.
        assert sync or peak <= (NUM_LAYERS / 2 + 3) * unit
        assert "parameters of the sharded model" in message


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


def _lists_what_is_missing(rank: int, world_size: int) -> tuple[str, bool, bool, list[float]]:
    with torch.device("meta"):
        model = Mended()
    before = [*model.parameters(), *model.buffers()]

    def forgetful(module: nn.Module) -> None:
        if not isinstance(module, Mended | nn.BatchNorm1d):
            module.reset_parameters()  # type: ignore[operator]
        elif isinstance(module, nn.BatchNorm1d):
            nn.init.ones_(module.weight)

    message = ""
    try:
        FSDP(model, param_init_fn=forgetful)
    except FSDPValueError as error:
        message = str(error)
    after = [*model.parameters(), *model.buffers()]
    restored = len(after) == len(before) and all(a is b for a, b in zip(before, after, strict=True))
    wrapped = FSDP(model)
    wrapped(torch.ones(3, 4)).sum().backward()
    return message, restored, bool(wrapped.module.norm.num_batches_tracked), model.table.tolist()


def test_lists_what_nobody_initialised(ranks: RankPool) -> None:
    for message, restored, counted, table in ranks.run(_lists_what_is_missing, 2):
        for name in ("norm.bias", "norm.running_mean", "norm.num_batches_tracked", "table"):
            assert repr(name) in message
        assert "linear" not in message
        assert "'norm.weight'" not in message
        assert restored
        assert counted
        assert table == [0, 1, 2, 3]


def _replaces(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.full(parameter.shape, 2.0)))


def _replaced(rank: int, world_size: int) -> set[float]:
    model = _on_meta(num_blocks=1, tied=True)
    whole = wrap(model, param_init_fn=_replaces).state_dict()
    return {float(x) for value in whole.values() for x in (value.min(), value.max())}


def test_an_init_may_register_other_parameters(ranks: RankPool) -> None:
    assert ranks.run(_replaced, 2) == [{2.0}] * 2


def _refused(rank: int, world_size: int) -> list[tuple[str, bool]]:
    found = []
    for fault in ("weak", "tie"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        weak = weakref.ref(model[1].weight) if fault == "weak" else None

        def ties(module: nn.Module, fault: str = fault, model: nn.Sequential = model) -> None:
            module.reset_parameters()  # type: ignore[operator]
            if fault == "tie" and module is model[1]:
                model[1].weight = model[0].weight

        before = list(model.parameters())
        with pytest.raises(FSDPValueError) as error:
            FSDP(model, param_init_fn=ties)
        assert weak is None or weak() is model[1].weight
        same = all(a is b and b.is_meta for a, b in zip(before, model.parameters(), strict=True))
        found.append((str(error.value), same))
    return found


def test_what_cannot_be_initialised(ranks: RankPool) -> None:
    for (weak, kept), (tie, kept_too) in ranks.run(_refused, 2):
        assert "'1.weight'" in weak
        assert "weakref" in weak
        assert "ties it to '0.weight'" in tie
        assert kept
        assert kept_too


def _from_rank_0(rank: int, world_size: int, mode: str) -> tuple[float, float]:
    """Rank 0 has a model, the others have none."""
    torch.manual_seed(11)
    expected = float(loss_of(Resettable(num_blocks=1), batch(0, 0)))
    torch.manual_seed(11)
    model = _on_meta(num_blocks=1) if rank else Resettable(num_blocks=1)
    wrapped = wrap(
        model,
        sync_module_states=True,
        param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False),
    )
    loss = loss_of(in_mode(wrapped, mode), batch(0, 0))
    loss.backward()
    return expected, float(loss)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_only_rank_0_has_values(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_from_rank_0, 3, mode):
        assert got == pytest.approx(expected, rel=1e-6)


class Scale(nn.Module):
    """Has no ``reset_parameters()``."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(3))
        self.register_buffer("offset", torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.offset


def _without_an_initialiser(rank: int, world_size: int) -> tuple[float, float]:
    torch.manual_seed(3)
    expected = float(Scale()(torch.ones(3)).sum())
    torch.manual_seed(3)
    with torch.device("meta" if rank else "cpu"):
        model = Scale()
    return expected, float(FSDP(model, sync_module_states=True)(torch.ones(3)).sum())


def test_what_rank_0_overwrites_needs_no_initialiser(ranks: RankPool) -> None:
    for expected, got in ranks.run(_without_an_initialiser, 2):
        assert got == pytest.approx(expected)


def _raise(module: nn.Module) -> None:
    raise FSDPValueError("no file to read from")


def _refused_by_one(rank: int, world_size: int, fault: str, hybrid: bool) -> tuple[str, str]:
    kwargs: dict[str, Any] = {"sync_module_states": True}
    if hybrid:
        kwargs["device_mesh"] = init_device_mesh("cpu", (2, 2))
        kwargs["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    model = nn.Sequential(nn.Linear(4, 4), Scale())
    if fault == "argument" and rank == world_size - 1:
        kwargs["ignored_modules"] = [3]
    if fault in ("unwritten", "raises"):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4), Scale())
        kwargs["param_init_fn"] = lambda module: None
    if fault == "raises" and rank == 0:
        kwargs["param_init_fn"] = _raise
    try:
        FSDP(model, **kwargs)
    except FSDPError as error:
        return type(error).__name__, str(error)
    return "none", ""


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(
    ("fault", "odd", "kind", "message"),
    [
        ("argument", -1, "FSDPValueError", "modules that are no units"),
        ("unwritten", 0, "FSDPValueError", "no values for '0.weight'"),
        ("raises", 0, "FSDPValueError", "no file to read from"),
    ],
)
def test_all_ranks_refuse_together(
    ranks: RankPool, fault: str, odd: int, kind: str, message: str, hybrid: bool
) -> None:
    """Else the others would wait in a broadcast for the one that has raised."""
    found = ranks.run(_refused_by_one, 4 if hybrid else 3, fault, hybrid)
    kinds = [name for name, _ in found]
    assert kinds.pop(odd) == kind
    assert set(kinds) == {"RankFailedError"}
    for _, text in found:
        assert message in text


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


def _asks_for_meta(rank: int, world_size: int) -> list[bool]:
    """Whether values are those of a plain model."""
    with torch.device("meta"):
        model = nn.Sequential(Mended(), Mended())
    policy = ModuleWrapPolicy({Mended, nn.Linear})
    torch.manual_seed(3)
    wrapped = FSDP(model, param_init_fn=_if_meta, auto_wrap_policy=policy)
    torch.manual_seed(3)
    expected = nn.Sequential(Mended(), Mended()).state_dict()
    state = wrapped.state_dict()
    equal = [torch.equal(state[key], value) for key, value in expected.items()]
    return [state.keys() == expected.keys(), *equal]


def test_functions_that_ask_for_meta_tensors(ranks: RankPool) -> None:
    for answers in ranks.run(_asks_for_meta, 2):
        assert all(answers)
