"""Random models, arguments and user calls beside FSDP1 itself, and checkpoints that cross.

    pytest tests/wrap/test_beside_fsdp1.py             # 15 programs
    pytest -m slow tests/wrap/test_beside_fsdp1.py     # 200, a tenth each in hooks and graph mode
    pytest -m slow tests/wrap/test_beside_fsdp1.py --programs=1000 --first-program=5000

Programs have nothing in which the two are known to differ, which is in docs/migration.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from module_trees import WIDTH, Leaf, map_leaves
from pool import RankPool, on_ranks
from programs import Program, built, draw_beside_fsdp1, run_with_weights_off, sharded, shrink
from programs import wrong_on_any_rank as wrong
from torch import nn
from torch.distributed import fsdp as fsdp1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_dynamo

HYBRID = ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
COMPILED = {0: "hooks", 5: "graph"}
"""Modes by the last digit of a program's seed; the others run eagerly."""


def _check(ranks: RankPool, programs: Iterable[Program], world_size: int = 2) -> None:
    for program in programs:
        if found := wrong(ranks, program, world_size=world_size):
            fails: Callable[[Program], bool] = lambda one: bool(  # noqa: E731
                wrong(ranks, one, world_size=world_size)
            )
            pytest.fail(f"{shrink(program, fails, 60)}\n{found}")


def test_some_programs(ranks: RankPool) -> None:
    _check(ranks, map(draw_beside_fsdp1, range(15)))


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_many_programs(ranks: RankPool, request: pytest.FixtureRequest) -> None:
    first = request.config.getoption("--first-program")
    seeds = range(first, first + request.config.getoption("--programs"))
    _check(ranks, (draw_beside_fsdp1(seed, COMPILED.get(seed % 10, "eager")) for seed in seeds))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_hybrid_strategies(ranks: RankPool) -> None:
    _check(ranks, (draw_beside_fsdp1(seed, strategies=HYBRID) for seed in range(40)), 4)


def test_a_fault_is_seen(ranks: RankPool) -> None:
    """Weights that are off by a tenth of what may be."""
    assert wrong(ranks, draw_beside_fsdp1(0), run_with_weights_off)


# -- checkpoints ---------------------------------------------------------------------------------


def _of_dcp(package: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    wrapper, form = package.FullyShardedDataParallel, package.StateDictType.SHARDED_STATE_DICT
    with wrapper.state_dict_type(model, form):
        return {"model": model.state_dict(), "optim": wrapper.optim_state_dict(model, optimizer)}


def _load(package: Any, model: Any, optimizer: Any, folder: str) -> None:
    """Into other values and other states."""
    states = _of_dcp(package, model, optimizer)
    dcp.load(states, checkpoint_id=folder)
    wrapper, form = package.FullyShardedDataParallel, package.StateDictType.SHARDED_STATE_DICT
    with wrapper.state_dict_type(model, form):
        model.load_state_dict(states["model"])
        given = wrapper.optim_state_dict_to_load(model, optimizer, states["optim"])
    optimizer.load_state_dict(given)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        optimizer.step()


def _whole(package: Any, model: Any) -> list[torch.Tensor]:
    with package.FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return [param.detach().clone() for param in model.parameters()]


def _without_buffers(leaf: Leaf) -> Leaf:
    """Buffers differ between ranks."""
    return replace(leaf, kind="linear") if leaf.kind in ("batchnorm", "buffer") else leaf


@pytest.mark.parametrize(
    "seeds", [range(5), pytest.param(range(5, 60), marks=pytest.mark.slow)], ids=["few", "many"]
)
@on_ranks(2, timeout=1200)
def test_checkpoints_cross(rank: int, tmp_path: Path, seeds: range) -> None:
    """Sharded ones, through torch.distributed.checkpoint; FSDP1's values are DTensors."""
    for seed in seeds:
        program = replace(draw_beside_fsdp1(seed), precision="none", ignored=None)
        program = replace(program, tree=map_leaves(program.tree, _without_buffers))
        for packages in ((fsdp1, fsdp_dynamo), (fsdp_dynamo, fsdp1)):
            sides = []
            for package in packages:
                mesh = init_device_mesh("cpu", (2,))
                model = sharded(program, built(program), package, device_mesh=mesh)
                if not list(model.parameters()):
                    break
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
                _train(model, optimizer, (rank + 10 * len(sides), rank + 10 * len(sides) + 4))
                sides.append((package, model, optimizer))
            else:
                folder = str(tmp_path / f"{seed} of {packages[0].__name__}")
                states = _of_dcp(*sides[0])
                if program.strategy != "NO_SHARD":
                    assert all(isinstance(v, DTensor) for v in states["model"].values()), program
                dcp.save(states, checkpoint_id=folder)
                _load(*sides[1], folder)
                for then in ((), (rank + 30,)):
                    values = []
                    for package, model, optimizer in sides:
                        _train(model, optimizer, then)
                        values.append(_whole(package, model))
                    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-6, msg=repr(program))
