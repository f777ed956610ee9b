"""clip_grad_norm_ with any p: the norm of one process, over sharded and whole units."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, UnsupportedError
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.grad_clip import power_sum
from fsdp_dynamo.wrap_policy import CustomPolicy

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))
BOUND = 0.1
CLIP = nn.utils.clip_grad_norm_  # bound before any model is wrapped, as "from ... import" does
Norms = tuple[float, float, float]


def _expected(world_size: int, norm_type: float) -> float:
    """Of one process with the whole batch."""
    plain = make_transformer(num_blocks=2)
    total = sum(loss_of(plain, batch(r, 0)) for r in range(world_size)) / world_size
    total.backward()
    return float(nn.utils.clip_grad_norm_(plain.parameters(), BOUND, norm_type))


def _norms(rank: int, world_size: int, wrapped: FSDP, mode: str) -> list[Norms]:
    """For each p: one process's norm, the sharded model's, and the latter after clipping."""
    model = in_mode(wrapped, mode)
    found = []
    for norm_type in NORM_TYPES:
        wrapped.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        got = float(wrapped.clip_grad_norm_(BOUND, norm_type))
        after = float(wrapped.clip_grad_norm_(BOUND, norm_type))
        found.append((_expected(world_size, norm_type), got, after))
    return found


def _check(results: list[list[Norms]]) -> None:
    for norms in results:
        for expected, got, after in norms:
            assert got == pytest.approx(expected, rel=1e-6)
            assert after == pytest.approx(min(BOUND, expected), rel=1e-4)


def _one_strategy(rank: int, world_size: int, name: str, mode: str) -> list[Norms]:
    strategy = ShardingStrategy[name]
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=strategy)
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("FULL_SHARD", "eager"),
        ("NO_SHARD", "eager"),
        ("FULL_SHARD", "hooks"),
        ("FULL_SHARD", "graph"),
        pytest.param("NO_SHARD", "hooks", marks=pytest.mark.slow),
        pytest.param("NO_SHARD", "graph", marks=pytest.mark.slow),
    ],
)
def test_norm_equals_one_process(ranks: RankPool, strategy: str, mode: str) -> None:
    _check(ranks.run(_one_strategy, 2, strategy, mode))


def _spoilt(rank: int, world_size: int) -> list[float]:
    """Norms where one rank has a NaN in its part of a gradient."""
    wrapped = wrap(make_transformer(num_blocks=2))
    norms = []
    for norm_type in NORM_TYPES:
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, 0)).backward()
        grads = [local_of(p.grad) for p in wrapped.parameters() if p.grad is not None]
        if rank == 1:
            next(grad for grad in grads if grad.numel()).fill_(torch.nan)
        norms.append(float(wrapped.clip_grad_norm_(BOUND, norm_type)))
    return norms


def test_nan_of_one_rank_is_everyones(ranks: RankPool) -> None:
    for norms in ranks.run(_spoilt, 2):
        assert all(math.isnan(norm) for norm in norms)


def _sharded_and_whole(rank: int, world_size: int, mode: str) -> list[Norms]:
    """The first block is whole on every rank; the second one and the root are sharded."""
    plain = make_transformer(num_blocks=2)
    strategies = {
        plain.blocks[0]: ShardingStrategy.NO_SHARD,
        plain.blocks[1]: ShardingStrategy.FULL_SHARD,
    }
    policy = CustomPolicy(
        lambda m: {"sharding_strategy": strategies[m]} if isinstance(m, Block) else False
    )
    wrapped = FSDP(plain, auto_wrap_policy=policy)
    used = [unit.config.sharding_strategy.name for unit in wrapped._fsdp_root.units]
    assert used == ["FULL_SHARD", "NO_SHARD", "FULL_SHARD"]
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize("mode", MODES)
def test_sharded_and_whole_units_in_one_model(ranks: RankPool, mode: str) -> None:
    _check(ranks.run(_sharded_and_whole, 2, mode))


def _nested_on_other_groups(rank: int, world_size: int, case: str, mode: str) -> list[Norms]:
    """The first block on other groups than the root: four ranks, half of them, or replicas."""
    grid = init_device_mesh("cpu", (2, 2))
    hybrid = {"device_mesh": grid, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    copies = {"process_group": grid.get_group(1)}
    inner, outer = {
        "hybrid in sharded": (hybrid, {}),
        "sharded in hybrid": ({}, hybrid),
        "whole in hybrid": ({"sharding_strategy": ShardingStrategy.NO_SHARD}, hybrid),
        "copies in sharded": (copies, {}),
    }[case]
    plain = make_transformer(num_blocks=2)
    plain.blocks[0] = FSDP(plain.blocks[0], **inner)
    wrapped = FSDP(plain, **outer)
    if case == "copies in sharded":  # they agree where their data do
        return _norms(rank % 2, 2, wrapped, mode)
    return _norms(rank, world_size, wrapped, mode)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("hybrid in sharded", "eager"),
        ("sharded in hybrid", "eager"),
        ("whole in hybrid", "eager"),
        ("copies in sharded", "eager"),
        ("hybrid in sharded", "hooks"),
        ("hybrid in sharded", "graph"),
    ],
)
def test_units_on_other_groups(ranks: RankPool, case: str, mode: str) -> None:
    _check(ranks.run(_nested_on_other_groups, 4, case, mode))


def _copies_that_differ(rank: int, world_size: int) -> str:
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    plain = make_transformer(num_blocks=2)
    plain.blocks[0] = FSDP(plain.blocks[0], process_group=alone)
    wrapped = FSDP(plain)
    loss_of(wrapped, batch(rank, 0)).backward()
    before = [p.grad.clone() for p in wrapped.parameters()]
    with pytest.raises(UnsupportedError) as raised:
        wrapped.clip_grad_norm_(BOUND)
    after = [p.grad for p in wrapped.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))
    return str(raised.value)


def test_a_unit_that_differs_between_ranks_of_the_root(ranks: RankPool) -> None:
    for message in ranks.run(_copies_that_differ, 2):
        assert "clip_grad_norm_(), unit 'blocks.0'" in message
        assert "expected one norm on all ranks of the root" in message


def _by_torch(rank: int, world_size: int, strategy: str) -> list[tuple[float, float]]:
    """Norms that torch finds for DDP, and for our parameters; a sum that waits is this rank's."""
    wrapped = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    ddp = DistributedDataParallel(make_transformer(num_blocks=1))
    norms: list[list[float]] = []
    for model in (ddp, wrapped):
        with model.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        found: list[Any] = [CLIP(model.parameters(), BOUND)]
        model.zero_grad()
        loss_of(model, batch(rank, 0)).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [nn.utils.get_total_norm(grads), nn.utils.get_total_norm(model.parameters())]
        found += [CLIP(model.parameters(), bound) for bound in (BOUND, 1e9)]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in found]
        norms.append([float(norm) for norm in whole])
    with FSDP.summon_full_params(wrapped, with_grads=True):
        norms[0].append(norms[0][-1])
        norms[1].append(float(CLIP(wrapped.parameters(), 1e9)))
    return list(zip(*norms, strict=True))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_torchs_norms(ranks: RankPool, strategy: str) -> None:
    for norms in ranks.run(_by_torch, 2, strategy):
        for expected, got in norms:
            assert got == pytest.approx(expected, rel=1e-6)


