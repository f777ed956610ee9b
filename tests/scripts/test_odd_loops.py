"""Loops that leave the usual path: batches given up, ranks that part, conversions, frozen models.

One kind of failure at a time: test_bad_input.py, test_divergence.py; freezing for training:
test_bad_input.py; zero_grad(set_to_none=False): test_accumulation.py.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import (
    classification_loss,
    different,
    error_of,
    examples,
    fit,
    make_classifier,
    shard,
    whole_gradients,
)
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


def _evaluates_alone(model: nn.Module, rank: int, group: dist.ProcessGroup) -> None:
    """The first rank alone, while the others wait for it."""
    if rank == 0:
        model.eval()
        with torch.no_grad():
            model(examples(0)[0])
    dist.barrier(group)


def _evaluates_before_the_others_train(
    model: nn.Module, rank: int, group: dist.ProcessGroup
) -> None:
    if rank == 0:
        with torch.no_grad():
            model(examples(0)[0])
    classification_loss(model, examples(rank)).backward()


def _one_batch_more(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(model, optimizer, rank, range(2 if rank == 0 else 1))


def _one_batch_more_then_save(model: nn.Module, rank: int, group: dist.ProcessGroup) -> None:
    _one_batch_more(model, rank)
    model.state_dict()


def _one_batch_more_then_the_mean_loss(
    model: nn.Module, rank: int, group: dist.ProcessGroup
) -> None:
    _one_batch_more(model, rank)
    dist.all_reduce(torch.ones(1), group=group)


PARTINGS = {
    "evaluation, barrier": (_evaluates_alone, False),
    "evaluation, training": (_evaluates_before_the_others_train, True),
    "a batch more, saving": (_one_batch_more_then_save, True),
    "a batch more, mean loss": (_one_batch_more_then_the_mean_loss, False),
}
"""And whether all ranks meet in collectives of the model, where they are compared."""

TIMEOUT_S = 3.0


def _part(rank: int, world_size: int, mode: str, name: str) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = in_mode(shard(make_classifier(), process_group=group), mode)
    classification_loss(model, examples(rank)).backward()
    began = time.monotonic()
    message = error_of(lambda: PARTINGS[name][0](model, rank, group))
    return message, time.monotonic() - began


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        *[("eager", name) for name in PARTINGS],
        ("graph", "a batch more, saving"),
        ("graph", "evaluation, barrier"),
        ("hooks", "evaluation, barrier"),
    ],
)
def test_ranks_that_part_get_an_error(ranks: RankPool, mode: str, name: str) -> None:
    """Never a hang: at once where ranks are compared, else after the group's timeout."""
    (first, seconds), (other, seconds_too) = ranks.run(_part, 2, mode, name)
    assert max(seconds, seconds_too) < 10 * TIMEOUT_S
    if PARTINGS[name][1]:
        assert first == other
        assert first.startswith("DivergenceError")
        assert "rank 0" in first
        assert "rank 1" in first
    else:
        assert first.startswith("RankFailedError: rank 1: expected its part of the all-gather")
        assert other  # torch's own


# -- conversions -----------------------------------------------------------------------------------


def _trained_in(model: nn.Module, run: nn.Module, dtype: torch.dtype) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x, y = examples(0, step)
        loss = nn.functional.cross_entropy(run(x.to(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["half", "bfloat16", "double"])
@on_ranks(2)
def test_whole_models_converted_before_and_after(rank: int, mode: str, dtype: str) -> None:
    plain = getattr(make_classifier(), dtype)()
    of_dtype = next(plain.parameters()).dtype
    expected = _trained_in(plain, plain, of_dtype)
    before, after = shard(getattr(make_classifier(), dtype)()), shard(make_classifier())
    run = in_mode(after, mode)
    classification_loss(run, examples(0)).backward()
    after.zero_grad()
    getattr(after, dtype)()
    for model, call in ((before, in_mode(before, mode)), (after, run)):
        assert _trained_in(model, call, of_dtype) == pytest.approx(expected, rel=1e-6)
        assert {value.dtype for value in model.state_dict().values()} == {of_dtype}


# -- frozen for inference --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_a_model_frozen_for_inference(rank: int, mode: str) -> None:
    """After training; and trained again."""
    model = shard(make_classifier())
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(run, optimizer, rank, range(2))
    plain = make_classifier()
    plain.load_state_dict(model.state_dict())
    expected = plain(examples(rank)[0]).detach()

    model.eval().requires_grad_(False)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(run(examples(rank)[0]), expected)
    model.train().requires_grad_(True)
    fit(run, optimizer, rank, range(2, 3))


# -- gradients of gradients ------------------------------------------------------------------------


def _penalty(model: nn.Module, rank: int) -> None:
    """The gradient's norm by the input, differentiated once more."""
    x = examples(rank)[0].requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (grad.norm(dim=1) - 1).square().mean().backward()


def _by_input(model: nn.Module, rank: int) -> torch.Tensor:
    x = examples(rank)[0].requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x).sum(), x)
    return grad


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_gradient_penalty_is_right_or_refused_in_words(rank: int, mode: str) -> None:
    """Gradients by the input are right after it, and training goes on."""
    sharded = shard(make_classifier())
    model = in_mode(sharded, mode)
    message = error_of(lambda: _penalty(model, rank))
    if message:
        assert "create_graph" in message or "double backward" in message, message
    else:
        plain = make_classifier()
        for other in range(dist.get_world_size()):
            _penalty(plain, other)
        named = plain.named_parameters()
        means = {n: p.grad / dist.get_world_size() for n, p in named if p.grad is not None}
        assert different(whole_gradients(sharded), means) == []
    model.zero_grad()
    expected = _by_input(make_classifier(), rank)
    torch.testing.assert_close(_by_input(model, rank), expected, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    losses = [
        fit(one, torch.optim.SGD(one.parameters(), lr=0.1), rank, range(2))
        for one in (DistributedDataParallel(make_classifier()), model)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# -- no gradient at all ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_frozen_model_below_a_head(rank: int, mode: str) -> None:
    """A model that never learns, and a head on top that does."""
    body = shard(make_classifier().requires_grad_(False))
    torch.manual_seed(1)
    head = DistributedDataParallel(nn.Linear(3, 3))
    run = in_mode(body, mode)
    nn.functional.cross_entropy(head(run(examples(rank)[0])), examples(rank)[1]).backward()
    assert all(p.grad is None for p in body.parameters())
    torch.manual_seed(1)
    alone = nn.Linear(3, 3)
    world_size = dist.get_world_size()
    for other in range(world_size):
        x, y = examples(other)
        (nn.functional.cross_entropy(alone(make_classifier()(x)), y) / world_size).backward()
    got = {name: p.grad for name, p in head.module.named_parameters()}
    assert different(got, {name: p.grad for name, p in alone.named_parameters()}) == []
