"""Replicas of shards (2 x 2 ranks), and gradients in a process group of their own."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks
from shardings import pairs
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, ShardingStrategy, record_events
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.graph_mode import calibration, planning
from fsdp_dynamo.graph_mode.planning import record_plans
from fsdp_dynamo.wrap_policy import CustomPolicy
from graph_passes.cost_model import Device, Link

HYBRID = ShardingStrategy.HYBRID_SHARD
BLOCKS = 2


def _named_by(how: str) -> dict[str, Any]:
    if how == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2))}
    return {"process_group": pairs()} if how == "pair" else {}


@on_ranks(4)
def test_parameters_without_gradients(rank: int) -> None:
    """Of two blocks, all ranks leave out the second, in graph mode."""
    plain = Branching(num_blocks=2)
    plain.skipped = frozenset({1})
    model = FSDP(plain, sharding_strategy=HYBRID, **_named_by("mesh"))
    loss_of(in_mode(model, "graph"), batch(rank, 0)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        has = [param.grad is not None for param in model.blocks.parameters()]
    each = len(has) // 2
    assert has == [True] * each + [False] * each


@pytest.mark.parametrize(
    ("mode", "strategy", "how"),
    [
        ("eager", HYBRID, "pair"),
        ("eager", ShardingStrategy.HYBRID_SHARD_ZERO2, "mesh"),
        ("graph", HYBRID, "nodes"),
    ],
)
@on_ranks(4)
def test_equals_ddp(rank: int, mode: str, strategy: ShardingStrategy, how: str) -> None:
    """Losses and norms of 4 ranks; scatters inside a replica, a mean of the parts across."""
    losses, norms = ddp_losses(rank, clip=0.5, num_blocks=BLOCKS)
    model: Any = make_transformer(num_blocks=BLOCKS)
    if rank:  # rank 0's weights reach all
        torch.nn.init.zeros_(model.embed.weight)
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"} if how == "nodes" else {}):
        model = wrap(model, sharding_strategy=strategy, sync_module_states=True, **_named_by(how))
    # Rates given, not measured: what is decided from them does not depend on the machine.
    run = in_mode(model, mode, link=Link(latency_ms=0.5), device=Device())
    got, got_norms = train(run, rank, clip=0.5)
    assert got == pytest.approx(losses, rel=1e-6)
    assert got_norms == pytest.approx(norms, rel=1e-6)
    assert model.flat_parameter_of("embed.weight").layout.world_size == 2
    with record_events() as log:
        loss_of(run, batch(rank, 9)).backward()
    events = list(log)
    scattered = {e.unit: e.num_bytes for e in events if e.kind == "reduce_scatter"}
    averaged = {e.unit: e.num_bytes for e in events if e.kind == "all_reduce"}
    assert len(scattered) == BLOCKS + 1
    assert averaged == {unit: size // 2 for unit, size in scattered.items()}
    gathers = sum(e.kind == "all_gather" for e in events)
    assert gathers == BLOCKS + 1 + (BLOCKS if strategy is HYBRID else 0)
    # A unit's reductions end behind a later backward: neither is waited for where it begins.
    keys = [e.key for e in events]
    last = f"blocks.{BLOCKS - 1}"
    scatter = keys.index(("reduce_scatter", last, "backward"))
    across = keys.index(("all_reduce", last, "backward"))
    begins = keys.index(("backward", f"blocks.{BLOCKS - 2}", "backward"))
    assert scatter < begins < across
    assert events[across].waited_ns > events[begins].issued_ns


@pytest.mark.parametrize(
    ("mode", "shape", "strategy"),
    [("graph", (1, 2), "HYBRID_SHARD"), ("eager", (2, 1), "NO_SHARD")],
)
@on_ranks(2)
def test_degenerate_meshes(rank: int, mode: str, shape: tuple[int, int], strategy: str) -> None:
    expected, _ = ddp_losses(rank, num_blocks=1)
    mesh = init_device_mesh("cpu", shape)
    model = wrap(make_transformer(num_blocks=1), device_mesh=mesh, sharding_strategy=HYBRID)
    assert train(in_mode(model, mode), rank)[0] == pytest.approx(expected, rel=1e-6)
    assert model._fsdp_unit.config.sharding_strategy.name == strategy


@on_ranks(2)
def test_groups_made_here_inherit_the_timeout(rank: int) -> None:
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1"):
        model = wrap(make_transformer(num_blocks=1), sharding_strategy=HYBRID)
        again = FSDP(torch.nn.Linear(2, 2), sharding_strategy=HYBRID)
    groups = model._fsdp_unit.config.groups
    assert groups == again._fsdp_unit.config.groups  # made once
    options = [g._get_backend(torch.device("cpu")).options for g in groups.all]
    assert [option._timeout.total_seconds() for option in options] == [60.0, 60.0]  # of the pool


@on_ranks(4)
def test_whole_units_in_replicas(rank: int) -> None:
    """Blocks that are not sharded below a hybrid root: two means of the same gradient."""
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    policy = CustomPolicy(lambda m: whole if isinstance(m, Block) else False)
    model = wrap(
        make_transformer(num_blocks=2),
        sharding_strategy=HYBRID,
        auto_wrap_policy=policy,
        **_named_by("mesh"),
    )
    assert train(model, rank)[0] == pytest.approx(ddp_losses(rank, num_blocks=2)[0], rel=1e-6)


@on_ranks(4)
def test_replicas_decide_from_the_same_rates(rank: int) -> None:
    """Those that the first one has measured; by its own, each rank would decide otherwise."""

    def measured(group: dist.ProcessGroup, device: torch.device) -> Any:
        rate = 1e5 * (1 + rank)
        return {
            "link": {"latency_ms": 0.1 * (1 + group.rank()), "bytes_per_ms": rate},
            "device": {"flops_per_ms": rate, "bytes_per_ms": rate},
        }

    with mock.patch.object(calibration, "measured", measured), record_plans() as plans:
        model = wrap(make_transformer(num_blocks=1), sharding_strategy=HYBRID, **_named_by("pair"))
        train(in_mode(model, "graph"), rank, steps=1)
    state_of(dist.group.WORLD, planning.MeasuredRates).clear()
    assert plans
    used = [
        (p.plan.transfers, p.options.cost.device, sorted({t.ms for t in p.problem.transfers}))
        for p in plans
    ]
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, used)
    assert all(other == of_ranks[0] for other in of_ranks)


# -- a group for reductions ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_reductions_in_a_group_of_their_own(rank: int, mode: str) -> None:
    """The same to the last bit; the planner knows that the two groups share a link."""
    found = []
    for group in (None, dist.new_group([0, 1])):
        model = wrap(make_transformer(num_blocks=1), reduction_group=group)
        with record_plans() as plans:
            found.append((train(in_mode(model, mode), rank, steps=3)[0], [p.plan for p in plans]))
    assert found[0] == found[1]
    transfers = [t for planned in plans for t in planned.problem.transfers]
    counts = (len({t.group for t in transfers}), len({t.link for t in transfers}))
    assert counts == ((0, 0) if mode == "eager" else (2, 1))