def _low_precision(rank: int, world_size: int) -> tuple[list[torch.dtype], list[str]]:
    """Dtypes of norms, and what is warned of where there is no gradient."""
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True
    )
    dtypes = []
    for kwargs in ({"mixed_precision": precision}, {}):
        model = FSDP(nn.Linear(2, 1, bias=False), **kwargs)  # type: ignore[arg-type]
        model(torch.ones(1, 2)).sum().backward()
        dtypes.append(model.clip_grad_norm_(1.0).dtype)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.clip_grad_norm_(1.0)
    return dtypes, [str(w.message) for w in caught]


def test_dtype_and_warning_are_upstreams(ranks: RankPool) -> None:
    for dtypes, texts in ranks.run(_low_precision, 2):
        assert dtypes == [torch.bfloat16, torch.float32]
        assert ["found no gradient" in text for text in texts] == [True]


# -- edited gradients ------------------------------------------------------------------------------


def _stack(num_layers: int, dim: int, *, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(dim, dim, bias=bias) for _ in range(num_layers)])


def _rows(rank: int, dim: int) -> torch.Tensor:
    return torch.randn(3, dim, generator=torch.Generator().manual_seed(rank))


def _edit(params: dict[str, nn.Parameter]) -> None:
    """Gradients as a user may leave them: absent, replaced, of other strides, of zeros."""
    params["1.weight"].grad = None
    params["2.bias"].grad = params["2.bias"].grad.clone() * 3  # type: ignore[union-attr]
    whole = params["3.weight"].grad
    assert whole is not None
    params["3.weight"].grad = torch.stack([whole, whole]).movedim(0, -1)[..., 0]
    params["4.weight"].grad.zero_()  # type: ignore[union-attr]


