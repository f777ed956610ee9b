"""Training loops as scripts have them, beside the same loops under DistributedDataParallel.

Optimizers in the backward: test_gradient_hooks.py; Muon alone: test_sharded_optimizers.py; teachers
that follow a student: test_fuzz.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import (
    classification_loss,
    clip,
    different,
    examples,
    fit,
    make_classifier,
    shard,
    whole_gradients,
)
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from examples.muon import orthogonalized
from fsdp_dynamo import FSDP, ShardedGradScaler

STEPS = 4
Numbers = list[float]


def _one_block() -> nn.Module:
    return make_transformer(num_blocks=1)


# -- several optimizers ----------------------------------------------------------------------------


def _muon_and_adamw(model: Any, run: nn.Module, rank: int) -> Numbers:
    """Muon for the blocks' matrices, AdamW with three learning rates for the rest."""
    named = dict(model.named_parameters())
    matrices = [n for n in named if n.startswith("blocks") and named[n].dim() == 2]
    kinds = {"embed": 0.01, "head": 0.02, "": 0.03}
    groups: dict[str, list[nn.Parameter]] = {kind: [] for kind in kinds}
    for name in [name for name in named if name not in matrices]:
        groups[next(kind for kind in kinds if name.startswith(kind))].append(named[name])
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


def _two_optimizers(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """Each with parameters and a schedule of its own."""
    named = list(model.named_parameters())
    head = [p for name, p in named if name.startswith("2.")]
    body = [p for name, p in named if not name.startswith("2.")]
    adam, sgd = torch.optim.Adam(head, lr=0.01), torch.optim.SGD(body, lr=0.1, momentum=0.9)
    schedules: list[Any] = [
        torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.02, total_steps=2 * STEPS),
        torch.optim.lr_scheduler.CosineAnnealingLR(sgd, STEPS),
    ]
    losses = []
    for step in range(STEPS):
        loss = classification_loss(run, examples(rank, step))
        loss.backward()
        for optimizer in (adam, sgd):
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        losses.append(loss.item())
    return losses


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


def _moving_averages(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """One after the other: losses of the average, and of the step after it."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for average in (_by_hand, _by_averaged_model, _by_state_dict):
        average(model, lambda step: fit(run, optimizer, rank, range(step, step + 1)))
        with torch.no_grad():
            losses.append(classification_loss(run, examples(0, 9)).item())
        losses += fit(run, optimizer, rank, range(7, 8))
    return losses


def _make_normed() -> nn.Module:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.ReLU())
    return nn.Sequential(first, nn.Linear(12, 3))


def _stochastic_averaging(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """SWA: averaged weights, and statistics computed anew; the same batches on all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averaged, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.05)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step)
        losses += fit(run, optimizer, 0, range(step, step + 1))
        if step >= 2:
            averaged.update_parameters(model)
            schedule.step()
    torch.manual_seed(STEPS)
    update_bn([examples(0, step)[0] for step in range(3)], averaged)
    averaged.eval()
    with torch.no_grad():
        losses.append(classification_loss(averaged, examples(0, 9)).item())
    return [*losses, *averaged.module.state_dict()["0.1.running_mean"].tolist()]


def _with_evaluations(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """Batch norm and dropout; the same batches on all ranks, so DDP exchanges equal statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(6):
        torch.manual_seed(step)
        losses += fit(run, optimizer, 0, range(step, step + 1))
        if step % 2:
            run.eval()
            with torch.no_grad():
                losses.append(classification_loss(run, examples(0, 9)).item())
            run.train()
    state = model.state_dict()
    assert int(state["0.1.num_batches_tracked"]) == 6
    return [*losses, *state["0.1.running_var"].tolist()]


# -- others ----------------------------------------------------------------------------------------


def _scaled(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """Torch's own gradient scaler under DDP, the sharded one here: fp16, unscaled, clipped.

    With an overflow: test_sharded_optimizers.py.
    """
    kind = ShardedGradScaler if isinstance(model, FSDP) else torch.amp.GradScaler
    scaler = kind("cpu", init_scale=256.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, scales = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = classification_loss(run, examples(rank, step))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        seen += [loss.item(), clip(model, 1.0)]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [256.0, 512.0, 512.0, 1024.0]
    return seen


def _halved_as_a_vector(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """All weights as one vector of whole parameters: halved, and put back."""
    with FSDP.summon_full_params(model) if isinstance(model, FSDP) else nullcontext():
        vector = parameters_to_vector(model.parameters())
        vector_to_parameters(0.5 * vector.detach(), model.parameters())
    return fit(run, torch.optim.SGD(model.parameters(), lr=0.1), rank, range(2))


class _Pairs(nn.Module):
    """The loss of pairs of views, each against the views of all ranks, as of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        towers = [nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)]
        self.left, self.right = towers
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        own = [F.normalize(self.left(x), dim=-1), F.normalize(self.right(y), dim=-1)]
        left, right = (all_gather_tensor_autograd(one, 0, dist.group.WORLD) for one in own)
        scale = self.scale.exp()
        losses = [
            F.cross_entropy(scale * mine @ others.T, labels)
            for mine, others in zip(own, (right, left), strict=True)
        ]
        return (losses[0] + losses[1]) / 2


