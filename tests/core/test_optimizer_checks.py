"""Optimizers that are refused for sharded parameters, and state that is older than the shards."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import transformers
from loops import error_of
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, ShardedGradScaler, ShardingStrategy
from fsdp_dynamo.core.state_origin import ORIGIN


def _lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), max_iter=2)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters())


def _transformers_adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return transformers.Adafactor(model.parameters())


def _steps(rank: int, world_size: int, make: Any, strategy: str) -> str:
    model = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    optimizer = make(model)

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0, 0))
        loss.backward()
        return loss

    closure()
    return error_of(lambda: optimizer.step(closure))


@pytest.mark.parametrize("make", [_lbfgs, _adafactor, _transformers_adafactor])
def test_across_elements(ranks: RankPool, make: Any) -> None:
    for message in ranks.run(_steps, 2, make, "FULL_SHARD"):
        assert "optimizer of parameter 'scale'" in message
        assert "which takes norms or dot products" in message
    assert ranks.run(_steps, 2, make, "NO_SHARD") == ["", ""]


class Lamb(torch.optim.SGD):
    """A user's own, of a name that is refused in libraries."""


def _own(model: nn.Module) -> torch.optim.Optimizer:
    return Lamb(model.parameters(), lr=0.1)


def test_a_users_own(ranks: RankPool) -> None:
    assert ranks.run(_steps, 2, _own, "FULL_SHARD") == ["", ""]


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


def _stepped_before(rank: int, world_size: int, kind: str, strategy: str) -> tuple[Any, Any]:
    """Losses of a model that was trained before it was wrapped, under DDP and here."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for wraps in (False, True):
        plain = make_transformer(num_blocks=1)
        optimizer = getattr(torch.optim, kind)(plain.parameters(), lr=0.05, **options)
        _train(plain, optimizer, 0, 0)  # the same batches on every rank
        model = DistributedDataParallel(plain)
        if wraps:
            model = wrap(plain, sharding_strategy=ShardingStrategy[strategy])
        found.append(_train(model, optimizer, rank, 2))
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_stepped_before_wrapping(ranks: RankPool, kind: str, strategy: str) -> None:
    for expected, got in ranks.run(_stepped_before, 2, kind, strategy):
        assert got == pytest.approx(expected, rel=1e-4)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _loads(rank: int, make: Any, source: int, is_old: bool, strategy: str = "FULL_SHARD") -> str:
    """The message of a step with the state dict of a rank, saved and loaded as torch does."""
    torch.manual_seed(0)
    model = FSDP(nn.Linear(8, 8, bias=False), sharding_strategy=ShardingStrategy[strategy])
    optimizer = make(model)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    files = [file.getvalue()] * 2
    torch.distributed.all_gather_object(files, file.getvalue())
    state = torch.load(io.BytesIO(files[rank if source < 0 else source]), weights_only=True)
    if is_old:
        state["param_groups"][0].pop(ORIGIN)
    again = make(model)
    again.load_state_dict(state)
    message = error_of(again.step)
    assert message or ORIGIN not in again.param_groups[0]
    return message or error_of(again.step)


def _plain_state_dicts(rank: int, world_size: int) -> dict[str, str]:
    model = FSDP(nn.Linear(8, 8, bias=False))
    optimizer = _adamw(model)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    by_fqn = [FSDP.optim_state_dict(model, optimizer), get_optimizer_state_dict(model, optimizer)]
    assert ORIGIN in optimizer.state_dict()["param_groups"][0]
    assert all(ORIGIN not in state["param_groups"][0] for state in by_fqn)
    return {
        "its own": _loads(rank, _adamw, -1, False),
        "rank 0's": _loads(rank, _adamw, 0, False),
        "of an older version": _loads(rank, _adamw, 0, True),
        "without state of elements": _loads(rank, _sgd, 0, False),
        "whole": _loads(rank, _adamw, 0, False, "NO_SHARD"),
    }


def test_a_plain_state_dict_of_another_rank(ranks: RankPool) -> None:
    """Its parts are as large as those here, so torch does not mind."""
    first, second = ranks.run(_plain_state_dicts, 2)
    message = second.pop("rank 0's")
    assert "expected state of this rank's parts, rank 1 of 2 (" in message
    assert "got a state dict of rank 0 of 2 (" in message
    assert "FSDP.optim_state_dict" in message
    assert {*first.values(), *second.values()} == {""}


def _loaded_of_other_sizes(rank: int, world_size: int) -> str:
    model = wrap(make_transformer(num_blocks=1))
    optimizer = torch.optim.AdamW(model.parameters())
    _train(model, optimizer, rank, 0)
    saved = [copy.deepcopy(optimizer.state_dict())]
    torch.distributed.broadcast_object_list(saved, src=0)
    saved[0]["param_groups"][0].pop(ORIGIN)
    optimizer.load_state_dict(saved[0])
    loss_of(model, batch(rank, 0)).backward()
    return error_of(optimizer.step)


def test_an_older_state_dict_of_another_rank(ranks: RankPool) -> None:
    first, second = ranks.run(_loaded_of_other_sizes, 2)
    assert first == ""
    assert "another rank's, perhaps" in second
    assert "FSDP.optim_state_dict" in second


class _OwnUnscale(torch.amp.GradScaler):
    """Of a user, with an exchange of its own."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            torch.distributed.all_reduce(found)


def _scaled(mode: str, scaler: torch.amp.GradScaler, **options: Any) -> tuple[str, float, bool]:
    """Message, scale and whether the step was made, where rank 1 alone has an infinity."""
    strategy = options.pop("strategy", "FULL_SHARD")
    plain = make_transformer(num_blocks=1)
    model = in_mode(wrap(plain, sharding_strategy=ShardingStrategy[strategy]), mode)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    is_last = torch.distributed.get_rank() == 1
    scaler.scale(loss_of(model, batch(0, 0))).backward()
    own = [p for p in model.parameters() if p.grad is not None and p.numel()]
    if is_last and strategy == "FULL_SHARD" and scaler.is_enabled():
        own[0].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
    before = own[0].detach().clone()
    message = error_of(lambda: scaler.step(optimizer)) or error_of(scaler.update)
    return message, scaler.get_scale(), not torch.equal(before, own[0])


def _scalers(rank: int, world_size: int) -> dict[str, Any]:
    plain, sharded, fused = torch.amp.GradScaler, ShardedGradScaler, {"fused": True}
    found = {mode: _scaled(mode, plain("cpu", 4.0)) for mode in MODES}
    found["sharded"] = _scaled("eager", sharded("cpu", 4.0))
    found["own"] = _scaled("eager", _OwnUnscale("cpu", 4.0))
    found["fused"] = _scaled("eager", sharded("cpu", 4.0), **fused)
    found["disabled"] = _scaled("eager", plain("cpu", enabled=False))
    found["whole"] = _scaled("eager", plain("cpu", 4.0), strategy="NO_SHARD")
    return found


def test_gradient_scalers(ranks: RankPool) -> None:
    first, second = ranks.run(_scalers, 2)
    for mode in MODES:  # the rank with the infinity makes no step, so the other one says it
        message, _, stepped = first.pop(mode)
        assert "fsdp_dynamo.ShardedGradScaler" in message
        assert not stepped
        assert second.pop(mode) == ("", 2.0, False)
    for found in (first, second):
        message, _, stepped = found.pop("fused")
        assert "Leave fused=True out" in message
        assert not stepped
        skipped = ("", 2.0, False)
        assert found == {
            "sharded": skipped,
            "own": skipped,
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
