"""Whole parameters after ``unshard()``, as scripts for FSDP2 read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import Block, batch, loss_of, make_transformer
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, FSDPError, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _sharded() -> Any:
    return fully_shard(make_transformer(num_blocks=2), policy=ModuleWrapPolicy({Block}))


def _is_plain(param: torch.Tensor) -> bool:
    return isinstance(param, nn.Parameter) and not isinstance(param, DTensor)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_whole_until_used(rank: int, mode: str) -> None:
    plain, model = make_transformer(num_blocks=2), _sharded()
    runs = in_mode(model, mode)
    block, expected = model.blocks[0], dict(plain.blocks[0].named_parameters())
    sharded = dict(block.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def assert_whole() -> None:
        found = dict(block.named_parameters())
        assert found.keys() == expected.keys()
        for name, param in found.items():
            assert _is_plain(param)
            assert torch.equal(param, expected[name])

    def assert_sharded() -> None:
        found = dict(block.named_parameters())
        assert all(found[name] is param for name, param in sharded.items())

    block.unshard()
    assert_whole()
    assert isinstance(model.blocks[1].up.weight, DTensor)
    with torch.no_grad():
        ones = torch.ones(1, block.up.in_features)
        assert torch.equal(block.up(ones), plain.blocks[0].up(ones))
    block.reshard()
    assert_sharded()
    handle = block.unshard(async_op=True)
    assert_sharded()
    handle.wait()
    assert_whole()
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    assert_sharded()

    def summon() -> None:
        with FSDP.summon_full_params(model):
            pass

    for use in (lambda: model.load_state_dict(state), summon, model.float):
        block.unshard()
        assert_whole()
        use()
        assert_sharded()
    block.unshard()
    loss = loss_of(runs, batch(rank, 0))
    torch.testing.assert_close(loss, loss_of(plain, batch(rank, 0)))
    loss.backward()
    assert_sharded()
    block.unshard()
    optimizer.step()
    assert not torch.equal(loss_of(runs, batch(rank, 0)), loss)  # the step is seen
    assert_sharded()


@on_ranks(2)
def test_what_would_be_lost_is_refused(rank: int) -> None:
    """Values that are written to whole parameters, and their gradients."""
    model = _sharded()
    block: Any = model.blocks[0]

    def write() -> None:
        nn.init.zeros_(block.up.weight)

    def make_gradients() -> None:
        block.up(torch.ones(1, block.up.in_features)).sum().backward()

    def run() -> None:
        loss_of(model, batch(rank, 0)).backward()

    def write_and(then: Callable[[], object]) -> None:
        write()
        then()

    for lose in (partial(write_and, run), partial(write_and, block.reshard), make_gradients):
        block.unshard()
        with pytest.raises(FSDPError, match=r"'blocks\.0\.up\..*(would be lost|would reduce)"):
            lose()
        run()
