"""Sharded models below torch.func's transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, examples, gradients, make_classifier, shard, whole_gradients
from models import average_gradients
from modes import in_mode
from pool import on_ranks
from torch import func, nn

from fsdp_dynamo import ShardingStrategy, UnsupportedError, fully_shard


def _fully_sharded(model: Any) -> Any:
    for block in model[:2]:
        fully_shard(block)
    return fully_shard(model)


DOORS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapper": shard,
    "NO_SHARD": lambda model: shard(model, sharding_strategy=ShardingStrategy.NO_SHARD),
    "fully_shard": _fully_sharded,
}


def _primal_and_tangent(model: nn.Module, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    output, tangent = func.jvp(model, (x,), (v,))
    return (output - tangent).pow(2).sum()


LOSSES: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "jvp": _primal_and_tangent,
    "primal alone": lambda model, x, v: func.jvp(model, (x,), (v,))[0].pow(2).sum(),
    "tangent alone": lambda model, x, v: func.jvp(model, (x,), (v,))[1].pow(2).sum(),
    "jacfwd": lambda model, x, v: func.jacfwd(model)(x[0]).pow(2).sum(),
    "vmap": lambda model, x, v: func.vmap(model)(x).pow(2).sum(),
    "vmap in jvp": lambda model, x, v: _primal_and_tangent(func.vmap(model), x, v),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(
    ("door", "mode"),
    [("wrapper", "eager"), ("NO_SHARD", "eager"), ("fully_shard", "eager"), ("wrapper", "hooks")],
)
@on_ranks(2)
def test_gradients_are_one_process_s(rank: int, door: str, mode: str) -> None:
    plain, sharded = make_classifier(), DOORS[door](make_classifier())
    model = in_mode(sharded, mode)
    x, v = examples(rank)[0], examples(rank, 1)[0]
    for name, loss_of in LOSSES.items():
        plain.zero_grad()
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(loss_of(model, x, v), loss_of(plain, x, v))
        loss_of(plain, x, v).backward()
        loss_of(model, x, v).backward()
        average_gradients(plain)
        assert different(whole_gradients(sharded), gradients(plain)) == [], name


@on_ranks(2)
def test_reverse_mode_is_refused(rank: int) -> None:
    """Before anything is gathered: the model goes on as if nothing had been."""
    plain, model = make_classifier(), DOORS["wrapper"](make_classifier())
    x, v = examples(rank)[0], examples(rank, 1)[0]
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        func.grad(lambda x: model(x).sum())(x)
    torch.testing.assert_close(_primal_and_tangent(model, x, v), _primal_and_tangent(plain, x, v))
