"""State dicts of parts: what is in the files, and who can load them."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Block, batch, loss_of, make_transformer, wrap
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves

from fsdp_dynamo import (
    FSDP,
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    fully_shard,
    record_events,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

SHARDED = StateDictType.SHARDED_STATE_DICT


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


# -- checkpoints -----------------------------------------------------------------------------------


class _Odd(nn.Module):
    """Shapes that no number of ranks divides: 0 to 3 dimensions, and no element at all."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate([(), (1,), (7,), (3, 5), (5, 3, 2), (0, 4)]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.p0 + self.p3.sum()


def _model() -> nn.Module:
    torch.manual_seed(11)
    model = make_transformer(num_blocks=2, tied=True)
    model.odd = _Odd()
    return model


def _moved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in state.items()}


def _sharded(how: str) -> nn.Module:
    """The same model in units of other sizes, by other modes and strategies."""
    if how == "one unit":
        return FSDP(_model())
    if how == "composable":
        return fully_shard(_model(), policy=ModuleWrapPolicy({Block, _Odd}))
    if how == "not sharded":
        return wrap(_model(), sharding_strategy=ShardingStrategy.NO_SHARD)
    if how == "replicas":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        strategy = ShardingStrategy.HYBRID_SHARD
        return wrap(_model(), sharding_strategy=strategy, device_mesh=mesh)
    if how == "hierarchy":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        strategy = ShardingStrategy.HIERARCHICAL_SHARD
        return FSDP(_model(), sharding_strategy=strategy, device_mesh=mesh)
    if how == "composable hierarchy":
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        strategy = ShardingStrategy.HIERARCHICAL_SHARD
        return fully_shard(_model(), mesh=mesh, strategy=strategy)
    if how == "compiled":
        return torch.compile(wrap(_model()), backend="aot_eager")
    return wrap(_model())


def _save(rank: int, world_size: int, how: str, folder: str) -> tuple[list[str], int]:
    """Write a checkpoint of moved values; returns the keys, and collectives that it took."""
    model = _sharded(how)
    model.load_state_dict(_moved(_model().state_dict()))
    with FSDP.state_dict_type(model, SHARDED), record_events() as log:
        state = model.state_dict()
        dcp.save(state, checkpoint_id=folder)
    return list(state), len(log.keys("all_gather", "unshard"))


def _load(rank: int, world_size: int, how: str, folder: str) -> list[str]:
    """Keys whose values are not those that were saved."""
    model = _sharded(how)
    with FSDP.state_dict_type(model, SHARDED):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    expected = _moved(_model().state_dict())
    found = model.state_dict()
    return [n for n, value in expected.items() if not torch.equal(_plain(found[n]), value)]


def _in_one_process(folder: str) -> list[str]:
    plain = _model()
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    expected = _moved(_model().state_dict())
    return [name for name, value in expected.items() if not torch.equal(state[name], value)]


@pytest.mark.parametrize(
    ("saved_by", "ranks_saving", "loaders"),
    [
        ("blocks", 4, [("blocks", 3), ("one unit", 2), ("composable", 1), ("replicas", 4)]),
        ("one unit", 3, [("blocks", 4), ("not sharded", 2)]),
        ("replicas", 4, [("compiled", 2), ("hierarchy", 4)]),
        ("hierarchy", 4, [("blocks", 3), ("composable hierarchy", 4)]),
        ("composable hierarchy", 4, [("one unit", 4)]),
        ("composable", 2, [("blocks", 2)]),
        ("not sharded", 2, [("composable", 3)]),
        ("compiled", 2, []),
    ],
)
def test_another_sharding_loads_it(
    ranks: RankPool,
    tmp_path: Path,
    saved_by: str,
    ranks_saving: int,
    loaders: list[tuple[str, int]],
) -> None:
    folder = str(tmp_path / "checkpoint")
    for keys, gathered in ranks.run(_save, ranks_saving, saved_by, folder):
        assert keys == list(_model().state_dict())
        assert gathered == 0
    for how, world_size in loaders:
        assert ranks.run(_load, world_size, how, folder) == [[]] * world_size
    assert _in_one_process(folder) == []


