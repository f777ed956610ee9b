"""Loops that leave the usual path: batches given up, ranks that part, conversions, frozen models.

One kind of failure at a time: test_bad_input.py, test_divergence.py; freezing for training:
test_bad_input.py; zero_grad(set_to_none=False): test_accumulation.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from pool import RankPool
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


def _given_up(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    """The same batches on all ranks: DDP does not recover from a failure, one process does."""
    plain, fragile = _fragile()
    expected = _skipping(plain, fragile, 0)
    plain, fragile = _fragile()
    return expected, _skipping(in_mode(shard(plain), mode), fragile, 0)


@pytest.mark.parametrize("mode", MODES)
def test_batches_given_up_after_an_exception(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_given_up, 2, mode):
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

DTYPES = {"half": torch.half, "bfloat16": torch.bfloat16, "double": torch.double}


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


def _converted(rank: int, world_size: int, mode: str) -> dict[str, tuple[Any, Any, bool]]:
    found = {}
    for name, dtype in DTYPES.items():
        plain = getattr(make_classifier(), name)()
        expected = _trained_in(plain, plain, dtype)
        before = shard(getattr(make_classifier(), name)())
        after = shard(make_classifier())
        run = in_mode(after, mode)
        classification_loss(run, examples(0)).backward()
        after.zero_grad()
        getattr(after, name)()
        for when, model in (("before", before), ("after", after)):
            losses = _trained_in(model, run if model is after else in_mode(model, mode), dtype)
            kept = all(value.dtype == dtype for value in model.state_dict().values())
            found[f"{name} {when} wrapping"] = (expected, losses, kept)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_whole_models_converted_before_and_after(ranks: RankPool, mode: str) -> None:
    for found in ranks.run(_converted, 2, mode):
        for how, (expected, got, kept) in found.items():
            assert got == pytest.approx(expected, rel=1e-6), how
            assert kept, how


# -- frozen for inference --------------------------------------------------------------------------


def _frozen_for_inference(rank: int, world_size: int, mode: str) -> list[str]:
    """After training; and trained again."""
    model = shard(make_classifier())
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fit(run, optimizer, rank, range(2))
    plain = make_classifier()
    plain.load_state_dict(model.state_dict())
    expected = plain(examples(rank)[0]).detach()

    model.eval().requires_grad_(False)
    wrong = []
    for context in (torch.no_grad, torch.inference_mode):

        def infer(context: Callable[[], Any] = context) -> None:
            with context():
                torch.testing.assert_close(run(examples(rank)[0]), expected)

        wrong.append(error_of(infer))
    model.train().requires_grad_(True)
    wrong.append(error_of(lambda: fit(run, optimizer, rank, range(2, 3))))
    return wrong


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_model_frozen_for_inference(ranks: RankPool, mode: str) -> None:
    for wrong in ranks.run(_frozen_for_inference, 2, mode):
        assert wrong == ["", "", ""]


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


def _twice(rank: int, world_size: int, mode: str) -> tuple[list[float], list[float], bool]:
    """Losses of steps after a penalty that may have been refused."""
    model = in_mode(shard(make_classifier()), mode)
    error_of(lambda: _penalty(model, rank))
    model.zero_grad()
    same = torch.allclose(_by_input(model, rank), _by_input(make_classifier(), rank), 1e-4, 1e-6)
    model.zero_grad()
    reference = DistributedDataParallel(make_classifier())
    losses = [
        fit(one, torch.optim.SGD(one.parameters(), lr=0.1), rank, range(2))
        for one in (reference, model)
    ]
    return losses[0], losses[1], same


@pytest.mark.parametrize("mode", MODES)
def test_training_goes_on_after_a_gradient_penalty(ranks: RankPool, mode: str) -> None:
    """And gradients by the input are right."""
    for expected, got, same in ranks.run(_twice, 2, mode):
        assert same
        assert got == pytest.approx(expected, rel=1e-5)


def _right_or_refused(rank: int, world_size: int, mode: str) -> str:
    """Names of wrong gradients, or an error that does not say what is refused."""
    model = shard(make_classifier())
    run = in_mode(model, mode)
    if message := error_of(lambda: _penalty(run, rank)):
        says = "create_graph" in message or "double backward" in message
        return "" if says else message
    plain = make_classifier()
    for other in range(world_size):
        _penalty(plain, other)
    named = plain.named_parameters()
    expected = {name: p.grad / world_size for name, p in named if p.grad is not None}
    return " ".join(different(whole_gradients(model), expected))


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_a_gradient_penalty_is_right_or_refused_in_words(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_right_or_refused, 2, mode) == ["", ""]


# -- no gradient at all ----------------------------------------------------------------------------


def _frozen_before(rank: int, world_size: int, mode: str) -> list[str]:
    """A model that never learns, and a head on top that does."""
    body = shard(make_classifier().requires_grad_(False))
    torch.manual_seed(1)
    head = DistributedDataParallel(nn.Linear(3, 3))
    run = in_mode(body, mode)
    nn.functional.cross_entropy(head(run(examples(rank)[0])), examples(rank)[1]).backward()
    assert all(p.grad is None for p in body.parameters())
    torch.manual_seed(1)
    alone = nn.Linear(3, 3)
    for other in range(world_size):
        x, y = examples(other)
        (nn.functional.cross_entropy(alone(make_classifier()(x)), y) / world_size).backward()
    got = {name: p.grad for name, p in head.module.named_parameters()}
    return different(got, {name: p.grad for name, p in alone.named_parameters()})


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_model_below_a_head(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_frozen_before, 2, mode) == [[], []]
