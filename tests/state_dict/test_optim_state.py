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
from models import batch, loss_of, make_transformer
from pool import RankPool, on_ranks
from shardings import fit_tokens, sharded
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fsdp_dynamo import (
    FSDP,
    DivergenceError,
    FSDPValueError,
    StateDictType,
    UnsupportedError,
    checkpoint,
    fully_shard,
)
from fsdp_dynamo.core.dtensors import local_of


def _plain() -> nn.Module:
    model = make_transformer(num_blocks=2, tied=True)
    model.blocks[0].norm1.requires_grad_(False)
    return model


def _sharded(how: str) -> nn.Module:
    return sharded(_plain(), how)


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
        super().__init__(model.parameters(), {"lr": 0.01})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            part, grad = local_of(param), local_of(param.grad)
            if param.dim() < 2:
                part.sub_(grad, alpha=0.01)
                continue
            flat_grad, start = grad.reshape(-1), _start(param)
            positions = torch.arange(start, start + part.numel())
            rows, columns = positions // param.shape[1], positions % param.shape[1]
            state = self.state[param]
            for name, size, index in zip(
                ("row", "column"), param.shape, (rows, columns), strict=True
            ):
                sums = torch.zeros(size).index_add_(0, index, flat_grad.square())
                dist.all_reduce(sums)
                state[name] = 0.9 * state.get(name, torch.zeros(size)) + 0.1 * sums
            scale = (state["row"][rows] * state["column"][columns] + 1e-6).rsqrt()
            part.sub_((flat_grad * scale).view_as(part), alpha=1e-3)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(v, b[k]) for k, v in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "factored": _Factored,
}


def _resumed(
    rank: int, world_size: int, how: str, kind: str, folder: str, is_first: bool
) -> tuple[Any, list[float]]:
    """Train two steps and save, or load that; whole states then, and losses of two more steps."""
    model = _sharded(how)
    optimizer = OPTIMIZERS[kind](model)
    if is_first:
        fit_tokens(model, optimizer, rank, range(2))
        checkpoint.save(folder, model, optimizer, step=2)
    else:
        checkpoint.load(folder, model, optimizer)
    whole = FSDP.optim_state_dict(model, optimizer)
    return whole, fit_tokens(model, optimizer, rank, range(2, 4))


@pytest.mark.parametrize(
    ("kind", "how", "world_size", "loaders"),
    [
        ("adamw", "blocks", 4, [("one unit", 3), ("not sharded", 2)]),
        ("factored", "one unit", 2, [("one unit", 2), ("blocks", 4)]),
    ],
)
def test_another_sharding_loads_it(
    ranks: RankPool,
    tmp_path: Path,
    kind: str,
    how: str,
    world_size: int,
    loaders: list[tuple[str, int]],
) -> None:
    """Whole states are the same bit by bit; the same sharding goes on as if nothing had been."""
    folder = str(tmp_path / "checkpoint")
    saved = ranks.run(_resumed, world_size, how, kind, folder, True)
    expected = saved[0][0]
    assert all(_equal(whole, expected) for whole, _ in saved)
    for other, size in loaders:
        found = ranks.run(_resumed, size, other, kind, folder, False)
        assert all(_equal(whole, expected) for whole, _ in found)
        if (other, size) == (how, world_size):
            assert [losses for _, losses in found] == [losses for _, losses in saved]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@on_ranks(2)
def test_whole_states_are_the_plain_optimizers(rank: int, kind: str) -> None:
    """Trained on the same batches; another sharding loads them."""
    make = _adamw if kind == "adamw" else _sgd
    plain, model = _plain(), _sharded("blocks")
    reference, optimizer = make(plain), make(model)
    for step in range(2):
        plain.zero_grad()
        (sum(loss_of(plain, batch(r, step)) for r in range(2)) / 2).backward()
        reference.step()
    fit_tokens(model, optimizer, rank, range(2))
    by_param = {p: n for n, p in plain.named_parameters()}
    order = [by_param[p] for group in reference.param_groups for p in group["params"]]
    by_name = {order[n]: state for n, state in reference.state_dict()["state"].items()}
    whole = FSDP.optim_state_dict(model, optimizer)
    torch.testing.assert_close(whole["state"], by_name, rtol=1e-4, atol=1e-6)
    assert [name for group in whole["param_groups"] for name in group["params"]] == order
    other = _sharded("one unit")
    again = make(other)
    again.load_state_dict(FSDP.optim_state_dict_to_load(other, again, whole))
    assert _equal(FSDP.optim_state_dict(other, again), whole)


