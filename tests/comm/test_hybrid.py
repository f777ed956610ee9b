"""Replicas of shards (2 x 2 ranks), and gradients in a process group of their own."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Branching, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from fsdp_dynamo import FSDP, Event, MixedPrecision, ShardingStrategy, record_events
from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.wrap_policy import CustomPolicy
from graph_passes.cost_model import Device, Link

HYBRID = ShardingStrategy.HYBRID_SHARD
BLOCKS = 3


def _replicas_of_shards() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The pair (shard, replicate) of this rank, of groups {0, 1} {2, 3} and {0, 2} {1, 3}."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return mine[0], mine[1]


def _named_by(how: str) -> dict[str, Any]:
    if how == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2))}
    return {"process_group": _replicas_of_shards()} if how == "pair" else {}


def _skipped(rank: int, world_size: int, mode: str) -> list[bool]:
    """Whether parameters have gradients, in two blocks of which all ranks leave out the second."""
    plain = Branching(num_blocks=2)
    plain.skipped = frozenset({1})
    model = FSDP(plain, sharding_strategy=HYBRID, **_named_by("mesh"))
    loss_of(in_mode(model, mode), batch(rank, 0)).backward()
    with FSDP.summon_full_params(model, with_grads=True):
        return [param.grad is not None for param in model.blocks.parameters()]


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_parameters_without_gradients(ranks: RankPool, mode: str) -> None:
    for has in ranks.run(_skipped, 4, mode):
        each = len(has) // 2
        assert has == [True] * each + [False] * each


def _as_ddp(
    rank: int, world_size: int, mode: str, strategy: ShardingStrategy, how: str
) -> tuple[Any, Any, list[Event], int]:
    if how == "nodes":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        expected = ddp_losses(rank, clip=0.5, num_blocks=BLOCKS)
        torch.manual_seed(rank)  # rank 0's weights reach all
        model = make_transformer(num_blocks=BLOCKS)
        if rank:
            torch.nn.init.zeros_(model.embed.weight)
        model = wrap(model, sharding_strategy=strategy, sync_module_states=True, **_named_by(how))
        # Rates given, not measured: what is decided from them does not depend on the machine.
        run = in_mode(model, mode, link=Link(latency_ms=0.5), device=Device())
        got = train(run, rank, clip=0.5)
        with record_events() as log:
            loss_of(run, batch(rank, 9)).backward()
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return expected, got, list(log), model.flat_parameter_of("embed.weight").layout.world_size


@pytest.mark.parametrize(
    ("mode", "strategy", "how"),
    [
        ("eager", HYBRID, "pair"),
        ("eager", ShardingStrategy.HYBRID_SHARD_ZERO2, "mesh"),
        ("hooks", HYBRID, "mesh"),
        ("graph", HYBRID, "nodes"),
        pytest.param("graph", ShardingStrategy._HYBRID_SHARD_ZERO2, "pair", marks=pytest.mark.slow),
    ],
)
def test_equals_ddp(ranks: RankPool, mode: str, strategy: ShardingStrategy, how: str) -> None:
    """Losses and norms of 4 ranks; scatters inside a replica, a mean of the parts across."""
    for (losses, norms), (got, got_norms), events, shards in ranks.run(
        _as_ddp, 4, mode, strategy, how
    ):
        assert got == pytest.approx(losses, rel=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-6)
        assert shards == 2
        scattered = {e.unit: e.num_bytes for e in events if e.kind == "reduce_scatter"}
        averaged = {e.unit: e.num_bytes for e in events if e.kind == "all_reduce"}
        assert len(scattered) == BLOCKS + 1
        assert averaged == {unit: size // shards for unit, size in scattered.items()}
        gathers = sum(e.kind == "all_gather" for e in events)
        assert gathers == BLOCKS + 1 + (BLOCKS if strategy is HYBRID else 0)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_the_mean_across_overlaps(ranks: RankPool, mode: str) -> None:
    """A unit's reductions end behind a later backward: neither is waited for where it begins."""
    for _, _, events, _ in ranks.run(_as_ddp, 4, mode, HYBRID, "pair"):
        keys = [e.key for e in events]
        last = f"blocks.{BLOCKS - 1}"
        scatter = keys.index(("reduce_scatter", last, "backward"))
        across = keys.index(("all_reduce", last, "backward"))
        begins = keys.index(("backward", f"blocks.{BLOCKS - 2}", "backward"))
        assert scatter < begins < across
        assert events[across].waited_ns > events[begins].issued_ns


def _one_replica_or_one_shard(rank: int, world_size: int, shape: tuple[int, int]) -> Any:
    expected, _ = ddp_losses(rank, num_blocks=1)
    mesh = init_device_mesh("cpu", shape)
    model = wrap(make_transformer(num_blocks=1), device_mesh=mesh, sharding_strategy=HYBRID)
    got, _ = train(in_mode(model, "graph"), rank)
    return expected, got, model._fsdp_unit.config.sharding_strategy.name


@pytest.mark.parametrize(("shape", "strategy"), [((1, 2), "HYBRID_SHARD"), ((2, 1), "NO_SHARD")])
def test_degenerate_meshes(ranks: RankPool, shape: tuple[int, int], strategy: str) -> None:
    for expected, got, name in ranks.run(_one_replica_or_one_shard, 2, shape):
        assert got == pytest.approx(expected, rel=1e-6)
        assert name == strategy


