"""``HIERARCHICAL_SHARD``: between nodes, parameters once a step, gradients once a backward.

Nodes are pairs of ranks; what it computes is compared with ``FULL_SHARD`` on the same ranks.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from loops import error_of
from models import Block, Branching, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks
from shardings import pairs
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2))


def _sharded(strategy: ShardingStrategy = HIERARCHICAL, model: Any = None, **kwargs: Any) -> FSDP:
    """The model in units, on nodes of two ranks unless they are given."""
    if strategy is HIERARCHICAL and "process_group" not in kwargs:
        kwargs.setdefault("device_mesh", _mesh())
    model = make_transformer(num_blocks=BLOCKS) if model is None else model
    return wrap(model, sharding_strategy=strategy, **kwargs)


def _groups(model: Any) -> Groups:
    groups: Groups = model._fsdp_unit.config.groups
    return groups


def _whole(model: Any) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


def _difference(model: Any, other: Any) -> float:
    pairs = zip(_whole(model), _whole(other), strict=True)
    return max((one - two).abs().max().item() for one, two in pairs)


def _kept(model: Any) -> list[Any]:
    return [flat.kept_shard for unit in model._fsdp_root.units for flat in unit.flats]


def _uses(model: Any, level: str) -> set[str]:
    """What units' collectives between nodes ("across"), or in this one ("node"), were for."""
    entries = collective_log.recent(getattr(_groups(model).hierarchy, level), 1000)
    return {one.use for one in entries if one.use.startswith(("forward", "backward"))}


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "how"), [("eager", "pair"), ("eager", "nodes"), ("graph", "mesh")]
)
@on_ranks(4)
def test_equals_the_others(rank: int, mode: str, how: str) -> None:
    """Losses and norms of DDP, parameters of FULL_SHARD; eagerly, the bits of HYBRID_SHARD."""
    named: dict[str, Any] = {"process_group": pairs()} if how == "pair" else {}
    if how == "nodes":
        named = {"device_mesh": None}
    num_blocks = 1 if mode == "graph" else BLOCKS  # which compiles for long
    expected, norms = ddp_losses(rank, clip=0.5, num_blocks=num_blocks)
    model: Any = make_transformer(num_blocks=num_blocks)
    if rank:
        nn.init.zeros_(model.embed.weight)  # rank 0's reach all
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"} if how == "nodes" else {}):
        model = _sharded(model=model, sync_module_states=True, **named)
    got, got_norms = train(in_mode(model, mode), rank, clip=0.5)
    assert got == pytest.approx(expected, rel=1e-6)
    assert got_norms == pytest.approx(norms, rel=1e-6)
    full = _sharded(FULL, make_transformer(num_blocks=num_blocks))
    train(full, rank, clip=0.5)
    assert _difference(model, full) < 1e-6
    if how == "pair":
        hybrid = _sharded(ShardingStrategy.HYBRID_SHARD, device_mesh=_mesh())
        losses, _ = train(hybrid, rank, steps=2, clip=0.5)
        assert got[:2] == losses  # before norms, which are sums in another order, matter


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)])
@on_ranks(3)
def test_degenerate_meshes(rank: int, shape: tuple[int, int]) -> None:
    """The bits of FULL_SHARD; on one node, it is FULL_SHARD."""
    model = _sharded(device_mesh=init_device_mesh("cpu", shape))
    full = _sharded(FULL)
    assert train(model, rank, steps=3) == train(full, rank, steps=3)
    assert _difference(model, full) == 0
    assert (_groups(model).hierarchy is None) is (shape == (1, 3))


@on_ranks(4)
def test_low_precision_accumulation_and_frozen_parts(rank: int) -> None:
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for strategy in (HIERARCHICAL, FULL):
        model = _sharded(strategy, mixed_precision=low, cpu_offload=CPUOffload(True))
        for block in model.blocks:
            block.norm1.requires_grad_(False)
        with model.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        loss = loss_of(model, batch(rank, 1))
        dtypes = {piece.tensor.dtype for piece in _kept(model) if piece is not None}
        assert dtypes == ({torch.bfloat16} if strategy is HIERARCHICAL else set())
        loss.backward()
        found.append((loss.item(), float(model.clip_grad_norm_(1e9))))
    (loss_here, norm), (full_loss, full_norm) = found
    assert loss_here == full_loss
    assert norm == pytest.approx(full_norm, rel=1e-5)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(4)
