"""Two models trained in turn, and one model that runs several times for one loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, different, examples, make_classifier, shard, whole_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

STEPS = 3

# -- a generator and a discriminator ---------------------------------------------------------------


def _generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.ReLU()), nn.Linear(16, 8))


def _discriminator() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2)), nn.Linear(16, 1))


def _verdict(logits: torch.Tensor, is_real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def _train_adversaries(
    generator: nn.Module, discriminator: nn.Module, rank: int, toggles: bool
) -> list[float]:
    """``toggles``: the discriminator is frozen while the generator learns."""
    of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    of_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        real, noise = (torch.randn(6, size, generator=random) for size in (8, 4))
        fake = generator(noise)
        if toggles:
            discriminator.requires_grad_(True)
        of_discriminator.zero_grad()
        loss = _verdict(discriminator(real), True) + _verdict(discriminator(fake.detach()), False)
        loss.backward()
        of_discriminator.step()

        if toggles:
            discriminator.requires_grad_(False)
        of_generator.zero_grad()
        fooled = _verdict(discriminator(fake), True)
        fooled.backward()
        of_generator.step()
        losses += [loss.item(), fooled.item()]
    return losses


@pytest.mark.parametrize(
    ("mode", "toggles"),
    [*[(mode, False) for mode in MODES], ("eager", True), ("graph", True)],
)
@on_ranks(2)
def test_adversaries_train_as_with_ddp(rank: int, mode: str, toggles: bool) -> None:
    pairs = _generator(), _discriminator()
    expected = _train_adversaries(*map(DistributedDataParallel, pairs), rank, toggles)
    sharded = [in_mode(shard(make()), mode) for make in (_generator, _discriminator)]
    got = _train_adversaries(*sharded, rank, toggles)
    assert got == pytest.approx(expected, rel=1e-5)


# -- several forwards ------------------------------------------------------------------------------

Model = Callable[[torch.Tensor], torch.Tensor]


def _three_views(model: Model, x: torch.Tensor) -> torch.Tensor:
    anchor, positive, negative = (model(x + shift) for shift in (0.0, 0.1, 1.0))
    return F.triplet_margin_loss(anchor, positive, negative)


def _a_target_in_between(model: Model, x: torch.Tensor) -> torch.Tensor:
    first = model(x)
    with torch.no_grad():
        target = model(x + 0.1)
    return (first - target).square().sum() + (model(x - 0.1) - target).square().sum()


def _a_target_first(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = model(x + 0.1)
    return (model(x) - target).square().sum()


def _of_its_own_output(model: Model, x: torch.Tensor) -> torch.Tensor:
    first = model(x)
    return (first * model(first.repeat(1, 2))).sum()


def _an_output_not_used(model: Model, x: torch.Tensor) -> torch.Tensor:
    model(x + 1.0)
    return model(x).square().sum()


LOSSES = (_three_views, _a_target_in_between, _a_target_first, _of_its_own_output)
LOSSES += (_an_output_not_used,)


def _mean_of_ranks(
    loss: Callable[[Model, torch.Tensor], torch.Tensor], world_size: int
) -> dict[str, torch.Tensor]:
    """Gradients of one process on the batches of all ranks."""
    plain = make_classifier()
    for rank in range(world_size):
        (loss(plain, examples(rank)[0]) / world_size).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_one_loss_over_several_forwards(rank: int, mode: str) -> None:
    wrapped = shard(make_classifier())
    model = in_mode(wrapped, mode)
    for loss in LOSSES:
        expected = _mean_of_ranks(loss, dist.get_world_size())
        for time in range(2):
            wrapped.zero_grad()
            loss(model, examples(rank)[0]).backward()
            assert different(whole_gradients(wrapped), expected) == [], (loss.__name__, time)


# -- several losses over one forward ---------------------------------------------------------------


def _of_each_task(model: nn.Module, run: nn.Module, rank: int, size: int) -> list[Any]:
    """Whole gradients of two losses; ``size``: ranks whose batches a plain model takes."""
    found = []
    outputs = [run(examples(one)[0]) for one in range(rank, rank + size)]
    classes = [examples(one)[1] for one in range(rank, rank + size)]
    pairs = list(zip(outputs, classes, strict=True))
    for loss in (
        sum(F.cross_entropy(output, y) for output, y in pairs) / size,
        sum(output.square().mean() for output in outputs) / size,
    ):
        model.zero_grad()
        loss.backward(retain_graph=True)
        if size == 1:
            found.append(whole_gradients(model))
        else:
            found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_whole_gradients_of_each_task(rank: int, mode: str) -> None:
    plain, sharded = make_classifier(), shard(make_classifier())
    expected = _of_each_task(plain, plain, 0, dist.get_world_size())
    got = _of_each_task(sharded, in_mode(sharded, mode), rank, 1)
    for one, other in zip(got, expected, strict=True):
        assert different(one, other) == []


# -- a second model that follows the first ---------------------------------------------------------


def _follow(
    student: nn.Module, teacher: nn.Module, rank: int, run: nn.Module, run_teacher: nn.Module
) -> list[float]:
    """The student learns the teacher's outputs; the teacher's weights follow the student's."""
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = examples(rank, step)[0]
        with torch.no_grad():
            target = run_teacher(x + 0.1)
        loss = classification_loss(run, examples(rank, step)) + (run(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("mode", "freeze"),
    [
        ("eager", "before wrapping"),
        ("eager", "never"),
        ("hooks", "never"),
        ("graph", "before wrapping"),
        ("hooks", "before wrapping"),
        ("graph", "never"),
        ("eager", "a copy"),
    ],
)
@on_ranks(2)
def test_a_teacher_that_follows(rank: int, mode: str, freeze: str) -> None:
    plain, frozen = make_classifier(), make_classifier().requires_grad_(False)
    expected = _follow(plain, frozen, rank, DistributedDataParallel(plain), frozen)
    student = shard(make_classifier())
    if freeze == "before wrapping":
        teacher = shard(make_classifier().requires_grad_(False))
    else:
        teacher = copy.deepcopy(student)
        if freeze == "a copy":
            teacher.requires_grad_(False)
    got = _follow(student, teacher, rank, in_mode(student, mode), in_mode(teacher, mode))
    assert got == pytest.approx(expected, rel=1e-5)