class _Sometimes(torch.optim.SGD):
    """A momentum, and a mask that most parameters have none of (as Apex's and fairseq's do)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for number, param in enumerate(group["params"]):
                self.state[param]["mask"] = torch.ones_like(param) if number == 0 else None


@on_ranks(2)
def test_states_that_are_none(rank: int, tmp_path: Path) -> None:
    model = _sharded("blocks")
    optimizer, fresh, loaded = (
        _Sometimes(model.parameters(), lr=0.1, momentum=0.9) for _ in range(3)
    )
    fit_tokens(model, optimizer, rank)
    own = optimizer.state_dict()["state"]
    assert sum(state["mask"] is None for state in own.values()) > 1
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        parts = FSDP.optim_state_dict(model, optimizer)
    whole = FSDP.optim_state_dict(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    for states in (whole["state"], parts["state"]):
        kinds = {k: {n: v is None for n, v in state.items()} for k, state in states.items()}
        assert kinds == {
            names[number]: {n: v is None for n, v in state.items()} for number, state in own.items()
        }
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, whole))
    assert _equal(fresh.state_dict()["state"], own)
    checkpoint.save(tmp_path, model, optimizer, step=1)
    checkpoint.load(tmp_path, model, loaded)
    assert _equal(loaded.state_dict()["state"], own)


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@on_ranks(2)
def test_other_forms(rank: int, form: str) -> None:
    """No groups, a state of the optimizer as a whole, and other orders on other ranks."""
    model = _sharded("blocks")
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params if rank == 0 else params[::-1], lr=0.1, momentum=0.9)
    fit_tokens(model, optimizer, rank)
    optimizer.state["rounds"] = 7  # type: ignore[index]
    fresh = torch.optim.SGD(params[::-1] if rank == 0 else params, lr=0.1, momentum=0.9)
    with FSDP.state_dict_type(model, StateDictType[form]):
        without_groups = {"state": optimizer.state_dict()["state"]}
        states = FSDP.optim_state_dict(model, optimizer)
        no_groups = FSDP.optim_state_dict(model, optimizer, without_groups)
        loaded = FSDP.optim_state_dict_to_load(model, fresh, no_groups)
        again = FSDP.optim_state_dict_to_load(model, fresh, states)
        fresh.load_state_dict(again)
    assert list(no_groups) == list(loaded) == ["state"]
    assert no_groups["state"].keys() == states["state"].keys()
    assert loaded["state"].keys() == again["state"].keys()
    assert states["state"]["rounds"] == fresh.state["rounds"] == 7  # type: ignore[index]
    assert all(_equal(fresh.state[p], optimizer.state[p]) for p in params)


class _RowSums(torch.optim.SGD):
    """Its state depends on how a parameter is sharded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["sums"] = torch.full((3,), float(dist.get_rank()))


@on_ranks(2)
def test_bad_input(rank: int) -> None:
    model = _sharded("blocks")
    optimizer, rows = _sgd(model), _RowSums(model.parameters(), lr=0.1)
    fit_tokens(model, optimizer, rank)
    whole = FSDP.optim_state_dict(model, optimizer)
    fit_tokens(model, rows, rank)
    with pytest.raises(DivergenceError, match="sums"):
        FSDP.optim_state_dict(model, rows)
    with pytest.raises(FSDPValueError, match="an optimizer of this model's"):
        FSDP.optim_state_dict(model, _sgd(nn.Linear(2, 2)))
    other_shape = {"norm.weight": {"momentum_buffer": torch.ones(5)}}
    torn_groups = [{"params": ["norm.weight"], "lr": 1.0}]
    for wrong, named in (
        ({**whole, "state": {**whole["state"], "nowhere": {}}}, "nowhere"),
        ({**whole, "state": other_shape}, r"norm\.weight"),
        ({"state": {}, "param_groups": torn_groups}, "a saved group with parameter"),
    ):
        with pytest.raises(FSDPValueError, match=named):
            FSDP.optim_state_dict_to_load(model, optimizer, wrong)


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