def _low_precision_and_accumulation(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Two backwards before an update; bf16 forward, reductions in fp32; against FULL_SHARD."""
    results = []
    for strategy, named in ((HYBRID, _named_by("pair")), (ShardingStrategy.FULL_SHARD, {})):
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = wrap(
            make_transformer(num_blocks=1),
            sharding_strategy=strategy,
            mixed_precision=precision,
            **named,
        )
        with model.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        loss_of(model, batch(rank, 1)).backward()
        results.append(float(model.clip_grad_norm_(1e9)))
    return results[0], results[1]


def test_low_precision_and_accumulation(ranks: RankPool) -> None:
    for hybrid, full in ranks.run(_low_precision_and_accumulation, 4):
        assert hybrid == pytest.approx(full, rel=1e-5)


def _inherited_timeout(rank: int, world_size: int) -> list[float]:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        model = wrap(make_transformer(num_blocks=1), sharding_strategy=HYBRID)
        again = FSDP(torch.nn.Linear(2, 2), sharding_strategy=HYBRID)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    assert model._fsdp_unit.config.groups == again._fsdp_unit.config.groups  # made once
    device = torch.device("cpu")
    options = [g._get_backend(device).options for g in model._fsdp_unit.config.groups.all]
    return [option._timeout / timedelta(seconds=1) for option in options]


def test_groups_made_here_inherit_the_timeout(ranks: RankPool) -> None:
    for seconds in ranks.run(_inherited_timeout, 2):
        assert seconds == [60.0, 60.0]  # as the pool says


def _whole_units_in_replicas(rank: int, world_size: int, mode: str) -> tuple[Any, Any]:
    """Blocks that are not sharded below a hybrid root: two means of the same gradient."""
    expected = ddp_losses(rank, num_blocks=2)
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    policy = CustomPolicy(lambda m: whole if isinstance(m, Block) else False)
    model = wrap(
        make_transformer(num_blocks=2),
        sharding_strategy=HYBRID,
        auto_wrap_policy=policy,
        **_named_by("mesh"),
    )
    return expected, train(in_mode(model, mode), rank)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_whole_units_in_replicas(ranks: RankPool, mode: str) -> None:
    for (losses, _), (got, _) in ranks.run(_whole_units_in_replicas, 4, mode):
        assert got == pytest.approx(losses, rel=1e-6)


def _planned_rates(rank: int, world_size: int) -> list[Any]:
    """The rates that each rank plans with, where the groups have measured different ones."""
    from fsdp_dynamo.graph_mode import calibration, planning
    from fsdp_dynamo.graph_mode.planning import record_plans

    def measured(group: dist.ProcessGroup, device: torch.device) -> Any:
        rate = 1e5 * (1 + rank)
        return {
            "link": {"latency_ms": 0.1 * (1 + group.rank()), "bytes_per_ms": rate},
            "device": {"flops_per_ms": rate, "bytes_per_ms": rate},
        }

    original, calibration.measured = calibration.measured, measured
    try:
        model = wrap(make_transformer(num_blocks=2), sharding_strategy=HYBRID, **_named_by("pair"))
        with record_plans() as plans:
            train(in_mode(model, "graph"), rank, steps=1)
    finally:
        calibration.measured = original
        state_of(dist.group.WORLD, planning.MeasuredRates).clear()
    return [planned.plan.transfers for planned in plans] + [
        (planned.options.cost.device, sorted({t.ms for t in planned.problem.transfers}))
        for planned in plans
    ]


def test_replicas_decide_from_the_same_rates(ranks: RankPool) -> None:
    """Each rank would decide otherwise; the first one's rates are everybody's."""
    first, *others = ranks.run(_planned_rates, 4)
    assert first
    assert all(other == first for other in others)


# -- a group for reductions ------------------------------------------------------------------------


def _with_own_group(rank: int, world_size: int, mode: str) -> tuple[Any, Any, set[int], int]:
    from fsdp_dynamo.graph_mode.planning import record_plans

    def run(group: dist.ProcessGroup | None) -> tuple[Any, Any]:
        model = wrap(make_transformer(num_blocks=2), reduction_group=group)
        with record_plans() as plans:
            losses, _ = train(in_mode(model, mode), rank, steps=3)
        return losses, plans

    own = dist.new_group(list(range(world_size)))
    shared_losses, shared = run(None)
    losses, plans = run(own)
    transfers = [t for planned in plans for t in planned.problem.transfers]
    orders = [[p.plan for p in log] for log in (shared, plans)]
    return (
        shared_losses,
        losses,
        {len({t.group for t in transfers}), len({t.link for t in transfers})},
        orders[0] == orders[1],
    )


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_reductions_in_a_group_of_their_own(ranks: RankPool, mode: str) -> None:
    """The same to the last bit; the planner knows that the two groups share a link."""
    for shared, own, counts, same_plan in ranks.run(_with_own_group, 2, mode):
        assert own == shared
        assert same_plan
        assert counts == ({0} if mode == "eager" else {1, 2})
