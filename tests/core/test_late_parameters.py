"""Large parameters behind nested units have a flat parameter of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Block
from pool import RankPool
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import FSDP, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

BACKENDS = [None, "fsdp_dynamo_aot_eager"]
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


def _run(rank: int, world_size: int, backend: str | None, tied: bool, nested: bool) -> Any:
    torch.manual_seed(3)
    plain = Wide(tied)
    torch.manual_seed(3)
    sharded = Wide(tied)
    if nested:  # wrapped by hand, the inner one first
        sharded.block = FSDP(sharded.block)
    wrapped = FSDP(sharded, auto_wrap_policy=None if nested else ModuleWrapPolicy({Block}))
    torch._dynamo.reset()
    model = wrapped
    if backend is not None:
        model = torch.compile(wrapped, fullgraph=True, backend=backend, options=OPTIONS)
    losses = (_step(nn.parallel.DistributedDataParallel(plain), rank), _step(model, rank))
    plain.zero_grad()
    with record_events() as log:
        _step(model, rank)
    keys = list(wrapped.state_dict())
    root = next(unit for unit in wrapped._fsdp_root.units if unit.fqn == "")
    names = [[o.fqn for o in flat.originals] for flat in root.flats]
    return (
        losses,
        names,
        log.keys("all_gather", "reduce_scatter", "backward"),
        keys,
        list(plain.state_dict()),
    )


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_split(ranks: RankPool, backend: str | None, nested: bool) -> None:
    for losses, names, keys, got, expected in ranks.run(_run, 2, backend, False, nested):
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        assert names == [["embed.weight"], ["norm.weight", "norm.bias", "head.weight"]]
        assert got == expected
        assert keys.count(("all_gather", "", "forward")) == 2
        reductions = [i for i, key in enumerate(keys) if key == ("reduce_scatter", "", "backward")]
        assert len(reductions) == 2
        if backend is not None:  # the head's gradient is on its way before the block's backward
            assert reductions[0] < keys.index(("backward", "block", "backward")) < reductions[1]
            gathers = [u for kind, u, phase in keys if (kind, phase) == ("all_gather", "forward")]
            assert gathers == ["", "block", ""]  # the norm's views do not pull the head forward


def test_tied_weights_stay_in_one(ranks: RankPool) -> None:
    for losses, names, *_ in ranks.run(_run, 2, None, True, False):
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        assert len(names) == 1
