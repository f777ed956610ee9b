"""Accumulation, under no_sync() and outside it; sums are reduced once, in whatever order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import (
    ModuleWrapPolicy,
)

ALL_MODES = list(MODES)


def _accumulate(rank: int, world_size: int, first: str, last: str) -> tuple[Any, Any, Any]:
    """Two steps in ``no_sync()`` (or outside it) in one mode, then one more in another, twice."""
    reference = DistributedDataParallel(make_transformer(num_blocks=2))
    for step in range(3):
        loss_of(reference, batch(rank, step)).backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    model = wrap(make_transformer(num_blocks=2))
    early, late = (in_mode(model, mode.removesuffix(" sync")) for mode in (first, last))
    for window in range(2):
        model.zero_grad()
        with record_events() as log:
            with nullcontext() if first.endswith(" sync") else model.no_sync():
                for step in range(2):
                    loss_of(early, batch(rank, step)).backward()
            reduced = [len(log.keys("reduce_scatter"))]
            loss_of(late, batch(rank, 2)).backward()
            reduced.append(len(log.keys("reduce_scatter")) - reduced[0])
        kept = [f.grad_sum.total for u in model._fsdp_root.units for f in u.flats]
        assert kept == [None] * len(kept)
        norm = float(model.clip_grad_norm_(1e9))
        assert norm == pytest.approx(expected, rel=1e-6), window
    return expected, norm, reduced


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("eager sync", "eager"),
        ("eager", "eager"),
        ("hooks", "hooks"),
        pytest.param("graph sync", "graph", marks=pytest.mark.slow),
        ("graph", "graph"),
        pytest.param("graph-inductor", "graph-inductor", marks=pytest.mark.slow),
        ("eager", "graph"),
        pytest.param("graph", "hooks", marks=pytest.mark.slow),
    ],
)
def test_accumulation(ranks: RankPool, first: str, last: str) -> None:
    for expected, got, reduced in ranks.run(_accumulate, 2, first, last):
        assert got == pytest.approx(expected, rel=1e-6)
        assert reduced == [6 if first.endswith(" sync") else 0, 3]


def _accumulated_bytes(rank: int, world_size: int, mode: str) -> tuple[int, int, int, int]:
    """Gradient bytes kept by two steps in ``no_sync()``, and by two steps outside it."""
    model = wrap(make_transformer(num_blocks=2))
    run = in_mode(model, mode)
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]

    def kept() -> int:
        grads = [local_of(p.grad) for p in model.parameters() if p.grad is not None]
        sums = [f.grad_sum.total for f in flats if f.grad_sum.total is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in [*grads, *sums]}
        return sum(storage.nbytes() for storage in storages.values() if storage.nbytes())

    for step in range(2):
        loss_of(run, batch(rank, step)).backward()
    outside = kept()
    model.zero_grad()
    with model.no_sync():
        for step in range(2):
            loss_of(run, batch(rank, step)).backward()
    inside = kept()
    unsharded = sum(flat.reduce_bytes for flat in flats)
    return outside, inside, unsharded // world_size, unsharded


@pytest.mark.parametrize("mode", ALL_MODES)
def test_memory_of_accumulation(ranks: RankPool, mode: str) -> None:
    """Outside ``no_sync()`` one shard of the gradients is kept, inside it all of them."""
    for outside, inside, sharded, unsharded in ranks.run(_accumulated_bytes, 2, mode):
        assert (outside, inside) == (sharded, unsharded)


def _zero_between(rank: int, world_size: int, mode: str, to_none: bool) -> tuple[float, float]:
    """zero_grad between forward and backward, and gradients kept over two backwards."""
    norms = []
    for model in (
        DistributedDataParallel(make_transformer(num_blocks=2)),
        in_mode(wrap(make_transformer(num_blocks=2)), mode),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss_of(model, batch(rank, 0)).backward()
        loss = loss_of(model, batch(rank, 1))
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        loss_of(model, batch(rank, 2)).backward()
        clip = getattr(model, "clip_grad_norm_", None)
        if clip is None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)))
        else:
            norms.append(float(clip(1e9)))
    return norms[0], norms[1]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_zero_grad_and_accumulation(ranks: RankPool, mode: str, to_none: bool) -> None:
    for expected, got in ranks.run(_zero_between, 2, mode, to_none):
        assert got == pytest.approx(expected, rel=1e-6)


# -- sums -----------------------------------------------------------------------------------------

Step = Callable[[], torch.Tensor]


def _pending_together(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    (forward() + forward()).backward()


def _pending_one_by_one(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    first, second = forward(), forward()
    first.backward()
    second.backward()


def _backward_twice(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    loss = forward()
    loss.backward(retain_graph=True)
    loss.backward()


def _another_sum_meanwhile(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    loss = forward()
    unsynced()
    loss.backward()
    forward().backward()


def _a_forward_without_backward(forward: Step, unsynced: Callable[[], None]) -> None:
    unsynced()
    forward()
    kept = forward()
    forward().backward()
    del kept


PROGRAMS = (
    _pending_together,
    _pending_one_by_one,
    _backward_twice,
    _another_sum_meanwhile,
    _a_forward_without_backward,
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _expected(program: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = _model()
    program(lambda: plain(x).square().sum(), lambda: plain(2 * x).square().sum().backward())
    return {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}


def _wrong(rank: int, world_size: int, mode: str) -> list[str]:
    x = torch.arange(8.0).view(2, 4) / 8  # the same on all ranks, so the mean is one rank's
    wrong = []
    for program in PROGRAMS:
        model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        step = in_mode(model, mode)

        def unsynced(model: FSDP = model, step: Any = step) -> None:
            with model.no_sync():
                step(2 * x).square().sum().backward()

        try:
            program(lambda step=step: step(x).square().sum(), unsynced)
        except RuntimeError as error:
            wrong.append(f"{program.__name__}: {error}")
            continue
        expected = _expected(program, x)
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                if not torch.allclose(parameter.grad, expected[name], 1e-5, 1e-6):
                    wrong.append(f"{program.__name__}: {name}")
    return wrong


@pytest.mark.parametrize("mode", [*ALL_MODES, "graph-inductor"])
def test_a_sum_is_added_once(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_wrong, 2, mode) == [[], []]


# -- changes by the user before the reduction ------------------------------------------------------


class Training:
    """A model with what programs below do to it."""

    def __init__(self, model: Any, run: nn.Module, rank: int) -> None:
        self.model, self.run, self.rank, self.batches = model, run, rank, 0
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward(self) -> torch.Tensor:
        self.batches += 1
        x = torch.arange(8.0).view(2, 4).sin() * (self.batches + 3 * self.rank)
        loss: torch.Tensor = self.run(x).square().sum()
        return loss

    def unsynced(self) -> None:
        with self.model.no_sync():
            self.forward().backward()

    def scale(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.25)


def _dropped(t: Training) -> None:
    t.unsynced()
    t.optimizer.zero_grad()
    t.forward().backward()


def _dropped_by_the_model_within_a_window(t: Training) -> None:
    t.unsynced()
    t.model.zero_grad()
    t.unsynced()
    t.forward().backward()


def _zeroed(t: Training) -> None:
    t.unsynced()
    t.optimizer.zero_grad(set_to_none=False)
    t.forward().backward()


def _one_dropped(t: Training) -> None:
    t.unsynced()
    next(iter(t.model.parameters())).grad = None
    t.unsynced()
    list(t.model.parameters())[2].grad = None
    t.forward().backward()


def _scaled(t: Training) -> None:
    t.unsynced()
    t.scale()
    t.unsynced()
    t.scale()
    t.forward().backward()


def _dropped_between_forward_and_backward(t: Training) -> None:
    t.unsynced()
    loss = t.forward()
    t.optimizer.zero_grad()
    loss.backward()


def _scaled_between_forward_and_backward(t: Training) -> None:
    t.unsynced()
    loss = t.forward()
    t.scale()
    loss.backward()


def _reduced_scaled(t: Training) -> None:
    t.forward().backward()
    t.unsynced()
    t.scale()
    t.forward().backward()


def _reduced_dropped(t: Training) -> None:
    t.forward().backward()
    t.unsynced()
    t.optimizer.zero_grad()
    t.unsynced()
    t.forward().backward()


def _unsynced_between_forward_and_backward(t: Training) -> None:
    loss = t.forward()
    t.unsynced()
    loss.backward()
    t.scale()
    t.forward().backward()


def _clipped_by_rank(t: Training) -> None:
    t.unsynced()
    nn.utils.clip_grad_norm_(t.model.parameters(), 0.5)
    t.forward().backward()


def _stepped_with_zeros_kept(t: Training) -> None:
    for _ in range(2):
        t.unsynced()
        t.forward().backward()
        t.optimizer.step()
        t.optimizer.zero_grad(set_to_none=False)
    t.unsynced()
    t.forward().backward()


CHANGES = (
    _dropped,
    _dropped_by_the_model_within_a_window,
    _zeroed,
    _one_dropped,
    _scaled,
    _dropped_between_forward_and_backward,
    _scaled_between_forward_and_backward,
    _reduced_scaled,
    _reduced_dropped,
    _unsynced_between_forward_and_backward,
    _clipped_by_rank,
    _stepped_with_zeros_kept,
)


def _gradients_as_ddp(rank: int, world_size: int, mode: str, strategy: str) -> list[str]:
    """Programs whose gradients are not those of DDP."""
    wrong = []
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(_model(), auto_wrap_policy=policy, sharding_strategy=ShardingStrategy[strategy])
    run, initial = in_mode(model, mode), copy.deepcopy(model.state_dict())
    for program in CHANGES:
        model.load_state_dict(initial)
        model.zero_grad()
        reference = DistributedDataParallel(_model())
        if program is not _unsynced_between_forward_and_backward:
            program(Training(reference, reference, rank))
            expected = {n: p.grad.clone() for n, p in reference.module.named_parameters()}
        else:
            expected = _of_one_process_each(rank, world_size)
        program(Training(model, run, rank))
        with FSDP.summon_full_params(model, with_grads=True):
            for name, parameter in model.named_parameters():
                if not torch.allclose(parameter.grad, expected[name], 1e-4, 1e-5):
                    wrong.append(f"{program.__name__}: {name}")
    return wrong


def _of_one_process_each(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Of the program that DDP cannot run: its hooks take every backward for the same forward's."""

    class Unsynced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _model()

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

        def no_sync(self) -> Any:
            return nullcontext()

    total: dict[str, torch.Tensor] = {}
    for other in range(world_size):
        model = Unsynced()
        _unsynced_between_forward_and_backward(Training(model, model, other))
        for name, p in model.inner.named_parameters():
            assert p.grad is not None
            total[name] = total.get(name, 0) + p.grad / world_size
    return total


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        ("eager", "FULL_SHARD"),
        ("eager", "NO_SHARD"),
        ("hooks", "FULL_SHARD"),
        ("graph", "FULL_SHARD"),
        pytest.param("graph", "NO_SHARD", marks=pytest.mark.slow),
    ],
)
def test_changes_before_the_reduction(ranks: RankPool, mode: str, strategy: str) -> None:
    """What the user drops or scales is dropped or scaled, as with DDP."""
    assert ranks.run(_gradients_as_ddp, 2, mode, strategy) == [[], []]


