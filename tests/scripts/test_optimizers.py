"""Optimizers, schedules, averages and gradient scalers, as scripts combine them.

Optimizers in the backward: test_gradient_hooks.py; Muon alone: test_whole_updates.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import classification_loss, clip, examples, fit, make_classifier, shard
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from examples.muon import orthogonalized
from fsdp_dynamo import ShardedGradScaler

STEPS = 4

# -- one optimizer ---------------------------------------------------------------------------------

_BY_DEFAULT = ("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam")
ELEMENT_WISE: dict[str, dict[str, Any]] = {
    **{name: {} for name in _BY_DEFAULT},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "foreach": True},
    "AdamW": {"fused": True},
}


@on_ranks(2)
def test_element_wise_optimizers(rank: int) -> None:
    """All of torch's that look at no norm and no shape; Rprop writes DTensors by index."""
    for name, options in ELEMENT_WISE.items():
        losses = []
        for model in (DistributedDataParallel(make_classifier()), shard(make_classifier())):
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **options)
            losses.append(fit(model, optimizer, rank, range(STEPS)))
        assert losses[1] == pytest.approx(losses[0], rel=1e-5), name


# -- several optimizers ----------------------------------------------------------------------------


def _muon_and_adamw(model: Any, run: nn.Module, rank: int) -> list[float]:
    """Muon for the blocks' matrices, AdamW with three learning rates for the rest."""
    named = dict(model.named_parameters())
    matrices = [n for n in named if n.startswith("blocks") and named[n].dim() == 2]
    rest = [n for n in named if n not in matrices]
    kinds = {"embed": 0.01, "head": 0.02, "": 0.03}
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name in rest:
        kind = next(kind for kind in kinds if name.startswith(kind))
        groups[kind].append(named[name])
    adamw = torch.optim.AdamW([{"params": groups[kind], "lr": lr} for kind, lr in kinds.items()])
    momenta = {name: torch.zeros_like(named[name]) for name in matrices}
    losses = []
    for step in range(STEPS):
        loss = loss_of(run, batch(rank, step))
        loss.backward()
        with torch.no_grad():
            for name, momentum in momenta.items():
                momentum.mul_(0.9).add_(named[name].grad)
            if hasattr(model, "update_whole"):
                changes = model.update_whole(momenta, lambda _, whole: orthogonalized(whole))
            else:
                changes = {name: orthogonalized(whole) for name, whole in momenta.items()}
            for name, change in changes.items():
                named[name].sub_(change, alpha=0.02)
        adamw.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_muon_with_adamw(rank: int, mode: str) -> None:
    plain = make_transformer(num_blocks=1)
    expected = _muon_and_adamw(plain, DistributedDataParallel(plain), rank)
    model = wrap(make_transformer(num_blocks=1))
    got = _muon_and_adamw(model, in_mode(model, mode), rank)
    assert got == pytest.approx(expected, rel=1e-4)


def _two_optimizers(model: nn.Module, rank: int) -> list[float]:
    """Each with parameters and a schedule of its own."""
    named = list(model.named_parameters())
    head = [p for name, p in named if "2." in name]
    body = [p for name, p in named if "2." not in name]
    adam, sgd = torch.optim.Adam(head, lr=0.01), torch.optim.SGD(body, lr=0.1, momentum=0.9)
    schedules: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.02, total_steps=2 * STEPS),
        torch.optim.lr_scheduler.CosineAnnealingLR(sgd, STEPS),
    ]
    losses = []
    for step in range(STEPS):
        loss = classification_loss(model, examples(rank, step))
        loss.backward()
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_two_optimizers_with_schedules(rank: int, mode: str) -> None:
    expected = _two_optimizers(DistributedDataParallel(make_classifier()), rank)
    got = _two_optimizers(in_mode(shard(make_classifier()), mode), rank)
    assert got == pytest.approx(expected, rel=1e-5)


# -- averages of weights ---------------------------------------------------------------------------


