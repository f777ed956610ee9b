"""Modules of fully_shard where other people's code asks for FSDP2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from models import Block, batch, make_transformer
from pool import RankPool
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


def _later(self: Any) -> Any:
    """A method of a later torch."""
    return self._get_fsdp_state()


def _message(call: Callable[[], object]) -> str:
    try:
        call()
    except FSDPError as error:
        return str(error)
    return ""


def _asked(rank: int, world_size: int) -> dict[str, bool]:
    plain = _Net()
    weight = plain.out.weight.detach().clone()
    model: Any = fully_shard(plain)
    register_fsdp_forward_method(model, "only_out")
    register_fsdp_forward_method(nn.ReLU(), "no such method")
    ours = torch.allclose(model.only_out(torch.eye(2)), weight.T)
    other: Any = fully_shard(_Net())
    upstream.register_fsdp_forward_method(other, "only_out")
    torchs = _message(lambda: other.only_out(torch.eye(2)))
    shared = _message(lambda: upstream.share_comm_ctx([model, other]))
    later = _message(lambda: _later(other))
    model.double()
    return {
        "an instance": isinstance(model, upstream.FSDPModule),
        "not what is in a unit": not isinstance(model.out, upstream.FSDPModule),
        "not the wrapper": not isinstance(FSDP(nn.Linear(2, 2)), upstream.FSDPModule),
        "still its own class": isinstance(model, _Net),
        "a registered method": ours,
        "torch's function": "Use fsdp_dynamo.register_fsdp_forward_method" in torchs,
        "a shared context": "private state" in shared,
        "a later method": "private state" in later,
        "converted": model(torch.ones(1, 2).double()).dtype == torch.float64,
    }


def test_instances(ranks: RankPool) -> None:
    for found in ranks.run(_asked, 2):
        assert [what for what, holds in found.items() if not holds] == []


def _by_others(rank: int, world_size: int) -> dict[str, bool]:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from lightning.fabric.strategies.model_parallel import _FSDPNoSync
    from transformers.distributed.fsdp import is_fsdp_managed_module

    model: Any = fully_shard(make_transformer(num_blocks=2), policy=ModuleWrapPolicy({Block}))
    counts = []
    for enabled in (True, False):
        with record_events() as log, _FSDPNoSync(model, enabled):
            model(batch(rank, 0)).sum().backward()
        counts.append([event.kind for event in log].count("reduce_scatter"))
    compiled = torch.compile(model)
    return {
        "accelerate leaves it alone": fsdp2_prepare_model(None, model) is model,
        "accelerate leaves a compiled one alone": fsdp2_prepare_model(None, compiled) is compiled,
        "transformers knows it": is_fsdp_managed_module(model),
        "lightning accumulates": counts == [0, 3],
    }


@pytest.mark.slow
def test_libraries(ranks: RankPool) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    for found in ranks.run(_by_others, 2):
        assert [what for what, holds in found.items() if not holds] == []
