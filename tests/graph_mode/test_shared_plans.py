"""Graph mode where batches differ in size between ranks: each would plan otherwise, and follows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compile_caches import WIDTH, Layer, make_compiled_products, using_cache
from loops import error_of
from models import VOCABULARY, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch._dynamo.utils import counters

from fsdp_dynamo import FSDP
from fsdp_dynamo.graph_mode import compile_cache
from fsdp_dynamo.graph_mode.compile_cache import SharedPlans
from fsdp_dynamo.health.store import default_store
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy
from graph_passes.scheduling.plan import GraphPlan
from graph_passes.scheduling.schedule import launches_of

LENGTHS = ((3, 48), (5, 8), (17, 5), (31, 48))
"""Of both ranks, step by step: ranks compile in different steps."""
LINK = {"latency_ms": 0.02, "bytes_per_ms": 2e6}
SLOW = {"flops_per_ms": 2e6, "bytes_per_ms": 2e6}
SIZE = 512
DEVICE = {"flops_per_ms": 2e7, "bytes_per_ms": 2e6}


def _losses(rank: int, mode: str) -> list[float]:
    model = wrap(make_transformer(num_blocks=4, dim=32))
    options = {"link": LINK, "device": DEVICE} if mode == "graph" else {}
    run = in_mode(model, mode, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, lengths in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(VOCABULARY, (2 + 2 * rank, lengths[rank]), generator=generator)
        loss = run(ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _train(rank: int, world_size: int, is_shared: bool) -> dict[str, Any]:
    """Losses beside eager mode's, and whether an own plan was given up."""
    call, given_up = SharedPlans.__call__, []

    def agree(self: SharedPlans, plan: GraphPlan) -> GraphPlan:
        agreed = call(self, plan) if is_shared else plan
        given_up.append(launches_of(agreed) != launches_of(plan))
        return agreed

    found: dict[str, Any] = {"eager": _losses(rank, "eager"), "graph": []}
    with mock.patch.object(SharedPlans, "__call__", agree):
        found["error"] = error_of(lambda: found["graph"].extend(_losses(rank, "graph")))
    return found | {"given up": any(given_up)}


def test_batches_of_other_lengths_on_each_rank(ranks: RankPool) -> None:
    found = ranks.run(_train, 2, True)
    for one in found:
        assert one["error"] == ""
        assert one["graph"] == pytest.approx(one["eager"], rel=1e-5)
    assert any(one["given up"] for one in found)


def _train_without_following(rank: int, world_size: int) -> dict[str, Any]:
    """As where the plan that others have made is of a graph that this one cannot follow."""

    def agree(self: SharedPlans, plan: GraphPlan) -> GraphPlan:
        return replace(plan, transfers=plan.transfers[1:])

    found: dict[str, Any] = {"eager": _losses(rank, "eager"), "graph": []}
    with mock.patch.object(SharedPlans, "__call__", agree):
        found["error"] = error_of(lambda: found["graph"].extend(_losses(rank, "graph")))
    return found


def test_ranks_whose_graphs_do_not_allow_the_plan_have_one_order(ranks: RankPool) -> None:
    for one in ranks.run(_train_without_following, 2):
        assert one["error"] == ""
        assert one["graph"] == pytest.approx(one["eager"], rel=1e-5)


def test_without_the_others_plan_ranks_diverge(ranks: RankPool) -> None:
    """The case above is one in which ranks decide otherwise."""
    for one in ranks.run(_train, 2, False):
        assert "DivergenceError: compiled graph, collective" in one["error"]


# -- with caches -----------------------------------------------------------------------------------


def _products(width: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(*(Layer(width, width, bias=False) for _ in range(4)))


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
        run = make_compiled_products(_products(WIDTH), link=LINK, device=SLOW)
        run(torch.ones(size, WIDTH)).square().mean().backward()
        gradients = [p.grad for p in run.parameters() if p.grad is not None]
        hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {"own": plans, "hits": hits, "gradients": gradients}


def _eager_gradients(size: int) -> list[torch.Tensor]:
    model = FSDP(_products(WIDTH), auto_wrap_policy=ModuleWrapPolicy({Layer}))
    model(torch.ones(size, WIDTH)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def _jobs(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """In the second one, rank 1 has code for a plan that rank 0, whose batch is new, leaves."""
    folder = Path(root) / str(rank)
    found = {
        name: _job(rank, name, folder, size, is_first=rank == 0)
        for name, size in (("first", (4, SIZE)[rank]), ("second", SIZE), ("third", SIZE))
    }
    return found | {"eager": _eager_gradients(SIZE)}


def test_code_that_was_planned_otherwise_is_compiled_again(ranks: RankPool, tmp_path: Path) -> None:
    """Once; in the next job it is found in the cache beside the other."""
    one, other = ranks.run(_jobs, 2, str(tmp_path))
    assert [one[name]["hits"] for name in ("first", "second", "third")] == [0, 0, 1]
    assert all(all(one[name]["own"]) for name in ("first", "second", "third"))
    assert [other[name]["hits"] for name in ("first", "second", "third")] == [0, 1, 2]
    # Of forward and backward: as decided, or as found; in the second job, then decided anew.
    assert other["first"]["own"][:2] == [True, False]
    assert other["second"]["own"] == [True, False, True, True]
    assert other["third"]["own"] == [True, False]
    for found in (one, other):
        for name in ("second", "third"):
            torch.testing.assert_close(found[name]["gradients"], found["eager"])
