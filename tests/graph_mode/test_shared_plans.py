"""Graph mode where batches differ in size between ranks: each would plan otherwise, and follows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compile_caches import WIDTH, Layer, make_compiled_products, using_cache
from loops import fit_squares
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import FSDP
from fsdp_dynamo.graph_mode import compile_cache
from fsdp_dynamo.graph_mode.compile_cache import SharedPlans
from fsdp_dynamo.health.store import default_store
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.scheduling.plan import GraphPlan
from graph_passes.scheduling.schedule import launches_of

SIZE = 512
SIZES = ((4, SIZE), (6, SIZE), (20, 8))
"""Of the batches of both ranks, step by step: ranks compile in different steps."""
LINK = {"latency_ms": 0.02, "bytes_per_ms": 2e6}
SLOW = {"flops_per_ms": 2e6, "bytes_per_ms": 2e6}


def _products() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(4)))


def _losses(rank: int, mode: str) -> list[float]:
    model = FSDP(_products(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    run = in_mode(model, mode, link=LINK, device=SLOW)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shapes = [(sizes[rank], WIDTH) for sizes in SIZES]
    return [
        loss
        for seed, shape in enumerate(shapes)
        for loss in fit_squares(run, optimizer, shape, [2 * seed + rank])
    ]


@pytest.mark.parametrize("follows", [True, False])
@on_ranks(2)
def test_batches_of_other_lengths_on_each_rank(rank: int, follows: bool) -> None:
    """Where a graph cannot follow the plan that others have made, all have one order, too."""
    call, given_up = SharedPlans.__call__, []

    def agree(self: SharedPlans, plan: GraphPlan) -> GraphPlan:
        if not follows:
            return replace(plan, transfers=plan.transfers[1:])  # of another graph
        agreed = call(self, plan)
        given_up.append(launches_of(agreed) != launches_of(plan))
        return agreed

    expected = _losses(rank, "eager")
    with mock.patch.object(SharedPlans, "__call__", agree):
        assert _losses(rank, "graph") == pytest.approx(expected, rel=1e-5)
    on_some_rank = torch.tensor(sum(given_up))
    dist.all_reduce(on_some_rank)
    assert on_some_rank > 0 or not follows  # the ranks would have decided otherwise


# -- with caches -----------------------------------------------------------------------------------


def _job(rank: int, name: str, folder: Path, size: int, is_first: bool) -> dict[str, Any]:
    """Losses of a job whose store knows of no plan, and what its cache had.

    Args:
        name: of the job.
        folder: of this rank's cache.
        size: of this rank's batch.
        is_first: whether this rank decides before the other does.
    """
    store, plans = default_store(), []
    call = SharedPlans.__call__

    def agree(self: SharedPlans, plan: GraphPlan) -> GraphPlan:
        if not is_first:
            store.wait([f"{name}/{plan.phase}"], timedelta(seconds=60))
        agreed = call(self, plan)
        store.set(f"{name}/{plan.phase}", "")
        plans.append(launches_of(agreed) == launches_of(plan))
        return agreed

    with (
        using_cache(folder),
        mock.patch.object(compile_cache, "PREFIX", name),
        mock.patch.object(SharedPlans, "__call__", agree),
    ):
        run = make_compiled_products(_products(), link=LINK, device=SLOW)
        run(torch.ones(size, WIDTH)).square().mean().backward()
        gradients = [p.grad for p in run.parameters() if p.grad is not None]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {"own": plans, "hits": hits, "gradients": gradients}


def _eager_gradients(size: int) -> list[torch.Tensor]:
    model = FSDP(_products(), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    model(torch.ones(size, WIDTH)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@on_ranks(2)
def test_code_that_was_planned_otherwise_is_compiled_again(rank: int, tmp_path: Path) -> None:
    """Once; in the next job it is found in the cache beside the other.

    In the second job, rank 1 has code for a plan that rank 0, whose batch is new, leaves.
    """
    folder = tmp_path / str(rank)
    found = {
        name: _job(rank, name, folder, size, is_first=rank == 0)
        for name, size in (("first", (4, SIZE)[rank]), ("second", SIZE), ("third", SIZE))
    }
    hits, own = ([one[key] for one in found.values()] for key in ("hits", "own"))
    if rank == 0:
        assert hits == [0, 0, 1]
        assert all(map(all, own))
    else:
        assert hits == [0, 1, 2]
        # Of forward and backward: as decided, or as found; in the second job, then decided anew.
        assert own[0][:2] == [True, False]
        assert own[1] == [True, False, True, True]
        assert own[2] == [True, False]
    for name in ("second", "third"):
        torch.testing.assert_close(found[name]["gradients"], _eager_gradients(SIZE))