def _switched_by_attribute(rank: int, world_size: int, mode: str) -> tuple[Any, Any, list[int]]:
    """DDP's attribute in place of ``no_sync()``: both norms, and our reductions."""
    x = torch.arange(8.0).view(2, 4)
    reference = DistributedDataParallel(_model())
    model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    counts = []
    for one, run in ((reference, reference), (model, in_mode(model, mode))):
        for sync in (False, True):
            one.require_backward_grad_sync = sync
            assert one.require_backward_grad_sync is sync
            with record_events() as log:
                run(x + rank + sync).square().sum().backward()
            counts.append(len(log.keys("reduce_scatter")))
    with pytest.raises(FSDPStateError, match="the outermost unit"):
        next(m for m in model.module if isinstance(m, FSDP)).require_backward_grad_sync = False
    expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    return float(expected), float(model.clip_grad_norm_(1e9)), counts[2:]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_require_backward_grad_sync(ranks: RankPool, mode: str) -> None:
    for expected, norm, reduced in ranks.run(_switched_by_attribute, 2, mode):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert reduced == [0, 2]


def _seen_before_the_reduction(rank: int, world_size: int, mode: str) -> list[float]:
    """Norms in a window: by clip_grad_norm_(), of whole gradients, and after another step."""
    x = torch.arange(8.0).view(2, 4)
    reference = DistributedDataParallel(_model())
    model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    run = in_mode(model, mode)
    reference(x + rank).square().sum().backward()
    with model.no_sync():
        run(x + rank).square().sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        whole = [p.grad.norm() for p in model.parameters()]
    norms = [float(torch.stack(whole).norm())]
    norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5)))
    with model.no_sync():
        run(0 * x).sum().mul(0.0).backward()
    norms.append(float(model.clip_grad_norm_(0.5)))
    for step in (reference, run):
        step(x - rank).square().sum().backward()
    norms.append(float(nn.utils.clip_grad_norm_(reference.parameters(), 1.0)))
    norms.append(float(model.clip_grad_norm_(1.0)))
    return norms


