"""clip_grad_norm_ with any p: the norm of one process, over sharded and whole units."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import different, gradients, whole
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, UnsupportedError
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.grad_clip import power_sum

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))
BOUND = 0.1
CLIP = nn.utils.clip_grad_norm_  # bound before any model is wrapped, as "from ... import" does
LAYOUTS = {
    "sharded": ("sharded", "sharded"),
    "whole": ("whole", "whole"),
    "whole in sharded": ("whole", "sharded"),
    "hybrid in sharded": ("hybrid", "sharded"),
    "sharded in hybrid": ("sharded", "hybrid"),
    "whole in hybrid": ("whole", "hybrid"),
    "copies in sharded": ("copies", "sharded"),
}
"""How the block is sharded, and how the root is: over four ranks, half of them, or as replicas."""


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *((layout, "eager") for layout in LAYOUTS),
        ("hybrid in sharded", "graph"),
    ],
)
@on_ranks(4)
def test_norm_equals_one_process(rank: int, layout: str, mode: str) -> None:
    grid = init_device_mesh("cpu", (2, 2))
    kinds: dict[str, dict[str, Any]] = {
        "sharded": {},
        "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
        "hybrid": {"device_mesh": grid, "sharding_strategy": ShardingStrategy.HYBRID_SHARD},
        "copies": {"process_group": grid.get_group(1)},
    }
    inner, outer = LAYOUTS[layout]
    sharded = make_transformer(num_blocks=1)
    sharded.blocks[0] = FSDP(sharded.blocks[0], **kinds[inner])
    wrapped = FSDP(sharded, **kinds[outer])
    model = in_mode(wrapped, mode)
    num_batches = 2 if inner == "copies" else 4  # copies agree where their data do
    plain = make_transformer(num_blocks=1)
    for number in range(num_batches):
        (loss_of(plain, batch(number, 0)) / num_batches).backward()
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    for norm_type in NORM_TYPES:
        wrapped.zero_grad()
        loss_of(model, batch(rank % num_batches, 0)).backward()
        expected = float(nn.utils.get_total_norm(grads, norm_type))
        assert expected > BOUND
        got = float(wrapped.clip_grad_norm_(BOUND, norm_type))
        assert got == pytest.approx(expected, rel=1e-6)
        assert float(wrapped.clip_grad_norm_(BOUND, norm_type)) == pytest.approx(BOUND, rel=1e-4)


@on_ranks(2)
def test_nan_of_one_rank_is_everyones(rank: int) -> None:
    wrapped = wrap(make_transformer(num_blocks=1))
    for norm_type in NORM_TYPES:
        wrapped.zero_grad()
        loss_of(wrapped, batch(rank, 0)).backward()
        grads = [local_of(p.grad) for p in wrapped.parameters() if p.grad is not None]
        if rank == 1:
            next(grad for grad in grads if grad.numel()).fill_(torch.nan)
        assert math.isnan(wrapped.clip_grad_norm_(BOUND, norm_type))


@on_ranks(2)
def test_a_unit_that_differs_between_ranks_of_the_root(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    plain = make_transformer(num_blocks=1)
    plain.blocks[0] = FSDP(plain.blocks[0], process_group=alone)
    wrapped = FSDP(plain)
    loss_of(wrapped, batch(rank, 0)).backward()
    before = [p.grad.clone() for p in wrapped.parameters()]
    wanted = r"clip_grad_norm_\(\), unit 'blocks\.0'.*expected one norm on all ranks of the root"
    with pytest.raises(UnsupportedError, match=wanted):
        wrapped.clip_grad_norm_(BOUND)
    after = [p.grad for p in wrapped.parameters()]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_torchs_norms(rank: int, strategy: str) -> None:
    """As torch finds them for DDP; that of a sum that waits is this rank's."""
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
        norms.append([float(whole(norm)) for norm in found])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    with FSDP.summon_full_params(wrapped, with_grads=True):
        assert float(CLIP(wrapped.parameters(), 1e9)) == pytest.approx(norms[0][-1], rel=1e-6)


@on_ranks(2)
def test_dtype_and_warning_are_upstreams(rank: int) -> None:
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    for precision, dtype in ((low, torch.bfloat16), (None, torch.float32)):
        model = FSDP(nn.Linear(2, 1, bias=False), mixed_precision=precision)
        model(torch.ones(1, 2)).sum().backward()
        norms = [model.clip_grad_norm_(1.0) for _ in range(2)]
        assert [norm.dtype for norm in norms] == [dtype] * 2
        assert [*map(float, norms)] == pytest.approx([math.sqrt(2), 1.0], rel=1e-2)
    model.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.clip_grad_norm_(1.0)
    assert ["found no gradient" in str(w.message) for w in caught] == [True]


# -- edited gradients ------------------------------------------------------------------------------


def _edit(params: dict[str, nn.Parameter]) -> None:
    """Gradients as a user may leave them: absent, replaced, of other strides, of zeros."""
    params["1.weight"].grad = None
    params["2.bias"].grad = params["2.bias"].grad.clone() * 3  # type: ignore[union-attr]
    grad = params["3.weight"].grad
    assert grad is not None
    params["3.weight"].grad = torch.stack([grad, grad]).movedim(0, -1)[..., 0]
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


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_gradients_that_are_not_side_by_side(rank: int, strategy: str) -> None:
    """Nothing but gradients is read: not padding, and not what a dropped one has left. There is
    some between rows of 5 elements."""
    inputs = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    torch.manual_seed(0)
    initial = nn.Sequential(*[nn.Linear(5, 5) for _ in range(6)])
    for norm_type in NORM_TYPES:
        plain = copy.deepcopy(initial)
        wrapped = FSDP(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy])
        for net in (plain, wrapped.module):
            net[0].weight.requires_grad_(False)
        sum(plain(x).square().sum() / 2 for x in inputs).backward()  # type: ignore[union-attr]
        wrapped(inputs[rank]).square().sum().backward()
        for net in (plain, wrapped.module):
            _edit(dict(net.named_parameters()))
        own = [local_of(p.grad) for p in wrapped.parameters() if p.grad is not None]
        assert _spoil_the_rest(own)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), BOUND, norm_type)
        got = wrapped.clip_grad_norm_(BOUND, norm_type)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
        assert different(gradients(wrapped.module), gradients(plain), rtol=1e-5) == []


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_norms_of_large_tensors(order: float) -> None:
    """Kernels of CPUs add up all elements in one float."""
    tensor = torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))
    power = power_sum([tensor], (), order, torch.float32, torch.device("cpu"))
    got = power if math.isinf(order) else power ** (1 / order)
    expected = torch.linalg.vector_norm(tensor.double().view(1024, -1), order, dim=1)
    expected = torch.linalg.vector_norm(expected, order)
    torch.testing.assert_close(got.double(), expected, rtol=3e-6, atol=0)
