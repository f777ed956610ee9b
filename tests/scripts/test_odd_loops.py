"""Loops that leave the usual path: batches given up, ranks that part, conversions, penalties.

One kind of failure at a time: test_bad_input.py; freezing for training:
test_bad_input.py; zero_grad(set_to_none=False): test_accumulation.py.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, error_of, examples, fit, make_classifier, shard
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# -- a batch that is given up ----------------------------------------------------------------------


class _OutOfMemory(torch.autograd.Function):
    """Identity; its backward fails where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, None]:  # type: ignore[override]
        if ctx.fails:
            raise RuntimeError("out of memory")
        return grad, None


class _Fragile(nn.Module):
    """A layer that fails in its forward where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        return self.layer(x)


def _fragile() -> tuple[nn.Module, _Fragile]:
    torch.manual_seed(0)
    fragile = _Fragile()
    first = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
    return nn.Sequential(first, nn.Sequential(fragile), nn.Linear(12, 3)), fragile


def _skipping(run: nn.Module, fragile: _Fragile, rank: int) -> list[float | None]:
    """Forward fails in steps 1 and 2, backward in step 4; ``None`` where a batch was given up."""
    optimizer = torch.optim.SGD(run.parameters(), lr=0.1)
    losses: list[float | None] = []
    for step in range(6):
        fragile.fails = step in (1, 2)
        x, y = examples(rank, step)
        try:
            loss = nn.functional.cross_entropy(_OutOfMemory.apply(run(x), step == 4), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            losses.append(None)
        optimizer.zero_grad(set_to_none=True)
    return losses


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_batches_given_up_after_an_exception(rank: int, mode: str) -> None:
    """The same batches on all ranks: DDP does not recover from a failure, one process does."""
    plain, fragile = _fragile()
    expected = _skipping(plain, fragile, 0)
    plain, fragile = _fragile()
    got = _skipping(in_mode(shard(plain), mode), fragile, 0)
    assert [loss is None for loss in got] == [False, True, True, False, True, False]
    for one, other in zip(got, expected, strict=True):
        assert one == (None if other is None else pytest.approx(other, rel=1e-5))


# -- ranks that part -------------------------------------------------------------------------------


TIMEOUT_S = 3.0


def _evaluates_alone(rank: int, world_size: int) -> tuple[str, float]:
    """The first rank evaluates alone, while the others wait for it in a collective of their own."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = shard(make_classifier(), process_group=group)
    classification_loss(model, examples(rank)).backward()
    began = time.monotonic()

    def part() -> None:
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model(examples(0)[0])
        dist.barrier(group)

    return error_of(part), time.monotonic() - began


def test_ranks_that_part_get_an_error(ranks: RankPool) -> None:
    """Never a hang; at once where ranks meet in the model's collectives: test_divergence.py."""
    (first, seconds), (other, seconds_too) = ranks.run(_evaluates_alone, 2)
    assert max(seconds, seconds_too) < 10 * TIMEOUT_S
    assert first.startswith("RankFailedError: rank 1: expected its part of the all-gather")
    assert other  # torch's own


# -- conversions -----------------------------------------------------------------------------------


def _trained_in(model: nn.Module, dtype: torch.dtype) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x, y = examples(0, step)
        loss = nn.functional.cross_entropy(model(x.to(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_whole_models_converted_before_and_after(rank: int) -> None:
    for dtype in ("half", "bfloat16", "double"):
        plain = getattr(make_classifier(), dtype)()
        of_dtype = next(plain.parameters()).dtype
        expected = _trained_in(plain, of_dtype)
        before, after = shard(getattr(make_classifier(), dtype)()), shard(make_classifier())
        classification_loss(after, examples(0)).backward()
        after.zero_grad()
        getattr(after, dtype)()
        for model in (before, after):
            assert _trained_in(model, of_dtype) == pytest.approx(expected, rel=1e-6), dtype
            assert {value.dtype for value in model.state_dict().values()} == {of_dtype}


# -- gradients of gradients ------------------------------------------------------------------------


@on_ranks(2)
def test_a_gradient_penalty_in_a_graph_is_refused_in_words(rank: int) -> None:
    """Training goes on after it; in eager mode: test_double_backward.py."""
    model = in_mode(shard(make_classifier()), "graph")
    x = examples(rank)[0].requires_grad_(True)

    def penalty() -> None:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (grad.norm(dim=1) - 1).square().mean().backward()

    message = error_of(penalty)
    assert "create_graph" in message or "double backward" in message, message
    model.zero_grad()
    losses = [
        fit(one, torch.optim.SGD(one.parameters(), lr=0.1), rank, range(2))
        for one in (DistributedDataParallel(make_classifier()), model)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