@pytest.mark.parametrize("mode", ALL_MODES)
def test_what_looks_at_gradients_reduces_them(ranks: RankPool, mode: str) -> None:
    for whole, expected, clipped, expected_later, later in ranks.run(
        _seen_before_the_reduction, 2, mode
    ):
        assert whole == pytest.approx(expected, rel=1e-5)
        assert clipped == pytest.approx(expected, rel=1e-5)
        assert later == pytest.approx(expected_later, rel=1e-5)


def _kept_by_conversions(rank: int, world_size: int) -> tuple[float, float, str]:
    """Norms after ``.double()`` in a window, and the message where a gradient was replaced."""
    x = torch.arange(8.0).view(2, 4)
    plain, model = _model(), FSDP(_model())
    ranks = range(world_size)
    (sum(plain(x + r).square().sum() for r in ranks) / world_size).backward()
    plain.double()
    (sum(plain((x - r).double()).square().sum() for r in ranks) / world_size).backward()
    expected = float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    with model.no_sync():
        model(x + rank).square().sum().backward()
    model.double()
    model((x - rank).double()).square().sum().backward()
    norm = model.clip_grad_norm_(1e9)
    assert norm.dtype == torch.float64
    model.zero_grad()
    with model.no_sync():
        model(x.double()).sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(FSDPStateError) as raised:
        model(x.double()).sum().backward()
    return expected, float(norm), str(raised.value)


