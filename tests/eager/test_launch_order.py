"""Kernel slots that recorded programs need, so that communicators cannot block each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, loss_of, make_transformer, wrap
from modes import in_mode
from pool import RankPool
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.streams.deadlock import deadlock, most_ready
from benchmarks.streams.program import Launch, Program
from benchmarks.streams.recording import record_program
from fsdp_dynamo import ShardingStrategy
from fsdp_dynamo.comm.process_groups import part_of

STEPS = 2


def _on_mesh(strategy: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    return {"sharding_strategy": ShardingStrategy[strategy], "device_mesh": mesh}


def _reducing(mesh: Any = None) -> dict[str, Any]:
    ranks = range(4) if mesh is None else mesh.mesh[mesh.get_coordinate()[0]].tolist()
    return {"reduction_group": dist.new_group(list(ranks), use_local_synchronization=True)}


def _hybrid_reducing() -> dict[str, Any]:
    options = _on_mesh("HYBRID_SHARD")
    return options | _reducing(options["device_mesh"])


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "sharded": dict,
    "gathered again among few": dict,
    "reduction_group": _reducing,
    "hybrid": lambda: _on_mesh("HYBRID_SHARD"),
    "hybrid, gathered again among few": lambda: _on_mesh("HYBRID_SHARD"),
    "hybrid, reduction_group": _hybrid_reducing,
    "hierarchical": lambda: _on_mesh("HIERARCHICAL_SHARD"),
}
MOST_READY = {
    "sharded": 1,
    "gathered again among few": 2,
    "reduction_group": 2,
    "hybrid": 2,
    "hybrid, gathered again among few": 3,
    "hybrid, reduction_group": 3,
    "hierarchical": 2,
}
"""Communicators of a device that may have a kernel ready at once."""


def _recorded(rank: int, world_size: int, case: str, mode: str) -> tuple[Program, dict[str, Any]]:
    """The program of some steps, and the ranks of its communicators."""
    model = wrap(make_transformer(num_blocks=3), **CASES[case]())
    if case.endswith("gathered again among few"):
        for unit in model._fsdp_root.units:
            unit.settings.regathers_among = part_of(unit.config.groups.shard, 2)
    call = in_mode(model, mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(STEPS):
            with model.no_sync() if mode != "graph" and step == 0 else nullcontext():
                loss_of(call, batch(rank, step)).backward()
            if mode == "graph" or step:
                model.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()

    train()
    with record_program() as recorder:
        train()
    names = {one.group for one in recorder.program if isinstance(one, Launch) and one.group}
    groups = {g: dist.distributed_c10d._resolve_process_group(g.split()[1]) for g in names}
    return recorder.program, {g: dist.get_process_group_ranks(of) for g, of in groups.items()}


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        *(("eager", case) for case in MOST_READY),
        ("hooks", "hybrid"),
        ("graph", "reduction_group"),
        ("graph", "hybrid"),
        ("graph", "hierarchical"),
    ],
)
def test_kernels_that_a_device_has_to_run_at_once(ranks: RankPool, mode: str, case: str) -> None:
    """So many suffice for any number of ranks.

    One is too few, unless kernels start in the order of the host, which is that of all ranks.
    """
    programs, of_ranks = zip(*ranks.run(_recorded, 4, case, mode), strict=True)
    members = {name: ranks for each in of_ranks for name, ranks in each.items()}
    most = MOST_READY[case]
    assert [most_ready(one) for one in programs] == [most] * 4
    assert deadlock(programs, members, most) is None
    assert (deadlock(programs, members, 1) is None) == (most == 1)
    assert deadlock(programs, members, 1, in_host_order=True) is None