def test_parameters_without_gradients(rank: int, mode: str) -> None:
    """A block that one rank leaves out, and one that all do, whose gradients stay None.

    In a graph, reductions between nodes have a format, which must keep what is not there.
    """
    models = []
    for strategy in (HIERARCHICAL, FULL):
        torch.manual_seed(7)
        plain = Branching(num_blocks=2)
        plain.skipped = frozenset({1} if rank else {0, 1})
        arguments: dict[str, Any] = {"device_mesh": _mesh()} if strategy is HIERARCHICAL else {}
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
    assert _difference(*models) < (1e-2 if mode == "graph" else 1e-6)
    with FSDP.summon_full_params(models[0], with_grads=True):
        has = [p.grad is not None for p in models[0].blocks.parameters()]
    each = len(has) // 2
    assert has == [True] * each + [False] * each
    reduction = "backward, int8" if mode == "graph" else "backward"
    assert _uses(models[0], "across") == {"forward", reduction}
    assert _uses(models[0], "node") == {"forward", "backward"}


@on_ranks(4)
def test_formats_are_those_between_nodes(rank: int) -> None:
    formats = CollectivePrecision(all_gather="int8", reduce_scatter="bfloat16")
    model = _sharded(collective_precision=formats)
    losses, _ = train(model, rank)
    gathered = torch.cat([param.flatten() for param in _whole(model)])
    everywhere = [torch.empty_like(gathered) for _ in range(4)]
    dist.all_gather(everywhere, gathered)
    assert all(torch.equal(one, gathered) for one in everywhere)
    assert losses == pytest.approx(ddp_losses(rank, num_blocks=BLOCKS)[0], rel=2e-2)
    assert _uses(model, "across") == {"forward, int8", "backward, bfloat16"}
    assert _uses(model, "node") == {"forward", "backward"}


# -- collectives -----------------------------------------------------------------------------------


class _Counts:
    """Gathers and reductions of the groups of a model since they were last asked for."""

    def __init__(self, model: Any) -> None:
        hierarchy = _groups(model).hierarchy
        assert hierarchy is not None
        whole = _groups(model).shard
        self._groups = {"node": hierarchy.node, "across": hierarchy.across, "all": whole}
        self._before = dict.fromkeys(self._groups, 0)
        self()

    def __call__(self) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for name, group in self._groups.items():
            number = collective_log.count(group)
            new = collective_log.recent(group, 1000)
            new = new[len(new) - (number - self._before[name]) :]
            found.update((name, one.kind) for one in new if one.kind != "all_reduce")
            self._before[name] = number
        return dict(found)


@pytest.mark.parametrize(("mode", "blocks"), [("eager", BLOCKS), ("graph", 1)])
@on_ranks(4)
def test_collectives_by_level(rank: int, mode: str, blocks: int) -> None:
    """Of a step, of one that accumulates four backwards, and of an evaluation."""
    units = blocks + 1
    inside = {("node", "all_gather"): units + blocks}
    across_once = {("across", "all_gather"): units}
    reduced = {("node", "reduce_scatter"): units, ("across", "reduce_scatter"): units}
    model = _sharded(model=make_transformer(num_blocks=blocks))
    run = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(run, batch(rank, 0)).backward()
    optimizer.step()
    counts = _Counts(model)
    loss_of(run, batch(rank, 1)).backward()
    assert counts() == {**inside, **across_once, **reduced}
    optimizer.step()
    with model.no_sync():
        for micro in range(3):
            loss_of(run, batch(rank, micro)).backward()
    assert counts() == {("node", "all_gather"): 3 * (units + blocks), **across_once}
    loss_of(run, batch(rank, 3)).backward()
    assert counts() == {**inside, **reduced}
    optimizer.step()
    with torch.no_grad():
        run(batch(rank, 0))
    assert counts() == {("node", "all_gather"): units, **across_once}
    assert _kept(model) == [None] * units


@on_ranks(4)
def test_order_of_collectives(rank: int) -> None:
    """Gathers between nodes come first; reductions between nodes after the next unit's backward."""
    model = _sharded()
    loss_of(model, batch(rank, 0)).backward()
    with record_events() as log:
        loss_of(model, batch(rank, 1)).backward()
    units = ["", *(f"blocks.{i}" for i in range(BLOCKS))]
    gathers = [e.unit for e in log if (e.kind, e.phase) == ("all_gather", "forward")]
    assert gathers == units * 2
    reduced = [e for e in log if e.kind == "reduce_scatter"]
    assert Counter(e.unit for e in reduced) == dict.fromkeys(units, 2)
    assert [e.unit for e in reduced[:2]] == ["blocks.2", "blocks.2"]
    assert reduced[0].num_bytes == 2 * reduced[1].num_bytes


# -- beside other strategies, and what is refused --------------------------------------------------


