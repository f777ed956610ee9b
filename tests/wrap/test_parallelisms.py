"""Units beside other parallelisms: experts on other ranks, sequences over ranks; as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import gradients
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn import utils

from examples import expert_parallel
from fsdp_dynamo import UnsupportedError, fully_shard


def _assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    """Relative to the largest element of each parameter's."""
    got, expected = gradients(model), gradients(reference)
    assert got.keys() == expected.keys()
    for name, grad in got.items():
        difference = (grad - expected[name]).abs().max()
        assert difference < 1e-5 * expected[name].abs().max(), name


# -- experts -----------------------------------------------------------------------------------


@on_ranks(4)
def test_experts_on_other_ranks(rank: int) -> None:
    reference = expert_parallel.make_model()
    for other in range(4):
        (expert_parallel.loss_of(reference, 0, other) / 4).backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model: Any = expert_parallel.shard(expert_parallel.make_model(mesh["expert"]), mesh)
    expert_parallel.loss_of(model, 0, rank).backward()
    _assert_equal_gradients(model, reference)
    norm = utils.get_total_norm(gradients(reference).values())
    torch.testing.assert_close(model.clip_grad_norm_(1e9), norm, rtol=1e-5, atol=0)


@on_ranks(4)
def test_norms_that_differ_are_refused_on_all_ranks(rank: int) -> None:
    """Units on fewer ranks, whose parameters do not say that others hold different ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(mesh.get_local_rank("expert"))
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=mesh["data"])
    fully_shard(model)
    model(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    with pytest.raises(UnsupportedError, match="expected one norm on all ranks of the root"):
        model.clip_grad_norm_(1.0)


# -- sequences over ranks ------------------------------------------------------------------------


class _Gathered(torch.autograd.Function):
    """Every rank's part of a sequence, one behind the other; gradients are summed and cut."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class _Attention(nn.Module):
    """Causal attention; with a group, of a part of the queries to all keys and values."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group, self.qkv, self.out = group, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        first = 0
        if self.group is not None:
            k, v = (_Gathered.apply(each, self.group) for each in (k, v))  # type: ignore[no-untyped-call]
            first = self.group.rank() * q.shape[1]
        positions = torch.arange(first, first + q.shape[1])[:, None]
        mask = positions >= torch.arange(k.shape[1])
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attended)


def _attentions(group: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(_Attention(group), _Attention(group), nn.Linear(8, 3))


@on_ranks(4)
def test_sequences_over_ranks(rank: int) -> None:
    """Two batches of sequences, each over two ranks; a unit is sharded over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    batches = torch.randn(2, 3, 10, 8, generator=torch.Generator().manual_seed(1))
    reference = _attentions()
    for one in batches:
        (reference(one).square().mean() / 2).backward()
    model = _attentions(mesh.get_group("context"))
    both = mesh._flatten("data_context")
    for layer in model[:2]:
        fully_shard(layer, mesh=both)
    fully_shard(model, mesh=both)
    own = batches[mesh.get_local_rank("data")].chunk(2, 1)[mesh.get_local_rank("context")]
    model(own).square().mean().backward()
    _assert_equal_gradients(model, reference)
