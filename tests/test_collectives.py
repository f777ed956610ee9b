"""Collectives: numbers, progress beside the computation, and recordings that are off."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool
from ways import WAYS, in_way

from fsdp_dynamo import collectives, events


def _progress(rank: int, world_size: int) -> list[bool]:
    """Issued collectives complete while nobody waits for them: they run beside the compute."""
    group = dist.group.WORLD
    assert group is not None
    shard = torch.full((1 << 16,), float(rank))
    unsharded = torch.empty(world_size << 16)
    part = torch.empty(1 << 16)
    source = torch.ones(world_size << 16)
    works = [
        collectives.issue_all_gather(unsharded, shard, group),
        collectives.issue_reduce_mean(part, source, group),
    ]
    done = []
    for work in works:
        give_up = time.monotonic() + 20
        while not work._work.is_completed() and time.monotonic() < give_up:  # type: ignore[union-attr]
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        done.append(work._work.is_completed())  # type: ignore[union-attr]
        work.wait()
    done.append(bool((part == 1).all()))
    done.append([float(v) for v in unsharded[:: 1 << 16]] == [float(r) for r in range(world_size)])
    return done


def test_collectives_progress_without_a_wait(ranks: RankPool) -> None:
    assert ranks.run(_progress, 2) == [[True] * 4] * 2


def _means(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [torch.arange(12.0).mul(r + 1).to(dtype) for r in range(world_size)]
        expected = (sum(w.float() for w in whole) / world_size).to(dtype)
        part = torch.empty(12 // world_size, dtype=dtype)
        collectives.issue_reduce_mean(part, whole[rank].clone(), group).wait()
        own = expected.chunk(world_size)[rank]
        results.append(torch.allclose(part.float(), own.float(), rtol=1e-2))
        same = whole[rank].clone()
        collectives.issue_reduce_mean(same, same, group).wait()
        results.append(torch.allclose(same.float(), expected.float(), rtol=1e-2))
    return results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_means(ranks: RankPool, world_size: int) -> None:
    assert ranks.run(_means, world_size) == [[True] * 6] * world_size


def _no_events(rank: int, world_size: int, way: str) -> bool:
    """With no recording, no event is ever made."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an event was made")

    kept = events.EventLog.issue
    events.EventLog.issue = refuse  # type: ignore[method-assign]
    try:
        model = in_way(wrap(make_transformer(num_blocks=2)), way)
        for step in range(2):
            loss_of(model, batch(rank, step)).backward()
    finally:
        events.EventLog.issue = kept  # type: ignore[method-assign]
    return True


@pytest.mark.parametrize("way", WAYS)
def test_off_means_off(ranks: RankPool, way: str) -> None:
    assert ranks.run(_no_events, 2, way) == [True, True]
