"""``shard_placement_fn``: parameters that are divided along other dimensions than the first."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from loops import error_of, fit_squares
from modes import in_mode
from pool import RankPool, on_ranks
from resume_programs import RESUMES
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from user_collectives import gather_of_the_user, scatter_of_the_user

from fsdp_dynamo import (
    FSDP,
    CPUOffload,
    DivergenceError,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from fsdp_dynamo.comm import collectives


class Experts(nn.Module):
    """Stacked matrices, fewer than ranks may be."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 12, 24) / 5)
        self.down = nn.Parameter(torch.randn(3, 24, 12) / 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("bd,edh->ebh", x, self.up))
        out: torch.Tensor = torch.einsum("ebh,ehd->bd", hidden, self.down) * self.scale
        return x + out


def _plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 12), Experts(), Experts(), nn.Linear(12, 4))


def _place(param: nn.Parameter) -> Shard | None:
    """Every second matrix by columns, experts by both of their own dimensions."""
    if param.dim() == 3:
        return Shard(1) if param.shape[1] == 24 else Shard(-1)
    return Shard(1) if param.shape == (12, 12) else None


def _sharded(plain: nn.Module, **kwargs: Any) -> Any:
    model: Any = copy.deepcopy(plain)
    for unit in (model[1], model[2], model):
        fully_shard(unit, shard_placement_fn=_place, **kwargs)
    return model


def _loss(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _train(model: nn.Module, rank: int, steps: range, optimizer: Any) -> list[float]:
    return fit_squares(model, optimizer, (5, 12), [10 * step + rank for step in steps])


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02, fused=True)


@pytest.mark.parametrize(
    ("world_size", "mode", "least"),
    [
        (2, "eager", 1),
        (2, "eager", None),
        (3, "eager", 1),
        (3, "eager", None),
        (3, "hooks", 1),
        (3, "graph", None),
    ],
)
def test_trains_as_ddp(ranks: RankPool, world_size: int, mode: str, least: int | None) -> None:
    ranks.run(_as_ddp, world_size, mode, least)


def _as_ddp(rank: int, world_size: int, mode: str, least: int | None) -> None:
    """Parts are those that torch makes, before and after training."""
    with mock.patch.dict(collectives.DIRECT_BYTES, {"point_to_point": least}):
        plain = _plain()
        model = _sharded(plain)
        for param, of_one in zip(model.parameters(), plain.parameters(), strict=True):
            wanted = Replicate() if not of_one.dim() else _place(of_one) or Shard(0)
            placed = distribute_tensor(
                of_one.detach(), param.device_mesh, [wanted], src_data_rank=None
            )
            assert param.placements == placed.placements
            torch.testing.assert_close(param.to_local(), placed.to_local(), rtol=0, atol=0)
            assert param.to_local().is_contiguous()
        _train_and_compare(plain, model, in_mode(model, mode), rank)


def _train_and_compare(plain: Any, model: Any, run: Any, rank: int) -> None:
    """Losses, and values, gradients and moments after three steps are those of DDP."""
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.05, 0.9) for m in (model, plain))
    expected = _train(DistributedDataParallel(plain), rank, range(3), theirs)
    assert _train(run, rank, range(3), mine) == pytest.approx(expected, rel=1e-5)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad.placements == p.placements
        assert p.grad.to_local().is_contiguous()
        of_one = q.detach(), q.grad, theirs.state[q]["momentum_buffer"]
        own = p.detach(), p.grad, mine.state[p]["momentum_buffer"]
        for value, got in zip(of_one, own, strict=True):
            torch.testing.assert_close(got.full_tensor(), value, rtol=1e-4, atol=1e-6, msg=name)


def _summoned(model: Any) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            model[1].up.mul_(2)
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_with_other_features(rank: int, mode: str) -> None:
    """Accumulation, mixed precision, frozen parameters, clipping, whole parameters, a copy."""
    plain = _plain()
    plain[2].down.requires_grad_(False)  # type: ignore[union-attr,operator]
    model = _sharded(plain, mixed_precision=MixedPrecision(param_dtype=torch.float64))
    double, run = plain.double(), in_mode(model, mode)
    for step in range(4):
        for each in range(2):
            (_loss_in_double(double, 2 * step + each) / 2).backward()
        with model.no_sync() if step % 2 == 0 else FSDP.state_dict_type(model, FULL):
            _loss(run, 2 * step + rank).backward()
    norm = nn.utils.clip_grad_norm_(double.parameters(), 0.1)
    torch.testing.assert_close(float(model.clip_grad_norm_(0.1)), float(norm), rtol=1e-4, atol=0)
    for param, whole in zip(model.parameters(), plain.parameters(), strict=True):
        if whole.grad is not None:
            got = param.grad.full_tensor().double()
            torch.testing.assert_close(got, whole.grad, rtol=1e-4, atol=1e-6)
        else:
            assert param.grad is None
    copied = copy.deepcopy(model)
    for one in (model, copied):
        before = {name: p.full_tensor() for name, p in one.named_parameters()}
        before["1.up"] = 2 * before["1.up"]
        torch.testing.assert_close(_summoned(one), before, rtol=0, atol=0)
        torch.testing.assert_close(one[1].up.full_tensor(), before["1.up"], rtol=0, atol=0)


FULL = StateDictType.FULL_STATE_DICT


