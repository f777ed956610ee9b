"""Optimizers that do not fit sharded parameters, and states that are older than the shards."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn

from fsdp_dynamo import FSDP, ShardedGradScaler, ShardingStrategy

STRATEGIES = ["FULL_SHARD", "NO_SHARD"]


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, first: int
) -> list[float]:
    losses = []
    for step in range(first, first + 2):
        optimizer.zero_grad()
        loss = loss_of(model, batch(rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_made_before_wrapping(rank: int, strategy: str) -> None:
    plain = make_transformer(num_blocks=1)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model = wrap(plain, sharding_strategy=ShardingStrategy[strategy])
    loss_of(model, batch(rank, 0)).backward()
    message = error_of(optimizer.step)
    assert "expected parameters of the sharded model" in message
    assert "Make the optimizer of the sharded model's parameters()" in message


@on_ranks(2)
def test_a_file_of_another_rank(rank: int) -> None:
    """Its rows are as many, so only the mesh tells."""
    files = []
    model, fresh = (wrap(make_transformer(num_blocks=1)) for _ in range(2))
    for one in (model, fresh):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.05)
        _train(one, optimizer, rank, 0)
        files.append(io.BytesIO())
        torch.save(optimizer.state_dict(), files[-1])
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, files[0].getvalue())
    for number in (rank, 1 - rank):
        state = torch.load(io.BytesIO(everyone[number]), weights_only=False)
        optimizer.load_state_dict(state)
        message = error_of(optimizer.step)
        assert (message == "") is (number == rank)
    assert f"got one saved by the rank at ({1 - rank},)" in message
    assert "parameter 'scale'" in message or "parameter 'embed.weight'" in message


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(2)
def test_made_of_whole_parameters(rank: int, strategy: str) -> None:
    """In a context that shows them; afterwards they are no model's."""
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    with FSDP.summon_full_params(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of(model, batch(rank, 0)).backward()
    assert "expected parameters of the sharded model" in error_of(optimizer.step)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
@on_ranks(2)
def test_state_from_before_wrapping(rank: int, kind: str, strategy: str) -> None:
    """A plain optimizer's state dict loads, and its states are cut to this rank's parts."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for wraps in (False, True):
        model: Any = make_transformer(num_blocks=1)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
        _train(model, optimizer, 0, 0)
        if wraps:
            state = optimizer.state_dict()
            model = wrap(model, sharding_strategy=ShardingStrategy[strategy])
            optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
            optimizer.load_state_dict(state)
        found.append(_train(model, optimizer, 0, 2))  # the same batches on every rank
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def _scaled(mode: str, scaler: torch.amp.GradScaler, **options: Any) -> tuple[str, float, bool]:
    """Message, scale and whether the step was made, where rank 1 alone has an infinity."""
    strategy = options.pop("strategy", "FULL_SHARD")
    plain = make_transformer(num_blocks=1)
    model = in_mode(wrap(plain, sharding_strategy=ShardingStrategy[strategy]), mode)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    is_last = torch.distributed.get_rank() == 1
    scaler.scale(loss_of(model, batch(0, 0))).backward()
    own: list[Any] = [p for p in model.parameters() if p.grad is not None and p.to_local().numel()]
    if is_last and strategy == "FULL_SHARD" and scaler.is_enabled():
        own[-1].grad.to_local().view(-1)[0] = torch.inf
    before = own[-1].to_local().clone()
    message = error_of(lambda: scaler.step(optimizer)) or error_of(scaler.update)
    return message, scaler.get_scale(), not torch.equal(before, own[-1].to_local())


def _scalers(rank: int, world_size: int) -> dict[str, Any]:
    plain, sharded, fused = torch.amp.GradScaler, ShardedGradScaler, {"fused": True}
    found = {mode: _scaled(mode, plain("cpu", 4.0)) for mode in MODES}
    found["sharded"] = _scaled("eager", sharded("cpu", 4.0))
    found["fused"] = _scaled("eager", sharded("cpu", 4.0), **fused)
    found["disabled"] = _scaled("eager", plain("cpu", enabled=False))
    found["whole"] = _scaled("eager", plain("cpu", 4.0), strategy="NO_SHARD")
    return found


def test_gradient_scalers(ranks: RankPool) -> None:
    """Where one rank has an infinity, no rank makes a step."""
    skipped = ("", 2.0, False)
    for found in ranks.run(_scalers, 2):
        assert found == {
            **dict.fromkeys(MODES, skipped),
            "sharded": skipped,
            "fused": skipped,
            "disabled": ("", 1.0, True),
            "whole": ("", 4.0, True),
        }


def _loaded_back(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    found = []
    for loads in (False, True):
        model = wrap(make_transformer(num_blocks=1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        _train(model, optimizer, rank, 0)
        if loads:
            state = FSDP.optim_state_dict(model, optimizer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
        found.append(_train(model, optimizer, rank, 2))
    return found[0], found[1]


def test_what_is_advised_works(ranks: RankPool) -> None:
    for expected, got in ranks.run(_loaded_back, 2):
        assert got == pytest.approx(expected, rel=1e-6)
