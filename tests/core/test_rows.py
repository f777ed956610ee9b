"""Parameters of a wrapped model are rows of the whole ones, for use by their units only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import error_of
from models import batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.nn import functional as F

from fsdp_dynamo import FSDP, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Rows = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def _rows(rank: int, world_size: int, mode: str, composable: bool) -> tuple[Rows, Rows]:
    """Values and gradients by name: of this rank, and whole ones of one process."""
    plain = make_transformer(num_blocks=2)
    for index in range(world_size):
        (loss_of(plain, batch(index, 0)) / world_size).backward()
    whole = {name: (p.detach().clone(), p.grad) for name, p in plain.named_parameters()}
    plain.zero_grad()
    if composable:
        for block in plain.blocks:
            fully_shard(block)
        model = fully_shard(plain)
    else:
        model = wrap(plain)
    loss_of(in_mode(model, mode), batch(rank, 0)).backward()
    return {name: (p.detach(), p.grad) for name, p in plain.named_parameters()}, whole


@pytest.mark.parametrize("composable", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_parts_are_rows(ranks: RankPool, world_size: int, mode: str, composable: bool) -> None:
    results = ranks.run(_rows, world_size, mode, composable)
    _, whole = results[0]
    for name, (value, grad) in whole.items():
        parts = [part[name] for part, _ in results]
        assert all(part.shape[1:] == value.shape[1:] for part, _ in parts)
        assert torch.equal(torch.cat([part for part, _ in parts]), value)
        grads = [part_grad for _, part_grad in parts if part_grad is not None]
        assert grad is not None
        torch.testing.assert_close(torch.cat(grads), grad, rtol=1e-4, atol=1e-6)


def _blocks_of_rows(
    rank: int, world_size: int, whole: bool
) -> tuple[dict[str, tuple[int, ...]], list[float], list[float], str]:
    """Shapes of parts, losses of two steps with them and without, and the error of a bad number."""

    def rows(name: str, param: nn.Parameter) -> int:
        return (len(param) if whole else 8) if param.ndim > 1 else 1

    plain = make_transformer(num_blocks=2)
    policy = ModuleWrapPolicy({type(plain.blocks[0])})
    model = FSDP(plain, auto_wrap_policy=policy, rows_together=rows)
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    expected, got = (
        train(each, rank, steps=2)[0] for each in (wrap(make_transformer(num_blocks=2)), model)
    )
    error = error_of(lambda: FSDP(nn.Linear(2, 2), rows_together=lambda name, param: 0))
    return shapes, expected, got, error


@pytest.mark.parametrize("whole", [False, True])
def test_rows_that_stay_together(ranks: RankPool, whole: bool) -> None:
    shapes = {name: len(param) for name, param in make_transformer(num_blocks=2).named_parameters()}
    results = ranks.run(_blocks_of_rows, 3, whole)
    for name, rows in shapes.items():
        held = [parts[name] for parts, *_ in results]
        if len(held[0]) > 1 and whole:
            assert sorted(part[0] for part in held) == [0, 0, rows]
        elif len(held[0]) > 1:
            firsts = [sum(part[0] for part in held[: rank + 1]) for rank in range(3)]
            assert all(first % 8 == 0 or first == rows for first in firsts)
    for _, expected, got, error in results:
        assert got == pytest.approx(expected, rel=1e-6)
        assert "rows_together of parameter 'weight': expected a positive number" in error


class _Tied(nn.Module):
    """Uses the weight of a unit below by hand, as a head that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4)
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layer(self.embedding(tokens)), self.embedding.weight)


def _used_outside(rank: int, world_size: int, mode: str) -> dict[str, str]:
    torch.manual_seed(0)
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    head = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model: Any = FSDP(nn.Sequential(head, nn.Tanh()), auto_wrap_policy=ModuleWrapPolicy(set()))
    tied = FSDP(_Tied(), auto_wrap_policy=ModuleWrapPolicy({nn.Embedding}))
    run = in_mode(tied, mode)
    return {
        "by itself": error_of(lambda: model.module[0][0](torch.ones(2, 4)).sum().backward()),
        "by hand": error_of(lambda: run(tokens).sum().backward()),
    }


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_rows_are_refused(ranks: RankPool, mode: str) -> None:
    """No shape is wrong there: the layer computes fewer features, on some ranks none."""
    for errors in ranks.run(_used_outside, 2, mode):
        for name, error in errors.items():
            assert "expected its parameters to be used in the forward of their unit" in error, name
        assert "'embedding.weight'" in errors["by hand"]