def _contrastive(model: nn.Module, run: nn.Module, rank: int) -> Numbers:
    """In graph mode, the user's collectives are nodes among those of the units."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        x, noise = examples(rank, step)[0], examples(rank, step + STEPS)[0]
        loss = run(x, x + 0.1 * noise, torch.arange(len(x)) + len(x) * rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("loop", "make", "mode", "tolerance"),
    [
        (_muon_and_adamw, _one_block, "eager", 1e-4),
        (_two_optimizers, make_classifier, "graph", 1e-5),
        (_moving_averages, make_classifier, "graph", 1e-5),
        (_stochastic_averaging, _make_normed, "eager", 1e-5),
        (_with_evaluations, _make_normed, "graph", 1e-5),
        (_scaled, make_classifier, "eager", 1e-3),
        (_halved_as_a_vector, make_classifier, "eager", 1e-5),
        (_contrastive, _Pairs, "graph", 1e-5),
    ],
)
@on_ranks(2)
def test_trains_as_ddp(
    rank: int,
    loop: Callable[..., Numbers],
    make: Callable[[], nn.Module],
    mode: str,
    tolerance: float,
) -> None:
    plain = make()
    expected = loop(plain, DistributedDataParallel(plain), rank)
    sharded = wrap(make()) if make is _one_block else shard(make())
    got = loop(sharded, in_mode(sharded, mode), rank)
    assert got == pytest.approx(expected, rel=tolerance, abs=1e-6)


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


# -- two models -----------------------------------------------------------------------------------


def _generator() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 16), nn.ReLU()), nn.Linear(16, 8))


def _discriminator() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2)), nn.Linear(16, 1))


def _verdict(logits: torch.Tensor, is_real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def _adversaries(
    generator: nn.Module, discriminator: nn.Module, rank: int, toggles: bool
) -> Numbers:
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


@pytest.mark.parametrize(("mode", "toggles"), [("eager", True), ("graph", False)])
@on_ranks(2)
def test_adversaries_train_as_with_ddp(rank: int, mode: str, toggles: bool) -> None:
    pairs = _generator(), _discriminator()
    expected = _adversaries(*map(DistributedDataParallel, pairs), rank, toggles)
    sharded = [in_mode(shard(make()), mode) for make in (_generator, _discriminator)]
    assert _adversaries(*sharded, rank, toggles) == pytest.approx(expected, rel=1e-5)


# -- several forwards, and several losses ----------------------------------------------------------

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


def _of_each_task(run: Model, zero_grad: Callable[[], object], ranks: list[int]) -> Any:
    """Backwards of two losses over one forward, on the batches of some ranks."""
    outputs = [(run(x), y) for x, y in map(examples, ranks)]
    for loss in (
        sum(F.cross_entropy(output, y) for output, y in outputs) / len(ranks),
        sum(output.square().mean() for output, _ in outputs) / len(ranks),
    ):
        zero_grad()
        loss.backward(retain_graph=True)
        yield


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_several_forwards_and_several_losses(rank: int, mode: str) -> None:
    """Gradients, twice over, are the means of one process on the batches of all ranks."""
    wrapped = shard(make_classifier())
    model = in_mode(wrapped, mode)
    plain, every_rank = make_classifier(), list(range(dist.get_world_size()))

    def expected() -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    for loss in LOSSES:
        plain.zero_grad()
        for each in every_rank:
            (loss(plain, examples(each)[0]) / len(every_rank)).backward()
        for time in range(2):
            wrapped.zero_grad()
            loss(model, examples(rank)[0]).backward()
            assert different(whole_gradients(wrapped), expected()) == [], (loss.__name__, time)
    wanted = _of_each_task(plain, plain.zero_grad, every_rank)
    for _ in zip(wanted, _of_each_task(model, wrapped.zero_grad, [rank]), strict=True):
        assert different(whole_gradients(wrapped), expected()) == []