def test_conversions_and_replaced_gradients(ranks: RankPool) -> None:
    for expected, norm, message in ranks.run(_kept_by_conversions, 2):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert "parameter '0.weight': expected the gradient that steps under no_sync()" in message
        assert "Change it in place" in message


class _Twice(nn.Module):
    """A model whose unit runs twice in one forward, the first time with gradients or without."""

    def __init__(self, grad_first: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 3))
        self.head = nn.Linear(3, 1)
        self.grad_first = grad_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(self.grad_first):
            x = self.block(x)
        return self.head(self.block(x))


def _sum_of_a_unit_called_twice(
    rank: int, world_size: int, mode: str, grad_first: bool
) -> list[Any]:
    plain = DistributedDataParallel(_Twice(grad_first))
    wrapped = FSDP(copy.deepcopy(plain.module), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))
    model = in_mode(wrapped, mode)
    for one, whole in ((plain, plain), (model, wrapped)):
        with whole.no_sync():
            one(torch.full((2, 3), rank + 1.0)).square().sum().backward()
        one(torch.full((2, 3), rank + 2.0)).square().sum().backward()
    with FSDP.summon_full_params(wrapped, with_grads=True):
        return [[p.grad.tolist() for p in one.parameters()] for one in (plain, wrapped)]


@pytest.mark.parametrize("grad_first", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_sum_of_a_unit_called_twice_is_added_once(
    ranks: RankPool, mode: str, grad_first: bool
) -> None:
    for expected, got in ranks.run(_sum_of_a_unit_called_twice, 2, mode, grad_first):
        torch.testing.assert_close(
            [torch.tensor(g) for g in got], [torch.tensor(g) for g in expected]
        )


class _OfOneRow(nn.Module):
    """Uses a parameter in some steps, of which only the first rank has a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.row = nn.Parameter(torch.ones(1, 4))

    def forward(self, x: torch.Tensor, uses_row: bool) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y * self.row if uses_row else y


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_ranks_without_rows_have_gradients_too(ranks: RankPool, mode: str, strategy: str) -> None:
    """Or torch's clipping would wait for a norm that they do not take part in."""
    for lists, norms in ranks.run(_without_rows, 4, mode, strategy):
        assert lists == [[True] * 3, [True, True, False], [True] * 3]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def _without_rows(rank: int, world_size: int, mode: str, strategy: str) -> Any:
    """Which parameters have gradients, and norms by torch and by us, of a sum and of one step."""
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {}
    if strategy == "HYBRID_SHARD":
        kwargs = {"device_mesh": init_device_mesh("cpu", (2, 2))}
    model = FSDP(_OfOneRow(), sharding_strategy=ShardingStrategy[strategy], **kwargs)
    run, x = in_mode(model, mode), torch.ones(2, 4) + rank
    lists, norms = [], []
    with model.no_sync():
        run(x, True).sum().backward()
    run(x, False).sum().backward()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 100.0)))
    norms.append(float(model.clip_grad_norm_(100.0)))
    lists.append([p.grad is not None for _, p in sorted(model.named_parameters())])
    model.zero_grad()
    run(x, False).sum().backward()
    lists.append([p.grad is not None for _, p in sorted(model.named_parameters())])
    model.zero_grad()
    with model.no_sync():
        run(x, True).sum().backward()
    model.clip_grad_norm_(100.0)  # reduces the sum alone
    lists.append([p.grad is not None for _, p in sorted(model.named_parameters())])
    return lists, norms
