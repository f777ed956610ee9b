"""Units beside other parallelisms: experts on other ranks, sequences over ranks; as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn import utils

from examples import expert_parallel
from fsdp_dynamo import UnsupportedError, fully_shard


def _differences(model: nn.Module, reference: nn.Module) -> list[float]:
    """Of gradients, by parameter, relative to the largest."""
    found = []
    whole: Any
    for (name, param), (other, expected) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == other
        whole = param.grad
        assert isinstance(whole, DTensor)
        assert expected.grad is not None
        difference = (whole.full_tensor() - expected.grad).abs().max()  # type: ignore[attr-defined]
        found.append(float(difference / expected.grad.abs().max()))
    return found


# -- experts -----------------------------------------------------------------------------------


def _experts(rank: int, world_size: int) -> dict[str, float]:
    reference = expert_parallel.make_model()
    for other in range(world_size):
        (expert_parallel.loss_of(reference, 0, other) / world_size).backward()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    model = expert_parallel.shard(expert_parallel.make_model(mesh["expert"]), mesh)
    expert_parallel.loss_of(model, 0, rank).backward()
    exact = float(
        utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])
    )
    return {
        "gradients": max(_differences(model, reference)),
        "ours": abs(model.clip_grad_norm_(1e9).item() / exact - 1),  # type: ignore[operator]
    }


def test_experts_on_other_ranks(ranks: RankPool) -> None:
    for differences in ranks.run(_experts, 4):
        assert max(differences.values()) < 1e-5, differences


def _experts_of_which_no_rank_knows(rank: int, world_size: int) -> list[str]:
    """Units on fewer ranks, whose parameters do not say that others hold different ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    torch.manual_seed(mesh.get_local_rank("expert"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=mesh["data"])
    fully_shard(model)
    model(torch.ones(2, 4) * (rank + 1)).square().sum().backward()
    with pytest.raises(UnsupportedError) as caught:
        model.clip_grad_norm_(1.0)  # type: ignore[operator]
    return [str(caught.value)]


def test_norms_that_differ_are_refused_on_all_ranks(ranks: RankPool) -> None:
    for errors in ranks.run(_experts_of_which_no_rank_knows, 4):
        for text in errors:
            assert "expected one norm on all ranks of the root" in text
            assert "let those be DTensors over these ranks" in text


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


def _sequences(rank: int, world_size: int) -> float:
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
    return max(_differences(model, reference))


def test_sequences_over_ranks(ranks: RankPool) -> None:
    assert max(ranks.run(_sequences, 4)) < 1e-5