def _by_hand(model: nn.Module, train: Callable[[int], object]) -> None:
    """Over parameters(); evaluated in their place."""
    average = [p.detach().clone() for p in model.parameters()]
    for step in range(STEPS):
        train(step)
        for mean, p in zip(average, model.parameters(), strict=True):
            mean.mul_(0.9).add_(p.detach(), alpha=0.1)
    for mean, p in zip(average, model.parameters(), strict=True):
        p.data.copy_(mean)


def _by_averaged_model(model: nn.Module, train: Callable[[int], object]) -> None:
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        train(step)
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())


def _by_state_dict(model: nn.Module, train: Callable[[int], object]) -> None:
    average = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(STEPS):
        train(step)
        for name, value in model.state_dict().items():
            average[name].mul_(0.9).add_(value, alpha=0.1)
    model.load_state_dict(average)


def _averaged(
    model: nn.Module, run: nn.Module, average: Callable[..., None], rank: int
) -> tuple[float, float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    average(model, lambda step: fit(run, optimizer, rank, range(step, step + 1)))
    with torch.no_grad():
        loss = classification_loss(run, examples(0, 9)).item()
    return loss, fit(run, optimizer, rank, range(7, 8))[0]


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_moving_averages(rank: int, mode: str) -> None:
    """Of parameters, by AveragedModel and of state dicts: losses of the average, and after it."""
    for average in (_by_hand, _by_averaged_model, _by_state_dict):
        plain, sharded = make_classifier(), shard(make_classifier())
        expected = _averaged(plain, DistributedDataParallel(plain), average, rank)
        got = _averaged(sharded, in_mode(sharded, mode), average, rank)
        assert got == pytest.approx(expected, rel=1e-5), average.__name__


def _make_normed() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
    return nn.Sequential(first, nn.Linear(12, 3))


def _stochastic_averaging(model: nn.Module, run: nn.Module) -> tuple[list[float], list[float]]:
    """SWA: averaged weights, and statistics computed anew; the same batches on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)
    losses = []
    for step in range(STEPS):
        losses += fit(run, optimizer, 0, range(step, step + 1))
        if step >= 2:
            averaged.update_parameters(model)
            schedule.step()
    update_bn([examples(0, step)[0] for step in range(3)], averaged)
    averaged.eval()
    with torch.no_grad():
        losses.append(classification_loss(averaged, examples(0, 9)).item())
    return losses, averaged.module.state_dict()["0.1.running_mean"].tolist()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_stochastic_weight_averaging(rank: int, mode: str) -> None:
    plain, sharded = _make_normed(), shard(_make_normed())
    losses, means = _stochastic_averaging(plain, plain)
    got, got_means = _stochastic_averaging(sharded, in_mode(sharded, mode))
    assert got == pytest.approx(losses, rel=1e-5)
    assert got_means == pytest.approx(means, rel=1e-5, abs=1e-6)


# -- gradient scalers ------------------------------------------------------------------------------


def _scaled(model: nn.Module, rank: int, scaler: torch.amp.GradScaler) -> list[tuple[float, ...]]:
    """Autocast in fp16, unscaled, clipped; losses, norms and scales."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = classification_loss(model, examples(rank, step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(model, 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((loss.item(), norm, scaler.get_scale()))
    return seen


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_gradient_scalers_without_an_overflow(rank: int, mode: str) -> None:
    """Torch's own under DDP, the sharded one here; with an overflow: test_optimizer_checks.py."""
    how = {"init_scale": 256.0, "growth_interval": 2}
    theirs, ours = torch.amp.GradScaler("cpu", **how), ShardedGradScaler("cpu", **how)
    expected = _scaled(DistributedDataParallel(make_classifier()), rank, theirs)
    got = _scaled(in_mode(shard(make_classifier()), mode), rank, ours)
    assert [scale for *_, scale in got] == [256.0, 512.0, 512.0, 1024.0]
    for line, expected_line in zip(got, expected, strict=True):
        assert line == pytest.approx(expected_line, rel=1e-3)
