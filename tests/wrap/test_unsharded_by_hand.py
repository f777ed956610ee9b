"""Whole parameters after ``unshard()``, as scripts for FSDP2 read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import error_of
from models import Block, batch, loss_of, make_transformer
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _sharded() -> Any:
    return fully_shard(make_transformer(num_blocks=2), policy=ModuleWrapPolicy({Block}))


def _is_plain(param: torch.Tensor) -> bool:
    return isinstance(param, nn.Parameter) and not isinstance(param, DTensor)


def _read(rank: int, world_size: int, mode: str) -> dict[str, bool]:
    plain, model = make_transformer(num_blocks=2), _sharded()
    runs = in_mode(model, mode)
    block, expected = model.blocks[0], dict(plain.blocks[0].named_parameters())
    sharded = dict(block.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, bool] = {}

    def whole(name: str) -> None:
        found = dict(block.named_parameters())
        seen[f"whole {name}"] = found.keys() == expected.keys() and all(
            _is_plain(found[n]) and torch.equal(found[n], expected[n]) for n in expected
        )

    def back(name: str) -> None:
        found = dict(block.named_parameters())
        seen[f"back {name}"] = all(found[n] is sharded[n] for n in sharded)

    block.unshard()
    whole("unshard()")
    seen["only its own"] = isinstance(model.blocks[1].up.weight, DTensor)
    with torch.no_grad():
        ones = torch.ones(1, block.up.in_features)
        seen["used"] = torch.equal(block.up(ones), plain.blocks[0].up(ones))
    block.reshard()
    back("reshard()")
    handle = block.unshard(async_op=True)
    back("before wait()")
    handle.wait()
    whole("wait()")
    state = model.state_dict()
    seen["state dict"] = all(isinstance(value, DTensor) for value in state.values())
    back("state_dict()")
    for use in ("forward", "load", "summon", "to"):
        block.unshard()
        whole(use)
        if use == "forward":
            loss = loss_of(runs, batch(rank, 0))
            seen["loss"] = torch.allclose(loss, loss_of(plain, batch(rank, 0)))
            loss.backward()
        elif use == "load":
            model.load_state_dict(state)
        elif use == "summon":
            with FSDP.summon_full_params(model):
                pass
        else:
            model.to(torch.float32)
        back(use)
    block.unshard()
    optimizer.step()
    changed = loss_of(runs, batch(rank, 0))
    seen["a step is seen"] = not torch.equal(changed, loss)
    back("step")
    return seen


@pytest.mark.parametrize("mode", MODES)
def test_whole_until_used(ranks: RankPool, mode: str) -> None:
    for seen in ranks.run(_read, 2, mode):
        assert all(seen.values()), [name for name, right in seen.items() if not right]


def _lost(rank: int, world_size: int) -> list[str]:
    model = _sharded()
    block: Any = model.blocks[0]
    errors = []
    for use in ("write", "gradient"):
        block.unshard()
        if use == "write":
            nn.init.zeros_(block.up.weight)
            errors.append(error_of(lambda: loss_of(model, batch(rank, 0))))
        else:
            errors.append(error_of(block.up(torch.ones(1, block.up.in_features)).sum().backward))
        loss_of(model, batch(rank, 0)).backward()
    block.unshard()
    nn.init.zeros_(block.up.weight)
    errors.append(error_of(block.reshard))
    loss_of(model, batch(rank, 0)).backward()
    return errors


def test_what_would_be_lost_is_refused(ranks: RankPool) -> None:
    for errors in ranks.run(_lost, 2):
        for text in errors:
            assert "parameter 'blocks.0.up." in text
            assert "would be lost" in text or "would reduce" in text
