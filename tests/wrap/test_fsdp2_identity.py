"""Modules of fully_shard where other people's code asks for FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from models import Block, batch, make_transformer
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPError, fully_shard, record_events, register_fsdp_forward_method
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(2, 2)  # nn.RNNBase has an _apply() of its own
        self.out = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.inner(x)[0])
        return out

    def only_out(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.out.weight)


@on_ranks(2)
def test_instances(rank: int) -> None:
    model: Any = fully_shard(_Net())
    assert isinstance(model, upstream.FSDPModule)
    assert isinstance(model, _Net)
    assert not isinstance(model.out, upstream.FSDPModule)
    assert not isinstance(FSDP(nn.Linear(2, 2)), upstream.FSDPModule)
    weight = model.out.weight.full_tensor()
    register_fsdp_forward_method(model, "only_out")
    register_fsdp_forward_method(nn.ReLU(), "no such method")
    torch.testing.assert_close(model.only_out(torch.eye(2)), weight.T)
    model.double()
    assert model(torch.ones(1, 2).double()).dtype == torch.float64

    other: Any = fully_shard(_Net())
    upstream.register_fsdp_forward_method(other, "only_out")
    with pytest.raises(FSDPError, match=r"Use fsdp_dynamo\.register_fsdp_forward_method"):
        other.only_out(torch.eye(2))
    with pytest.raises(FSDPError, match="private state"):
        upstream.share_comm_ctx([model, other])
    with pytest.raises(FSDPError, match="private state"):
        other._get_fsdp_state()  # as a method of a later torch may do


@pytest.mark.slow
@on_ranks(2)
def test_libraries(rank: int) -> None:
    """Accelerate leaves a model alone, compiled or not; lightning accumulates."""
    prepare = pytest.importorskip("accelerate.utils.fsdp_utils").fsdp2_prepare_model
    parallel = pytest.importorskip("lightning.fabric.strategies.model_parallel")
    transformers = pytest.importorskip("transformers.distributed.fsdp")
    model: Any = fully_shard(make_transformer(num_blocks=2), policy=ModuleWrapPolicy({Block}))
    for enabled, num_reductions in ((True, 0), (False, 3)):
        with record_events() as log, parallel._FSDPNoSync(model, enabled):
            model(batch(rank, 0)).sum().backward()
        assert len(log.keys("reduce_scatter")) == num_reductions
    compiled = torch.compile(model)
    assert prepare(None, model) is model
    assert prepare(None, compiled) is compiled
    assert transformers.is_fsdp_managed_module(model)
