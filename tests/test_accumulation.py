"""Accumulation, under no_sync() and outside it; sums are reduced once, in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ways import WAYS, in_way

from fsdp_dynamo import FSDP, record_events
from fsdp_dynamo.wrap_policy import (
    ModuleWrapPolicy,
)

ALL_WAYS = list(WAYS)


def _accumulate(rank: int, world_size: int, first: str, last: str) -> tuple[Any, Any, Any]:
    """Two steps in ``no_sync()`` (or outside of it) in one way, then one more in another, twice."""
    reference = DistributedDataParallel(make_transformer(num_blocks=2))
    for step in range(3):
        loss_of(reference, batch(rank, step)).backward()
    expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    model = wrap(make_transformer(num_blocks=2))
    early, late = (in_way(model, way.removesuffix(" sync")) for way in (first, last))
    for window in range(2):
        model.zero_grad()
        with record_events() as log:
            with nullcontext() if first.endswith(" sync") else model.no_sync():
                for step in range(2):
                    loss_of(early, batch(rank, step)).backward()
            reduced = [len(log.keys("reduce_scatter"))]
            loss_of(late, batch(rank, 2)).backward()
            reduced.append(len(log.keys("reduce_scatter")) - reduced[0])
        kept = [f.unsharded_grad_sum for u in model._fsdp_root.units for f in u.flats]
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


def _accumulated_bytes(rank: int, world_size: int, way: str) -> tuple[int, int, int, int]:
    """Gradient bytes kept by two steps in ``no_sync()``, and by two steps outside it."""
    model = wrap(make_transformer(num_blocks=2))
    run = in_way(model, way)
    flats = [flat for unit in model._fsdp_root.units for flat in unit.flats]

    def kept() -> int:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        sums = [f.unsharded_grad_sum for f in flats if f.unsharded_grad_sum is not None]
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


@pytest.mark.parametrize("way", ALL_WAYS)
def test_memory_of_accumulation(ranks: RankPool, way: str) -> None:
    """Outside ``no_sync()`` one shard of the gradients is kept, inside it all of them."""
    for outside, inside, sharded, unsharded in ranks.run(_accumulated_bytes, 2, way):
        assert (outside, inside) == (sharded, unsharded)


def _zero_between(rank: int, world_size: int, way: str, to_none: bool) -> tuple[float, float]:
    """zero_grad between forward and backward, and gradients kept over two backwards."""
    norms = []
    for model in (
        DistributedDataParallel(make_transformer(num_blocks=2)),
        in_way(wrap(make_transformer(num_blocks=2)), way),
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
@pytest.mark.parametrize("way", ALL_WAYS)
def test_zero_grad_and_accumulation(ranks: RankPool, way: str, to_none: bool) -> None:
    for expected, got in ranks.run(_zero_between, 2, way, to_none):
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


def _wrong(rank: int, world_size: int, way: str) -> list[str]:
    x = torch.arange(8.0).view(2, 4) / 8  # the same on all ranks, so the mean is one rank's
    wrong = []
    for program in PROGRAMS:
        model = FSDP(_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        step = in_way(model, way)

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


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_sum_is_added_once(ranks: RankPool, way: str) -> None:
    assert ranks.run(_wrong, 2, way) == [[], []]