def _chunks(folder: Path) -> dict[str, list[int]]:
    """The sizes of all chunks of each tensor in a checkpoint."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    return {
        name: [math.prod(chunk.sizes) for chunk in info.chunks]
        for name, info in metadata.state_dict_metadata.items()
    }


def test_no_padding_in_the_files(ranks: RankPool, tmp_path: Path) -> None:
    """Every element once: as many bytes as the model has, and what a file adds to a chunk."""
    ranks.run(_save, 4, "blocks", str(tmp_path))
    chunks = _chunks(tmp_path)
    numels = {name: value.numel() for name, value in _model().state_dict().items()}
    assert {name: sum(sizes) for name, sizes in chunks.items()} == numels
    assert 1 < max(len(sizes) for sizes in chunks.values()) <= 4  # a rank's rows are one chunk


def _upstream(rank: int, world_size: int, folder: str) -> list[str]:
    """FSDP2 loads ours, and ours loads FSDP2's."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard as fsdp2

    mesh = init_device_mesh("cpu", (world_size,))
    theirs = make_transformer(num_blocks=2)
    for block in theirs.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(theirs, mesh=mesh)
    ours = wrap(make_transformer(num_blocks=2))
    expected = _moved(make_transformer(num_blocks=2).state_dict())
    ours.load_state_dict(expected)
    with FSDP.state_dict_type(ours, SHARDED):
        dcp.save(ours.state_dict(), checkpoint_id=f"{folder}/ours")
    state = get_model_state_dict(theirs)
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    set_model_state_dict(theirs, state)
    whole = {name: value.full_tensor() for name, value in theirs.state_dict().items()}
    wrong = [f"theirs {k}" for k, v in expected.items() if not torch.equal(whole[k], v)]
    with torch.no_grad():
        for param in theirs.parameters():
            param.to_local().add_(1.0)
    dcp.save(get_model_state_dict(theirs), checkpoint_id=f"{folder}/theirs")
    with FSDP.state_dict_type(ours, SHARDED):
        state = ours.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/theirs")
        ours.load_state_dict(state)
    found = ours.state_dict()
    expected = _moved(expected)
    return wrong + [f"ours {k}" for k, v in expected.items() if not torch.equal(found[k], v)]


def test_fsdp2_reads_ours_and_ours_reads_its(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_upstream, 2, str(tmp_path)) == [[], []]


# -- what no unit holds ----------------------------------------------------------------------------


def _partly_ignored(how: str) -> nn.Module:
    """Two modules (one has a buffer) and a single parameter are left alone."""
    model = _model()
    arguments: dict[str, Any] = {"ignored_modules": [model.odd, model.blocks[0].up]}
    if how == "wrapper":
        return wrap(model, **arguments, ignored_states=[model.scale])
    arguments["ignored_params"] = [model.scale]
    return fully_shard(model, policy=ModuleWrapPolicy({Block}), **arguments)


def _is_ignored(name: str) -> bool:
    return name == "scale" or name.startswith(("odd.", "blocks.0.up."))


def _with_ignored(rank: int, world_size: int, how: str, folder: str) -> dict[str, bool]:
    expected = _moved(_model().state_dict())
    model, fresh = _partly_ignored(how), _partly_ignored(how)
    held = {f"{u.fqn}.{o.fqn}".lstrip(".") for u in model._fsdp_root.units for o in u.originals()}
    model.load_state_dict(expected)
    whole = model.state_dict()
    first = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, first):
        alone = model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = model.state_dict()
    with FSDP.state_dict_type(model, SHARDED):
        parts = model.state_dict()
        dcp.save(parts, checkpoint_id=folder)
    with FSDP.state_dict_type(fresh, SHARDED):
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(state)
    loaded = fresh.state_dict()
    ignored = [name for name in expected if _is_ignored(name)]
    return {
        "no unit holds them": len(ignored) == 10 and not held & set(ignored),
        "keys": list(whole) == list(parts) == list(local) == list(expected),
        "values": all(torch.equal(_plain(whole[name]), value) for name, value in expected.items()),
        "whole in every form": all(
            torch.equal(_plain(form[name]), expected[name])
            for form in (local, parts)
            for name in ignored
        ),
        "rank 0 alone": list(alone) == (list(expected) if rank == 0 else []),
        "loaded": all(torch.equal(_plain(loaded[name]), value) for name, value in expected.items()),
    }


