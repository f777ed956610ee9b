"""``HIERARCHICAL_SHARD``: between nodes, parameters once a step, gradients once a backward.

Nodes are pairs of ranks; what it computes is compared with ``FULL_SHARD`` on the same ranks.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import Block, Branching, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from fsdp_dynamo import (
    FSDP,
    CollectivePrecision,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
    record_events,
)
from fsdp_dynamo.comm import collective_log
from fsdp_dynamo.comm.process_groups import Groups
from fsdp_dynamo.wrap_policy import CustomPolicy

FULL, HIERARCHICAL = ShardingStrategy.FULL_SHARD, ShardingStrategy.HIERARCHICAL_SHARD
BLOCKS = 3
UNITS = BLOCKS + 1


def _pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Groups {0, 1} {2, 3} and {0, 2} {1, 3}: of this rank's node, and across nodes."""
    made = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = [group for ranks, group in made.items() if dist.get_rank() in ranks]
    return mine[0], mine[1]


def _sharded(strategy: ShardingStrategy = HIERARCHICAL, model: Any = None, **kwargs: Any) -> FSDP:
    """The model in units, on nodes of two ranks unless they are given."""
    if strategy is HIERARCHICAL and "process_group" not in kwargs:
        kwargs.setdefault("device_mesh", init_device_mesh("cpu", (dist.get_world_size() // 2, 2)))
    model = make_transformer(num_blocks=BLOCKS) if model is None else model
    return wrap(model, sharding_strategy=strategy, **kwargs)


def _groups(model: Any) -> Groups:
    groups: Groups = model._fsdp_unit.config.groups
    return groups


def _whole(model: Any) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def _differ(model: Any, other: Any) -> float:
    pairs = zip(_whole(model), _whole(other), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


# -- numbers ---------------------------------------------------------------------------------------


def _as_others(rank: int, world_size: int, mode: str, how: str) -> tuple[Any, ...]:
    named: dict[str, Any] = {"process_group": _pairs()} if how == "pair" else {}
    if how == "nodes":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        named = {"device_mesh": None}
    try:
        num_blocks = 1 if "inductor" in mode else BLOCKS  # which compiles for long
        expected = ddp_losses(rank, clip=0.5, num_blocks=num_blocks)
        model = make_transformer(num_blocks=num_blocks)
        if rank:
            nn.init.zeros_(model.embed.weight)  # rank 0's reach all
        model = _sharded(model=model, sync_module_states=True, **named)
        got = train(in_mode(model, mode), rank, clip=0.5)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    full, hybrid = (
        _sharded(strategy, make_transformer(num_blocks=num_blocks), **_mesh_for(strategy))
        for strategy in (FULL, ShardingStrategy.HYBRID_SHARD)
    )
    train(full, rank, clip=0.5)
    return expected, got, train(hybrid, rank, clip=0.5)[0], _differ(model, full)


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        ("eager", "pair"),
        ("eager", "nodes"),
        ("hooks", "mesh"),
        ("graph", "mesh"),
        pytest.param("graph-inductor", "mesh", marks=pytest.mark.slow),
    ],
)
def test_equals_the_others(ranks: RankPool, mode: str, how: str) -> None:
    """Losses and norms of DDP, parameters of FULL_SHARD; eagerly, the bits of HYBRID_SHARD."""
    results = ranks.run(_as_others, 4, mode, how)
    for (losses, norms), (got, got_norms), hybrid, difference in results:
        assert got == pytest.approx(losses, rel=1e-6)
        assert got_norms == pytest.approx(norms, rel=1e-6)
        assert difference < 1e-6
        if mode == "eager":
            assert got[:2] == hybrid[:2]  # before norms, which are sums in another order, matter


def _degenerate(rank: int, world_size: int, shape: tuple[int, int]) -> tuple[Any, ...]:
    model = _sharded(device_mesh=init_device_mesh("cpu", shape))
    full = _sharded(FULL)
    losses = train(model, rank)[0], train(full, rank)[0]
    return losses, _differ(model, full), _groups(model).hierarchy is None


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
def test_degenerate_meshes(ranks: RankPool, shape: tuple[int, int]) -> None:
    """The bits of FULL_SHARD; on one node, it is FULL_SHARD."""
    for (got, expected), difference, is_flat in ranks.run(_degenerate, 3, shape):
        assert got == expected
        assert difference == 0
        assert is_flat is (shape == (1, 3))


def _in_low_precision(rank: int, world_size: int) -> tuple[Any, ...]:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for strategy in (HIERARCHICAL, FULL):
        model = _sharded(strategy, mixed_precision=low, cpu_offload=CPUOffload(True))
        for block in model.blocks:
            block.norm1.requires_grad_(False)
        with model.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        loss = loss_of(model, batch(rank, 1))
        pieces = [flat.kept_shard for unit in model._fsdp_root.units for flat in unit.flats]
        dtypes = {piece.tensor.dtype for piece in pieces if piece is not None}
        loss.backward()
        results.append((loss.item(), float(model.clip_grad_norm_(1e9)), dtypes))
    return tuple(results)


def test_low_precision_accumulation_and_frozen_parts(ranks: RankPool) -> None:
    for (loss, norm, dtypes), (full_loss, full_norm, none) in ranks.run(_in_low_precision, 4):
        assert loss == full_loss
        assert norm == pytest.approx(full_norm, rel=1e-5)
        assert (dtypes, none) == ({torch.bfloat16}, set())


def _skipped(rank: int, world_size: int, mode: str) -> tuple[float, list[bool], set[str], set[str]]:
    """A block that one rank leaves out, and one that all do, whose gradients stay None.

    In a graph, reductions between nodes have a format, which must keep what is not there.
    """
    models = []
    for strategy in (HIERARCHICAL, FULL):
        torch.manual_seed(7)
        plain = Branching(num_blocks=BLOCKS)
        plain.skipped = frozenset({2} if rank else {1, 2})
        arguments: dict[str, Any] = _mesh_for(strategy)
        if strategy is HIERARCHICAL and mode == "graph":
            arguments["collective_precision"] = CollectivePrecision(reduce_scatter="int8")
        model = FSDP(plain, sharding_strategy=strategy, **arguments)
        run = in_mode(model, mode if strategy is HIERARCHICAL else "eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss_of(run, batch(rank, step)).backward()
            if step:
                optimizer.step()
                optimizer.zero_grad()
        loss_of(run, batch(rank, 3)).backward()
        models.append(model)
    with FSDP.summon_full_params(models[0], with_grads=True):
        has = [p.grad is not None for p in models[0].blocks.parameters()]
    hierarchy = _groups(models[0]).hierarchy
    assert hierarchy is not None
    across, node = ({use for _, use in _uses(g)} for g in (hierarchy.across, hierarchy.node))
    return _differ(*models), has, across, node


def _mesh_for(strategy: ShardingStrategy) -> dict[str, Any]:
    return {} if strategy is FULL else {"device_mesh": init_device_mesh("cpu", (2, 2))}


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_parameters_without_gradients(ranks: RankPool, mode: str) -> None:
    for difference, has, across, node in ranks.run(_skipped, 4, mode):
        assert difference < (1e-2 if mode == "graph" else 1e-6)
        assert across == {"forward", "backward, int8" if mode == "graph" else "backward"}
        assert node == {"forward", "backward"}
        each = len(has) // BLOCKS
        assert has == [True] * 2 * each + [False] * each


def _with_formats(rank: int, world_size: int) -> tuple[Any, Counter[Any], Counter[Any]]:
    formats = CollectivePrecision(all_gather="int8", reduce_scatter="bfloat16")
    model = _sharded(collective_precision=formats)
    losses, _ = train(model, rank)
    hierarchy = _groups(model).hierarchy
    assert hierarchy is not None
    gathered = torch.cat([param.flatten() for param in _whole(model)])
    everywhere = [torch.empty_like(gathered) for _ in range(world_size)]
    dist.all_gather(everywhere, gathered)
    assert all(torch.equal(one, gathered) for one in everywhere)
    expected, _ = ddp_losses(rank, num_blocks=BLOCKS)
    return (losses, expected), _uses(hierarchy.across), _uses(hierarchy.node)


def _uses(group: dist.ProcessGroup) -> Counter[Any]:
    entries = collective_log.recent(group, 1000)
    return Counter((one.kind, one.use) for one in entries if one.use != collective_log.FULL_PARAMS)


def test_formats_are_those_between_nodes(ranks: RankPool) -> None:
    for (losses, expected), across, node in ranks.run(_with_formats, 4):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert set(across) == {
            ("all_gather", "forward, int8"),
            ("reduce_scatter", "backward, bfloat16"),
        }
        assert all("," not in use for _, use in node)


# -- collectives -----------------------------------------------------------------------------------


class _Counts:
    """Collectives of the groups of a model since they were last asked for."""

    def __init__(self, model: Any) -> None:
        hierarchy = _groups(model).hierarchy
        assert hierarchy is not None
        self._groups = {
            "node": hierarchy.node,
            "across": hierarchy.across,
            "all": _groups(model).shard,
        }
        self._before = dict.fromkeys(self._groups, 0)
        self()

    def __call__(self) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for name, group in self._groups.items():
            number = collective_log.count(group)
            new = collective_log.recent(group, 1000)
            new = new[len(new) - (number - self._before[name]) :]
            found.update((name, one.kind) for one in new)
            self._before[name] = number
        return dict(found)


def _counts(rank: int, world_size: int, mode: str) -> list[Any]:
    """Of a step, of one that accumulates four backwards, and of an evaluation."""
    model = _sharded()
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(run, batch(rank, 0)).backward()
    optimizer.step()
    counts = _Counts(model)
    found: list[Any] = []
    loss_of(run, batch(rank, 1)).backward()
    found.append(counts())
    optimizer.step()
    with model.no_sync():
        for micro in range(3):
            loss_of(run, batch(rank, micro)).backward()
    found.append(counts())
    loss_of(run, batch(rank, 3)).backward()
    found.append(counts())
    optimizer.step()
    with torch.no_grad():
        run(batch(rank, 0))
    found.append(counts())
    left = [flat.kept_shard for unit in model._fsdp_root.units for flat in unit.flats]
    return [*found, left]


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_collectives_by_level(ranks: RankPool, mode: str) -> None:
    gathers, reduces = UNITS + BLOCKS, UNITS
    across_once = {("across", "all_gather"): UNITS}
    reduced = {("node", "reduce_scatter"): reduces, ("across", "reduce_scatter"): reduces}
    for step, first_three, fourth, evaluation, left in ranks.run(_counts, 4, mode):
        inside = {("node", "all_gather"): gathers}
        assert step == {**inside, **across_once, **reduced}
        assert first_three == {("node", "all_gather"): 3 * gathers, **across_once}
        assert fourth == {**inside, **reduced}
        assert evaluation == {("node", "all_gather"): UNITS, **across_once}
        assert left == [None] * UNITS


def _order(rank: int, world_size: int) -> tuple[list[Any], list[int]]:
    model = _sharded()
    loss_of(model, batch(rank, 0)).backward()
    with record_events() as log:
        loss_of(model, batch(rank, 1)).backward()
    return log.keys("all_gather", "reduce_scatter"), [
        event.num_bytes for event in log if event.kind == "reduce_scatter"
    ]


def test_order_of_collectives(ranks: RankPool) -> None:
    """Gathers between nodes come first; reductions between nodes after the next unit's backward."""
    blocks = [f"blocks.{i}" for i in range(BLOCKS)]
    for keys, num_bytes in ranks.run(_order, 4):
        forward = [key for key in keys if key[2] == "forward"]
        assert [unit for _, unit, _ in forward[:UNITS]] == ["", *blocks]
        assert [unit for _, unit, _ in forward[UNITS:]] == ["", *blocks]
        reduced = [unit for kind, unit, _ in keys if kind == "reduce_scatter"]
        assert Counter(reduced) == dict.fromkeys(["", *blocks], 2)
        assert reduced[:2] == ["blocks.2", "blocks.2"]
        assert num_bytes[0] == 2 * num_bytes[1]


# -- beside other strategies, and what is refused --------------------------------------------------


def _with_whole_units(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Blocks that are not sharded at all, and one that is sharded over all ranks at once."""
    plain = make_transformer(num_blocks=BLOCKS)
    plain.blocks[1] = FSDP(plain.blocks[1])
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    chosen = {plain.blocks[0]: whole, plain.blocks[2]: True}
    policy = CustomPolicy(lambda module: chosen.get(module, False))
    model = _sharded(model=plain, auto_wrap_policy=policy)
    strategies = [unit.config.sharding_strategy.name for unit in model._fsdp_root.units]
    assert sorted(strategies) == [
        "FULL_SHARD",
        "HIERARCHICAL_SHARD",
        "HIERARCHICAL_SHARD",
        "NO_SHARD",
    ]
    return train(model, rank)[0], ddp_losses(rank, num_blocks=BLOCKS)[0]


def test_beside_other_strategies(ranks: RankPool) -> None:
    for got, expected in ranks.run(_with_whole_units, 4):
        assert got == pytest.approx(expected, rel=1e-6)


def _some_ranks(rank: int, world_size: int) -> tuple[list[float], list[float], list[int]]:
    """Two models at a time, each on two nodes of one rank: a slice of a larger mesh."""
    names = ("nodes", "ranks", "others")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    model = _sharded(device_mesh=mesh["nodes", "ranks"])
    full = _sharded(FULL, device_mesh=mesh["nodes"])
    ranks = dist.get_process_group_ranks(_groups(model).shard)
    return train(model, rank)[0], train(full, rank)[0], ranks


def test_some_of_the_ranks(ranks: RankPool) -> None:
    for rank, (got, expected, members) in enumerate(ranks.run(_some_ranks, 4)):
        assert got == expected
        assert members == [rank % 2, rank % 2 + 2]


def _whole_updates(rank: int, world_size: int) -> tuple[bool, list[str]]:
    """Each parameter, brought to one rank and back."""
    model = _sharded()
    expected = dict(make_transformer(num_blocks=BLOCKS).named_parameters())
    seen: list[str] = []

    def doubled(fqn: str, whole: torch.Tensor) -> torch.Tensor:
        if not torch.equal(whole, expected[fqn]):
            seen.append(fqn)
        return 2 * whole

    parts = {fqn: param.detach() for fqn, param in model.named_parameters()}
    results = model.update_whole(parts, doubled)
    are_doubled = all(torch.equal(results[fqn], 2 * part) for fqn, part in parts.items())
    return are_doubled, seen


def _whole_dtensors(rank: int, world_size: int) -> bool:
    torch.manual_seed(3)
    plain = nn.Linear(5, 16)  # all ranks have rows of the weight
    composed = copy.deepcopy(plain)
    fully_shard(composed, mesh=init_device_mesh("cpu", (2, 2)), strategy=HIERARCHICAL)
    pairs: Any = [*zip(composed.parameters(), plain.parameters(), strict=True)]
    same = all(torch.equal(sharded.full_tensor(), whole) for sharded, whole in pairs)
    norms: Any = [sharded.norm().full_tensor() - whole.norm() for sharded, whole in pairs]
    odd: Any = fully_shard(
        nn.Linear(5, 6), mesh=init_device_mesh("cpu", (2, 2)), strategy=HIERARCHICAL
    )
    kinds = [param.placements for param in (composed.weight, odd.weight)]
    expected = [(Shard(0), Shard(0)), (Replicate(), Replicate())]
    return same and max(map(abs, norms)) < 1e-5 and kinds == expected


def test_whole_parameters(ranks: RankPool) -> None:
    for are_doubled, wrong in ranks.run(_whole_updates, 4):
        assert are_doubled
        assert wrong == []


def test_whole_dtensors(ranks: RankPool) -> None:
    assert all(ranks.run(_whole_dtensors, 4))


def _refused(rank: int, world_size: int) -> dict[str, str]:
    world = dist.group.WORLD
    across = dist.new_group([rank % 2, rank % 2 + 2], use_local_synchronization=True)
    alone = dist.new_group([rank], use_local_synchronization=True)
    mesh = init_device_mesh("cpu", (2, 2))
    model = _sharded()
    full = {"sharding_strategy": FULL}
    cases: dict[str, Callable[[], object]] = {
        "1-D mesh": lambda: _sharded(device_mesh=init_device_mesh("cpu", (4,))),
        "one group": lambda: _sharded(process_group=world),
        "overlap": lambda: _sharded(process_group=(world, across)),
        "sizes": lambda: _sharded(process_group=_uneven(rank)),
        "reduction group": lambda: _sharded(device_mesh=mesh, reduction_group=world),
        "no nodes": lambda: _sharded(device_mesh=None),
        "a unit": lambda: _sharded(
            auto_wrap_policy=CustomPolicy(lambda m: full if isinstance(m, Block) else False)
        ),
        "below": lambda: FSDP(
            make_transformer(num_blocks=1),
            auto_wrap_policy=CustomPolicy(lambda m: {"sharding_strategy": HIERARCHICAL}),
        ),
        "exposed": lambda: _sharded(
            device_mesh=mesh,
            collective_precision=CollectivePrecision("int8", only_where_exposed=True),
        ),
        "hook": lambda: model.register_comm_hook(None, lambda state, grad, out: None),
    }
    found = {name: error_of(case) for name, case in cases.items()}
    with pytest.warns(UserWarning, match="NO_SHARD in place of HIERARCHICAL_SHARD"):
        FSDP(nn.Linear(2, 2), sharding_strategy=HIERARCHICAL, process_group=(alone, _own(rank)))
    return found


def _own(rank: int) -> dist.ProcessGroup:
    return dist.new_group([rank], use_local_synchronization=True)


def _uneven(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Nodes {0, 1} {2, 3}, and between them {0, 3} {1, 2}: of other positions."""
    node = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    return node, dist.new_group(sorted([rank, 3 - rank]), use_local_synchronization=True)


ERRORS = {
    "1-D mesh": "expected a 2-D device mesh (nodes, ranks in a node) for HIERARCHICAL_SHARD",
    "one group": "expected a pair of process groups (in a node, across nodes)",
    "overlap": "that share this rank only",
    "sizes": "expected nodes of equally many ranks, at equal distances",
    "reduction group": "expected no reduction_group for HIERARCHICAL_SHARD",
    "no nodes": "HIERARCHICAL_SHARD without process_group and device_mesh",
    "a unit": "expected a strategy that goes with the root's HIERARCHICAL_SHARD",
    "below": "expected a strategy that goes with the root's FULL_SHARD",
    "exposed": "expected formats that are always used, with HIERARCHICAL_SHARD",
    "hook": "expected a strategy without replicas or a hierarchy",
}


def test_errors(ranks: RankPool) -> None:
    for found in ranks.run(_refused, 4):
        assert {name: text for name, text in found.items() if ERRORS[name] not in text} == {}
