"""With ``keep_rows``, parameters of a wrapped model are rows of the whole ones."""

from __future__ import annotations

import pytest
import torch
from loops import error_of
from models import batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn

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
            fully_shard(block, keep_rows=True)
        model = fully_shard(plain, keep_rows=True)
    else:
        model = wrap(plain, keep_rows=True)
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
    model = FSDP(plain, auto_wrap_policy=policy, rows_together=rows, keep_rows=True)
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