@pytest.mark.parametrize("how", ["wrapper", "composable"])
def test_ignored_ones_are_saved_once(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for found in ranks.run(_with_ignored, 2, how, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []
    chunks = _chunks(tmp_path)
    assert chunks.keys() == _model().state_dict().keys()
    assert {len(sizes) for name, sizes in chunks.items() if _is_ignored(name)} == {1}


# -- the forms and their options -----------------------------------------------------------------


def _forms(rank: int, world_size: int) -> dict[str, bool]:
    model = _sharded("blocks")
    expected = _model().state_dict()
    first = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, first):
        alone = model.state_dict()
        inside = FSDP.get_state_dict_type(model)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local = copy.deepcopy(model.state_dict())
        loss_of(model, batch(rank, 0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        changed = any(not torch.equal(v, local[k]) for k, v in model.state_dict().items())
        model.load_state_dict(local)
    after = model.state_dict()
    copied = ShardedStateDictConfig(offload_to_cpu=True)
    with FSDP.state_dict_type(model, SHARDED, copied):
        parts = model.state_dict()
    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(shares_memory=True)):
        shared = model.state_dict()["blocks.0.qkv.weight"]
    param: Any = dict(model.named_parameters())["blocks.0.qkv.weight"]
    wrong: dict[str, Any] = {
        "another configuration": lambda: FSDP.set_state_dict_type(model, SHARDED, first),
        "no unit": lambda: FSDP.get_state_dict_type(nn.Linear(1, 1)),
        "another part": lambda: model.load_state_dict({**parts, "norm.weight": _other_part()}),
    }
    refused = {}
    for what, call in wrong.items():
        try:
            call()
            refused[what] = False
        except (FSDPTypeError, FSDPStateError, FSDPValueError):
            refused[what] = True
    return {
        "rank 0 alone": (list(alone) == list(expected)) if rank == 0 else alone == {},
        "settings": inside == StateDictSettings(StateDictType.FULL_STATE_DICT, first),
        "settings after": FSDP.get_state_dict_type(model) == StateDictSettings(),
        "values": rank != 0 or all(torch.equal(v, alone[k]) for k, v in expected.items()),
        "changed": changed,
        "local": all(torch.equal(v, after[k]) for k, v in expected.items()),
        "a part looks whole": shared.shape == expected["blocks.0.qkv.weight"].shape,
        "a part shares memory": shared.to_local().data_ptr() == param.to_local().data_ptr(),
        "a copy does not": parts["blocks.0.qkv.weight"].to_local().data_ptr()
        != param.to_local().data_ptr(),
        **refused,
    }


# -- memory, and whose it is -----------------------------------------------------------------------


def _stepped(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two groups, one with a learning rate in a tensor."""
    model = _sharded("blocks")
    ends = [model.scale, model.head.weight]
    others = [p for p in model.parameters() if all(p is not end for end in ends)]
    groups = [{"params": ends, "lr": torch.tensor(0.1)}, {"params": others}]
    optimizer = torch.optim.Adam(groups, lr=0.1, foreach=False)
    _step(model, optimizer, rank)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def _tensors(state: Any) -> list[torch.Tensor]:
    """The memory of all tensors of a state dict."""
    found = [one for one in tree_leaves(state) if isinstance(one, torch.Tensor)]
    return [one._local_tensor if isinstance(one, DTensor) else one for one in found]


def _changed_by_a_step(rank: int, world_size: int, form: str) -> tuple[list[bool], bool]:
    """Which dicts (model, optimizer) do not stay what they were, and whether the optimizer that is
    given one changes it."""
    model, optimizer = _stepped(rank)
    settings: tuple[Any, ...] = (StateDictType[form.split()[0]],)
    if "shared" in form:
        settings += (
            ShardedStateDictConfig(shares_memory=True),
            ShardedOptimStateDictConfig(shares_memory=True),
        )
    with FSDP.state_dict_type(model, *settings):
        kept = (model.state_dict(), FSDP.optim_state_dict(model, optimizer))
        before = [[one.clone() for one in _tensors(state)] for state in kept]
        _step(model, optimizer, rank)
        changed = [
            any(not torch.equal(a, b) for a, b in zip(_tensors(state), then, strict=True))
            for state, then in zip(kept, before, strict=True)
        ]
        given = FSDP.optim_state_dict(model, optimizer)
        before[1] = [one.clone() for one in _tensors(given)]
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
        _step(model, optimizer, rank)
    pairs = zip(_tensors(given), before[1], strict=True)
    return changed, any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("form", "changed"),
    [
        ("FULL_STATE_DICT", ([False, False], False)),
        ("SHARDED_STATE_DICT", ([False, False], False)),
        ("SHARDED_STATE_DICT shared", ([True, True], True)),
        ("LOCAL_STATE_DICT", ([True, False], False)),
    ],
)
def test_what_a_step_changes(ranks: RankPool, form: str, changed: tuple[list[bool], bool]) -> None:
    """As FSDP1: all but the model's local one have memory of their own, if not told otherwise."""
    for found in ranks.run(_changed_by_a_step, 2, form):
        assert found == changed


def _local_ones(rank: int, world_size: int, folder: str) -> list[bool]:
    """Whether local state dicts are refused by torch.distributed.checkpoint, and fit into files."""
    model, optimizer = _stepped(rank)
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        local, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        name = max(local, key=lambda key: local[key].numel())
        alone = f"{folder}/alone-{rank}"
        dcp.save({name: torch.zeros(local[name].shape)}, checkpoint_id=alone, no_dist=True)
        calls: list[Callable[[], Any]] = [
            lambda: dcp.save(local, checkpoint_id=folder),
            lambda: dcp.save(states, checkpoint_id=folder),
            lambda: dcp.async_save(local, checkpoint_id=folder).result(),
            lambda: dcp.load({name: local[name]}, checkpoint_id=alone, no_dist=True),
        ]
        found = []
        for call in calls:
            try:
                call()
                found.append(False)
            except CheckpointException as error:
                found.append("Use StateDictType.SHARDED_STATE_DICT" in str(error))
        expected = [one.clone() for one in _tensors(local) + _tensors(states)]
        torch.save((local, states), f"{alone}.pt")
        _step(model, optimizer, rank)
        local, states = torch.load(f"{alone}.pt", weights_only=True)
        model.load_state_dict(local)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        own = _tensors(model.state_dict()) + _tensors(FSDP.optim_state_dict(model, optimizer))
    found.append(all(torch.equal(a, b) for a, b in zip(own, expected, strict=True)))
    states = tree_leaves(optimizer.state_dict()["state"])
    found.append(all(type(one) in (DTensor, torch.Tensor) for one in states))
    return found


def test_local_ones_are_refused_by_dcp(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_local_ones, 2, str(tmp_path)):
        assert found == [True] * 6


def _in_the_background(rank: int, world_size: int, folder: str) -> bool:
    model, optimizer = _stepped(rank)
    with FSDP.state_dict_type(model, SHARDED):
        parts = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        saved = dcp.async_save(parts, checkpoint_id=folder)
        expected = [one.clone() for one in _tensors(parts)]
        _step(model, optimizer, rank)
        saved.result()
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=folder)
    return all(torch.equal(a, b) for a, b in zip(_tensors(state), expected, strict=True))


def test_torchs_async_save(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_in_the_background, 2, str(tmp_path)) == [True, True]


def _other_part() -> DTensor:
    return distribute_tensor(torch.zeros(17), init_device_mesh("cpu", (2,)))


def test_forms(ranks: RankPool) -> None:
    for found in ranks.run(_forms, 2):
        assert [what for what, holds in found.items() if not holds] == []