def _spoil_the_rest(grads: list[torch.Tensor]) -> int:
    """Write NaN into all memory of gradients that is no gradient's; returns how many elements."""
    spoilt = 0
    for address in {grad.untyped_storage().data_ptr() for grad in grads if grad.numel()}:
        kept = [grad for grad in grads if grad.untyped_storage().data_ptr() == address]
        values = [grad.clone() for grad in kept]
        size = kept[0].untyped_storage().nbytes() // kept[0].itemsize
        memory = kept[0].as_strided((size,), (1,), 0)
        memory.fill_(torch.nan)
        for grad, value in zip(kept, values, strict=True):
            grad.copy_(value)
        spoilt += int(memory.isnan().sum())
    return spoilt


def _edited(rank: int, world_size: int, strategy: str) -> list[str]:
    """What differs from one process: 5 and 7 elements a row, so there are gaps between them."""
    wrong = []
    inputs = [_rows(r, 5) for r in range(world_size)]
    for norm_type in NORM_TYPES:
        plain = _stack(6, 5, bias=True)
        wrapped = FSDP(
            copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy], use_orig_params=True
        )
        plain[0].weight.requires_grad_(False)
        wrapped.module[0].weight.requires_grad_(False)
        sum(plain(x).square().sum() for x in inputs).div(world_size).backward()  # type: ignore[union-attr]
        wrapped(inputs[rank]).square().sum().backward()
        _edit(dict(plain.named_parameters()))
        _edit(dict(wrapped.module.named_parameters()))
        if not _spoil_the_rest(
            [local_of(p.grad) for p in wrapped.parameters() if p.grad is not None]
        ):
            wrong.append(f"{norm_type}: nothing to spoil")
        expected = nn.utils.clip_grad_norm_(plain.parameters(), BOUND, norm_type)
        got = wrapped.clip_grad_norm_(BOUND, norm_type)
        if not torch.allclose(got, expected, rtol=1e-6):
            wrong.append(f"{norm_type}: norm {got} for {expected}")
        wrong += [f"{norm_type}: {name}" for name in _different(plain, wrapped)]
    return wrong


def _different(plain: nn.Module, wrapped: FSDP) -> list[str]:
    """Parameters whose gradients are not this rank's part of one process's."""
    names = []
    for name, param in plain.named_parameters():
        part = dict(wrapped.module.named_parameters())[name]
        if (param.grad is None) != (part.grad is None):
            names.append(name)
        elif param.grad is not None and part.grad is not None:
            grad = part.grad
            own = distribute_tensor(
                param.grad, grad.device_mesh, grad.placements, src_data_rank=None
            )
            if not torch.allclose(grad.to_local(), own.to_local(), rtol=1e-5, atol=1e-7):
                names.append(name)
    return names


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_gradients_that_are_not_side_by_side(ranks: RankPool, strategy: str) -> None:
    """Nothing but gradients is read: not padding, and not what a dropped one has left."""
    assert ranks.run(_edited, 2, strategy) == [[], []]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_of_large_tensors(order: float) -> None:
    """Kernels of CPUs add up all elements in one float."""
    tensor = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    power = power_sum([tensor], (), order, torch.float32, torch.device("cpu"))
    got = power if math.isinf(order) else power ** (1 / order)
    expected = torch.linalg.vector_norm(tensor.double().view(1024, -1), order, dim=1)
    expected = torch.linalg.vector_norm(expected, order)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=0)
