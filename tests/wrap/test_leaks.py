"""Nothing is kept from step to step, or of a model that is gone."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from census import Census
from loops import classification_loss, examples, make_classifier, shard
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool, on_ranks

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.hooks_mode.leaves import SegmentBackend


@pytest.mark.parametrize(
    ("mode", "backward"),
    [
        ("eager", True),
        ("graph", True),
        pytest.param("hooks", True, marks=pytest.mark.slow),
        pytest.param("graph", False, marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_no_tensor_is_kept(rank: int, mode: str, backward: bool) -> None:
    census = Census()
    model = in_mode(wrap(make_transformer(num_blocks=1)), mode)
    counts = []
    for step in range(16):
        loss = loss_of(model, batch(rank, step))
        if backward:
            loss.backward()
        del loss
        if step in (5, 15):
            counts.append(census.count())
    assert counts[1] <= counts[0]


@on_ranks(2)
def test_models_that_are_gone_leave_nothing(rank: int) -> None:
    census = Census()
    counts = []
    for cycle in range(5):
        model = wrap(make_transformer(num_blocks=1))
        loss_of(model, batch(rank, cycle)).backward()
        del model
        if cycle in (1, 4):
            counts.append(census.count())
    assert counts[1] <= counts[0]


def _alive() -> dict[type, int]:
    while gc.collect():
        pass
    types = Counter(map(type, gc.get_objects()))
    kinds = (Unit, SegmentBackend, torch.fx.GraphModule)
    return {kind: sum(n for t, n in types.items() if issubclass(t, kind)) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hooks", "graph"])
@on_ranks(2)
def test_compiled_models_that_are_gone_leave_nothing(rank: int, mode: str) -> None:
    """Backends, segments and graphs go with the model that they were compiled for."""
    counts = [_alive()]  # Dynamo may keep the backend of an earlier trace that failed
    for cycle in range(3):
        model = in_mode(wrap(make_transformer(num_blocks=1)), mode)
        loss_of(model, batch(rank, cycle)).backward()
        del model
        counts.append(_alive())
    assert counts[1] == counts[2] == counts[3]
    assert counts[1][SegmentBackend] <= counts[0][SegmentBackend]


_groups: list[weakref.ref[dist.ProcessGroup]] = []


def _groups_that_live_on(rank: int, world_size: int, mode: str) -> int:
    """Of the groups of earlier jobs of this kind; each has threads that never rest."""
    gc.collect()
    alive = sum(reference() is not None for reference in _groups)
    _groups.append(weakref.ref(dist.group.WORLD))
    classification_loss(in_mode(shard(make_classifier()), mode), examples(rank)).backward()
    return alive


def test_groups_that_are_destroyed_are_gone(ranks: RankPool) -> None:
    for mode in ("eager", "eager", "graph", "hooks", "eager"):
        alive = ranks.run(_groups_that_live_on, 2, mode)
    assert max(alive) <= 1  # Dynamo keeps its last frames for a while