def _loss_in_double(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(5, 12, generator=torch.Generator().manual_seed(seed))
    loss: torch.Tensor = model(x.double()).square().mean()
    return loss


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("replicas", "eager"),
        ("replicas", "graph"),
        ("hierarchy", "eager"),
        ("fewer ranks", "eager"),
        ("one rank", "eager"),
        ("whole", "eager"),
        ("offload", "eager"),
        ("collectives of the user's", "eager"),
    ],
)
@on_ranks(4)
def test_sharded_otherwise(rank: int, kind: str, mode: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    kwargs: dict[str, Any]
    kwargs, placements = {
        "replicas": ({"mesh": mesh}, (Replicate(), Shard(1))),
        "hierarchy": (
            {"mesh": mesh, "strategy": ShardingStrategy.HIERARCHICAL_SHARD},
            (Shard(1), Shard(1)),
        ),
        "fewer ranks": ({"reshard_after_forward": 2}, (Shard(1),)),
        "one rank": (
            {"mesh": init_device_mesh("cpu", (4, 1), mesh_dim_names=("r", "s"))},
            (Replicate(), Shard(1)),
        ),
        "whole": ({"strategy": ShardingStrategy.NO_SHARD}, (Replicate(),)),
        "offload": ({"cpu_offload": CPUOffload(True)}, (Shard(1),)),
        "collectives of the user's": ({}, (Shard(1),)),
    }[kind]
    plain = _plain()
    model = _sharded(plain, **kwargs)
    if "collectives" in kind:
        for unit in (model[1], model[2], model):
            unit.set_custom_all_gather(gather_of_the_user())
            unit.set_custom_reduce_scatter(scatter_of_the_user())
    assert model[1].down.placements == placements
    _train_and_compare(plain, model, in_mode(model, mode), rank)


@on_ranks(2)
def test_used_as_torchs(rank: int) -> None:
    """What code that was written for torch's ``fully_shard`` does with such a parameter."""
    plain: Any = _plain()
    for experts in (plain[1], plain[2]):
        experts.scale = nn.Parameter(torch.ones(1))
    models = _sharded(plain), plain
    for unit in (models[1][1], models[1][2], models[1]):  # type: ignore[index]
        torch_fully_shard(unit, shard_placement_fn=_place)  # type: ignore[arg-type]
    found = []
    for model in models:
        _loss(model, rank).backward()
        param: Any = model[1].down  # type: ignore[index]
        penalty = (param.view(3, 12 * 24) * 2).square().sum() + (param @ param.mT).sum()
        penalty.redistribute(placements=[Replicate()]).to_local().backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with torch.no_grad():
            param.mul_(2).copy_(param.redistribute(placements=[Replicate()]) / 3)
        found.append([norm.full_tensor(), param.grad.to_local(), param.to_local()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@on_ranks(4)
def test_with_tensor_parallelism(rank: int) -> None:
    """Local tensors are those of torch's own, on the same dimension, too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    models: list[Any] = []
    for shard_module in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        models.append(parallelize_module(model, mesh["tp"], plan))
        shard_module(model, mesh=mesh["dp"], shard_placement_fn=_columns)  # type: ignore[operator]
    for step in range(2):
        for model in models:
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step + rank // 2))
            model(x).square().sum().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert mine.placements == theirs.placements
            torch.testing.assert_close(mine.to_local(), theirs.to_local())
            torch.testing.assert_close(mine.grad.to_local(), theirs.grad.to_local())
            mine.grad = theirs.grad = None


def _columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


@pytest.mark.parametrize("way", ["dcp", "full"])
@on_ranks(2)
def test_checkpoints(rank: int, way: str, tmp_path: Path) -> None:
    """From columns to rows and back."""
    plain = _plain()
    expected = _train(DistributedDataParallel(plain), rank, range(4), _adam(plain))
    for first, then in ((_sharded, _by_rows), (_by_rows, _sharded)):
        model, fresh = first(_plain()), then(_plain())
        trained, again = (model, _adam(model)), (fresh, _adam(fresh))
        losses = _train(model, rank, range(2), trained[1])
        with FSDP.state_dict_type(model, FULL):
            assert all(value.is_contiguous() for value in model.state_dict().values())
        RESUMES[way](trained, again, f"{tmp_path}/{first.__name__}")
        losses += _train(fresh, rank, range(2, 4), again[1])
        assert losses == pytest.approx(expected, rel=1e-5)


def _by_rows(plain: nn.Module) -> nn.Module:
    for unit in (plain[1], plain[2], plain):  # type: ignore[index]
        fully_shard(unit)
    return plain


@on_ranks(2)
def test_refused(rank: int) -> None:
    for placement in (Shard(1), Shard(2), Shard(-3), Replicate(), "Shard(0)"):
        linear = nn.Linear(3, 4, bias=False)
        message = error_of(
            lambda m=linear, p=placement: fully_shard(m, shard_placement_fn=lambda _: p)
        )
        wanted = "None or Shard of a dimension"
        if isinstance(placement, Shard):
            wanted = "None, Shard(0), or Shard of a dimension of (4, 3) that 2 ranks"
        assert f"expected {wanted}" in message
        assert "shard_placement_fn of parameter 'weight'" in message
        assert not isinstance(linear.weight, DTensor)
    model = _sharded(_plain())
    parts = {name: p.detach() for name, p in model.named_parameters()}
    twice = model.update_whole(parts, lambda _, whole: 2 * whole)
    assert all(torch.equal(twice[name].to_local(), 2 * p.to_local()) for name, p in parts.items())
    for own in (Shard(rank), Shard(5 * rank)):  # one that does not divide, too
        with pytest.raises(DivergenceError, match="placements of shard_placement_fn"):
            fully_shard(nn.Linear(4, 4, bias=False), shard_placement_fn=lambda p, own=own: own)