@on_ranks(4)
def test_beside_other_strategies(rank: int) -> None:
    """Blocks that are not sharded at all, and one that is sharded over all ranks at once."""
    plain = make_transformer(num_blocks=BLOCKS)
    plain.blocks[1] = FSDP(plain.blocks[1])
    whole = {"sharding_strategy": ShardingStrategy.NO_SHARD}
    chosen = {plain.blocks[0]: whole, plain.blocks[2]: True}
    policy = CustomPolicy(lambda module: chosen.get(module, False))
    model = _sharded(model=plain, auto_wrap_policy=policy)
    strategies = Counter(unit.config.sharding_strategy.name for unit in model._fsdp_root.units)
    assert strategies == {"FULL_SHARD": 1, "HIERARCHICAL_SHARD": 2, "NO_SHARD": 1}
    expected, _ = ddp_losses(rank, num_blocks=BLOCKS)
    assert train(model, rank)[0] == pytest.approx(expected, rel=1e-6)


@on_ranks(4)
def test_some_of_the_ranks(rank: int) -> None:
    """Two models at a time, each on two nodes of one rank: a slice of a larger mesh."""
    names = ("nodes", "ranks", "others")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
    model = _sharded(device_mesh=mesh["nodes", "ranks"])
    full = _sharded(FULL, device_mesh=mesh["nodes"])
    members = dist.get_process_group_ranks(_groups(model).shard)
    assert members == [rank % 2, rank % 2 + 2]
    assert train(model, rank, steps=3) == train(full, rank, steps=3)


@on_ranks(4)
def test_whole_parameters(rank: int) -> None:
    """Each parameter, brought to one rank and back; and as a DTensor."""
    model = _sharded()
    expected = dict(make_transformer(num_blocks=BLOCKS).named_parameters())

    def doubled(fqn: str, whole: torch.Tensor) -> torch.Tensor:
        assert torch.equal(whole, expected[fqn])
        return 2 * whole

    parts = {fqn: param.detach() for fqn, param in model.named_parameters()}
    results = model.update_whole(parts, doubled)
    assert all(torch.equal(results[fqn], 2 * part) for fqn, part in parts.items())
    torch.manual_seed(3)
    plain = nn.Linear(5, 16)  # all ranks have rows of the weight
    composed: Any = fully_shard(copy.deepcopy(plain), mesh=_mesh(), strategy=HIERARCHICAL)
    for sharded, whole in zip(composed.parameters(), plain.parameters(), strict=True):
        assert torch.equal(sharded.full_tensor(), whole)
        torch.testing.assert_close(sharded.norm().full_tensor(), whole.norm())
    odd: Any = fully_shard(nn.Linear(5, 6), mesh=_mesh(), strategy=HIERARCHICAL)
    assert composed.weight.placements == (Shard(0), Shard(0))
    assert odd.weight.placements == (Replicate(), Replicate())


def _apart(*ranks: int) -> dist.ProcessGroup:
    return dist.new_group(list(ranks), use_local_synchronization=True)


@on_ranks(4)
def test_errors(rank: int) -> None:
    world, across = dist.group.WORLD, _apart(rank % 2, rank % 2 + 2)
    node = _apart(rank // 2 * 2, rank // 2 * 2 + 1)
    other_positions = _apart(*sorted([rank, 3 - rank]))
    alone = (_apart(rank), _apart(rank))
    full = {"sharding_strategy": FULL}
    below = CustomPolicy(lambda m: {"sharding_strategy": HIERARCHICAL})
    exposed = CollectivePrecision("int8", only_where_exposed=True)
    cases: dict[str, Callable[[], object]] = {
        "a 2-D device mesh (nodes, ranks in a node)": lambda: _sharded(
            device_mesh=init_device_mesh("cpu", (4,))
        ),
        "a pair of process groups (in a node, across nodes)": lambda: _sharded(process_group=world),
        "that share this rank only": lambda: _sharded(process_group=(world, across)),
        "nodes of equally many ranks, at equal distances": lambda: _sharded(
            process_group=(node, other_positions)
        ),
        "no reduction_group": lambda: _sharded(device_mesh=_mesh(), reduction_group=world),
        "without process_group and device_mesh": lambda: _sharded(device_mesh=None),
        "goes with the root's HIERARCHICAL_SHARD": lambda: _sharded(
            auto_wrap_policy=CustomPolicy(lambda m: full if isinstance(m, Block) else False)
        ),
        "goes with the root's FULL_SHARD": lambda: FSDP(
            make_transformer(num_blocks=1), auto_wrap_policy=below
        ),
        "formats that are always used": lambda: _sharded(collective_precision=exposed),
        "without replicas or a hierarchy": lambda: _sharded().register_comm_hook(
            None, lambda state, grad, out: None
        ),
    }
    for text, case in cases.items():
        assert text in error_of(case)
    with pytest.warns(UserWarning, match="NO_SHARD in place of HIERARCHICAL_SHARD"):
        FSDP(nn.Linear(2, 2), sharding_strategy=HIERARCHICAL, process_group=alone)
