"""Optimizer state dicts: whole, as parts, from one sharding to another."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import fit_squares
from models import Block, batch, loss_of, make_transformer, wrap
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPValueError,
    FullOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
    UnsupportedError,
    checkpoint,
    fully_shard,
)
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _plain() -> nn.Module:
    model = make_transformer(num_blocks=2, tied=True)
    model.blocks[0].norm1.requires_grad_(False)
    return model


def _sharded(how: str) -> nn.Module:
    if how == "plain":
        return _plain()
    if how == "one unit":
        return FSDP(_plain())
    if how == "composable":
        return fully_shard(_plain(), policy=ModuleWrapPolicy({Block}))
    if how == "not sharded":
        return wrap(_plain(), sharding_strategy=ShardingStrategy.NO_SHARD)
    if how == "replicas":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        return wrap(_plain(), sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)
    if how == "hierarchy":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        strategy = ShardingStrategy.HIERARCHICAL_SHARD
        return FSDP(_plain(), sharding_strategy=strategy, device_mesh=mesh)
    return wrap(_plain())


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups, and a parameter that is in none."""
    named = dict(model.named_parameters())
    del named["norm.bias"]
    matrices = [p for name, p in named.items() if "norm" not in name and name.endswith("weight")]
    vectors = [p for p in named.values() if all(p is not other for other in matrices)]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _start(param: torch.Tensor) -> int:
    """Where this rank's elements begin in the parameter, row by row."""
    if not isinstance(param, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(
        param.shape, param.device_mesh, param.placements
    )
    return offset[0] * math.prod(param.shape[1:]) if offset else 0


class _Factored(torch.optim.Optimizer):
    """Like Adafactor: of the squared gradients of a matrix it keeps the sums over rows and columns.

    These are of the whole matrix, and of no rank's part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), {"lr": 0.01})

    def _places(self) -> list[tuple[nn.Parameter, tuple[int, ...], int]]:
        return [(p, tuple(p.shape), _start(p)) for p in self.model.parameters()]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param, shape, start in self._places():
            if param.grad is None:
                continue
            part, grad = local_of(param), local_of(param.grad)
            if len(shape) < 2:
                part.sub_(grad, alpha=0.01)
                continue
            flat_grad = grad.reshape(-1)
            positions = torch.arange(start, start + part.numel())
            rows, columns = positions // shape[1], positions % shape[1]
            state = self.state[param]
            for name, size, index in (("row", shape[0], rows), ("column", shape[1], columns)):
                sums = torch.zeros(size).index_add_(0, index, flat_grad.square())
                if part.numel() < shape[0] * shape[1] or dist.get_world_size() > 1:
                    dist.all_reduce(sums)
                state[name] = 0.9 * state.get(name, torch.zeros(size)) + 0.1 * sums
            scale = (state["row"][rows] * state["column"][columns] + 1e-6).rsqrt()
            part.sub_((flat_grad * scale).view_as(part), alpha=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "factored": _Factored,
}


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range
) -> list[float]:
    losses = []
    for step in steps:
        loss = loss_of(model, batch(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _save(rank: int, world_size: int, how: str, kind: str, folder: str) -> tuple[Any, list[float]]:
    """Two steps, a checkpoint, two more steps: whole states at the checkpoint, later losses."""
    model = _sharded(how)
    optimizer = OPTIMIZERS[kind](model)
    _train(model, optimizer, rank, range(2))
    whole = _whole(model, optimizer)
    checkpoint.save(folder, model, optimizer, step=2)
    return whole, _train(model, optimizer, rank, range(2, 4))


def _load(rank: int, world_size: int, how: str, kind: str, folder: str) -> tuple[Any, list[float]]:
    model = _sharded(how)
    optimizer = OPTIMIZERS[kind](model)
    checkpoint.load(folder, model, optimizer)
    return _whole(model, optimizer), _train(model, optimizer, rank, range(2, 4))


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return FSDP.optim_state_dict(model, optimizer)


@pytest.mark.parametrize(
    ("how", "world_size", "kind", "loaders"),
    [
        ("blocks", 4, "adamw", [("blocks", 4), ("one unit", 3), ("composable", 1)]),
        ("composable", 2, "sgd", [("composable", 2), ("replicas", 4), ("not sharded", 2)]),
        ("one unit", 2, "factored", [("one unit", 2), ("blocks", 4)]),
        ("hierarchy", 4, "adamw", [("hierarchy", 4), ("one unit", 4), ("blocks", 3)]),
        ("blocks", 3, "adamw", [("hierarchy", 4)]),
    ],
)
def test_another_sharding_loads_it(
    ranks: RankPool,
    tmp_path: Path,
    how: str,
    world_size: int,
    kind: str,
    loaders: list[tuple[str, int]],
) -> None:
    """Whole states are the same bit by bit; the same sharding goes on as if nothing had been."""
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(_save, world_size, how, kind, folder)
    for whole, _ in saved:
        assert _equal(whole, saved[0][0])
    for other, size in loaders:
        found = ranks.run(_load, size, other, kind, folder)
        for rank, (whole, losses) in enumerate(found):
            assert _equal(whole, saved[0][0])
            if (other, size) == (how, world_size):
                assert losses == saved[rank][1]


def _of_the_plain_model(rank: int, world_size: int, kind: str) -> tuple[bool, list[float], Any]:
    """Whole states are those of a plain optimizer, and go both modes."""
    plain = _plain()
    reference = OPTIMIZERS[kind](plain)
    model = _sharded("blocks")
    optimizer = OPTIMIZERS[kind](model)
    for step in range(2):
        plain.zero_grad()
        (sum(loss_of(plain, batch(r, step)) for r in range(world_size)) / world_size).backward()
        reference.step()
    _train(model, optimizer, rank, range(2))
    names = [n for n, p in plain.named_parameters()]
    by_name = {p: n for n, p in plain.named_parameters()}
    order = [by_name[p] for group in reference.param_groups for p in group["params"]]
    whole = FSDP.optim_state_dict(model, optimizer)
    close = []
    for number, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            close.append(torch.allclose(value, whole["state"][order[number]][name], 1e-4, 1e-6))
    other = _sharded("one unit")
    again = OPTIMIZERS[kind](other)
    again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, whole))
    same = _equal(FSDP.optim_state_dict(other, again), whole)
    known = all(name in names for name in whole["state"])
    groups = [group["params"] for group in whole["param_groups"]]
    return all(close) and known and same, [len(g) for g in groups], sorted(whole["state"])[:2]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_whole_states_are_the_plain_optimizers(ranks: RankPool, kind: str) -> None:
    for same, groups, first in ranks.run(_of_the_plain_model, 2, kind):
        assert same
        assert sum(groups) == len(list(_plain().parameters())) - (kind == "adamw")
        assert first == ["blocks.0.down.bias", "blocks.0.down.weight"]


class _Sometimes(torch.optim.SGD):
    """A momentum, and a mask that most parameters have none of (as Apex's and fairseq's do)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param]["mask"] = torch.ones_like(param) if number == 0 else None


