"""Large parameters behind nested units have a flat parameter of their own."""

from __future__ import annotations

import copy

import pytest
import torch
from models import Block
from pool import on_ranks
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import FSDP, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

OPTIONS = {  # what the order is about: a link on which each transfer counts
    "bucket": False,
    "link": {"latency_ms": 0.1, "bytes_per_ms": 1e5},
    "device": {"flops_per_ms": 5e7, "bytes_per_ms": 1e7},
}


class Wide(nn.Module):
    """An embedding and a head of more than 1 MB each, a block in between."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 64)
        self.block = Block(64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 5000, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(tokens))))


def _step(model: nn.Module, rank: int) -> torch.Tensor:
    tokens = torch.arange(8).view(1, 8) + 100 * rank
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("backend", "nested"), [(None, False), (None, True), ("fsdp_dynamo_aot_eager", False)]
)
@on_ranks(2)
def test_split(rank: int, backend: str | None, nested: bool) -> None:
    torch.manual_seed(3)
    plain = Wide()
    sharded = copy.deepcopy(plain)
    if nested:  # wrapped by hand, the inner one first
        sharded.block = FSDP(sharded.block)
    wrapped = FSDP(sharded, auto_wrap_policy=None if nested else ModuleWrapPolicy({Block}))
    model: nn.Module = wrapped
    if backend is not None:
        model = torch.compile(wrapped, fullgraph=True, backend=backend, options=OPTIONS)
    expected = _step(nn.parallel.DistributedDataParallel(plain), rank)
    torch.testing.assert_close(_step(model, rank), expected, rtol=1e-6, atol=1e-6)
    with record_events() as log:
        _step(model, rank)
    assert _held_by_root(wrapped) == [["embed.weight"], ["norm.weight", "norm.bias", "head.weight"]]
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    keys = log.keys("all_gather", "reduce_scatter", "backward")
    assert keys.count(("all_gather", "", "forward")) == 2
    reductions = [i for i, key in enumerate(keys) if key == ("reduce_scatter", "", "backward")]
    assert len(reductions) == 2
    if backend is not None:  # the head's gradient is on its way before the block's backward
        assert reductions[0] < keys.index(("backward", "block", "backward")) < reductions[1]
        gathers = [u for kind, u, phase in keys if (kind, phase) == ("all_gather", "forward")]
        assert gathers == ["", "block", ""]  # the norm's views do not pull the head forward


def _held_by_root(wrapped: FSDP) -> list[list[str]]:
    root = next(unit for unit in wrapped._fsdp_root.units if unit.fqn == "")
    return [[original.fqn for original in flat.originals] for flat in root.flats]


@on_ranks(2)
def test_tied_weights_stay_in_one(rank: int) -> None:
    wrapped = FSDP(Wide(tied=True), auto_wrap_policy=ModuleWrapPolicy({Block}))
    assert len(_held_by_root(wrapped)) == 1