def _with_none(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    model = _sharded("blocks")
    optimizer = _Sometimes(model.parameters(), lr=0.1, momentum=0.9)
    _train(model, optimizer, rank, range(1))
    own = optimizer.state_dict()["state"]
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = FSDP.optim_state_dict(model, optimizer)
    whole = FSDP.optim_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    fresh = _Sometimes(model.parameters(), lr=0.1, momentum=0.9)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, whole))
    checkpoint.save(folder, model, optimizer, step=1)
    loaded = _Sometimes(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load(folder, model, loaded)

    def has_all(states: dict[str, Any]) -> bool:
        return all(
            states[names[number]].keys() == state.keys()
            and [n for n, v in states[names[number]].items() if v is None]
            == [n for n, v in state.items() if v is None]
            for number, state in own.items()
        )

    return {
        "some are None": sum(state["mask"] is None for state in own.values()) > 1,
        "whole": has_all(whole["state"]),
        "parts": has_all(parts["state"]),
        "loaded": _equal(fresh.state_dict()["state"], own),
        "from files": _equal(loaded.state_dict()["state"], own),
    }


def test_states_that_are_none(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_with_none, 2, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []


def _other_forms(rank: int, world_size: int, form: str) -> dict[str, bool]:
    """No groups, a state of the optimizer as a whole, and other orders on other ranks."""
    model = _sharded("blocks")
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params if rank == 0 else params[::-1], lr=0.1, momentum=0.9)
    _train(model, optimizer, rank, range(1))
    optimizer.state["rounds"] = 7  # type: ignore[index]
    fresh = torch.optim.SGD(params[::-1] if rank == 0 else params, lr=0.1, momentum=0.9)
    with FSDP.state_dict_type(model, StateDictType[form]):
        given = optimizer.state_dict()
        without = {"state": given["state"]}
        states = FSDP.optim_state_dict(model, optimizer)
        no_groups = FSDP.optim_state_dict(model, optimizer, without)
        loaded = FSDP.optim_state_dict_to_load(model, fresh, no_groups)
        again = FSDP.optim_state_dict_to_load(model, fresh, states)
        fresh.load_state_dict(again)
    return {
        "saved": list(no_groups) == ["state"]
        and no_groups["state"].keys() == states["state"].keys(),
        "loaded": list(loaded) == ["state"] and loaded["state"].keys() == again["state"].keys(),
        "whole": states["state"]["rounds"] == fresh.state["rounds"] == 7,  # type: ignore[index]
        "order": all(_equal(fresh.state[p], optimizer.state[p]) for p in params),
    }


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
def test_other_forms(ranks: RankPool, form: str) -> None:
    for found in ranks.run(_other_forms, 2, form):
        assert [what for what, holds in found.items() if not holds] == []


class _RowSums(torch.optim.SGD):
    """Its state depends on how a parameter is sharded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sums"] = torch.full((3,), float(dist.get_rank()))


def _options(rank: int, world_size: int) -> dict[str, bool]:
    model = _sharded("blocks")
    optimizer = _sgd(model)
    _train(model, optimizer, rank, range(1))
    first = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, None, first):
        alone = FSDP.optim_state_dict(model, optimizer)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = FSDP.optim_state_dict(model, optimizer)
        given = FSDP.optim_state_dict_to_load(model, optimizer, local)
    whole = FSDP.optim_state_dict(model, optimizer)
    rows = _RowSums(model.parameters(), lr=0.1)
    _train(model, rows, rank, range(1))
    unknown = {**whole, "state": {**whole["state"], "nowhere": {}}}
    shape = {"head.bias": {"momentum_buffer": torch.ones(5)}}
    torn = [{"params": ["norm.weight"], "lr": 1.0}]
    wrong: dict[str, tuple[Callable[[], object], type[Exception]]] = {
        "state of the sharding": (lambda: FSDP.optim_state_dict(model, rows), DivergenceError),
        "unknown name": (
            lambda: FSDP.optim_state_dict_to_load(model, optimizer, unknown),
            FSDPValueError,
        ),
        "another shape": (
            lambda: FSDP.optim_state_dict_to_load(
                model, optimizer, {**whole, "state": {"norm.weight": shape["head.bias"]}}
            ),
            FSDPValueError,
        ),
        "another model": (
            lambda: FSDP.optim_state_dict(model, _sgd(nn.Linear(2, 2))),
            FSDPValueError,
        ),
        "torn groups": (
            lambda: FSDP.optim_state_dict_to_load(
                model, optimizer, {"state": {}, "param_groups": torn}
            ),
            FSDPValueError,
        ),
    }
    refused = {}
    for what, (call, kind) in wrong.items():
        try:
            call()
            refused[what] = False
        except kind:
            refused[what] = True
    state = optimizer.state_dict()["state"]
    return {
        "rank 0 alone": _equal(alone, whole) if rank == 0 else alone == {},
        "local": all(_equal(value, given["state"][number]) for number, value in state.items()),
        **refused,
    }


def test_options_and_bad_input(ranks: RankPool) -> None:
    for found in ranks.run(_options, 2):
        assert [what for what, holds in found.items() if not holds] == []


@on_ranks(2)
def test_sharded_states_of_another_shape_are_refused(rank: int) -> None:
    """Another optimizer would not know whether it was a DTensor."""
    model = fully_shard(nn.Linear(4, 4))
    optimizer = _sgd(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["rows"] = model.weight.detach().square().mean(1)
    with pytest.raises(UnsupportedError, match=r"got a DTensor of shape \(4,\)"):
        FSDP.optim_state_dict(model, optimizer)


IMAGES = (4, 4, 4, 4), range(3)


def _convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(8 * 16, 2))


@pytest.mark.parametrize("by_name", [False, True])
@on_ranks(2)
def test_states_of_a_plain_model_in_channels_last(rank: int, by_name: bool) -> None:
    """Parts of them are contiguous: fused optimizers take them for as contiguous as parameters."""
    plain = _convolution().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before = torch.optim.Adam(plain.parameters(), 0.05)
    fit_squares(plain, before, *IMAGES)
    states, values = copy.deepcopy(before.state_dict()), copy.deepcopy(plain.state_dict())
    expected = fit_squares(plain, before, *IMAGES)
    model = _convolution()
    model.load_state_dict(values)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.05, fused=True)
    states["param_groups"][0]["fused"] = True
    if by_name:
        names = [name for name, _ in plain.named_parameters()]
        states["state"] = {names[number]: state for number, state in states["state"].items()}
        states["param_groups"][0]["params"] = names
        states = FSDP.optim_state_dict_to_load(model, optimizer, states)
    optimizer.load_state_dict(states)
    assert fit_squares(model, optimizer, *IMAGES) == pytest.approx(expected, rel=1e-5)
