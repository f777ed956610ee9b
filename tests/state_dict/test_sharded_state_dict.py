"""State dicts of parts: what is in the files, and who can load them."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import batch, loss_of, make_transformer, wrap
from pool import RankPool, on_ranks
from shardings import assert_same, sharded, unsharded
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
    LocalOptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
    record_events,
)

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
LOCAL = StateDictType.LOCAL_STATE_DICT
FIRST = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)


class _Odd(nn.Module):
    """Shapes that no number of ranks divides: 0 to 3 dimensions, and no element at all."""

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate([(), (1,), (7,), (3, 5), (5, 3, 2), (0, 4)]):
            self.register_parameter(f"p{i}", nn.Parameter(torch.randn(shape)))
        self.register_buffer("count", torch.arange(3))


def _model() -> nn.Module:
    torch.manual_seed(11)
    model = make_transformer(num_blocks=2, tied=True)
    model.odd = _Odd()
    return model


def _moved() -> dict[str, torch.Tensor]:
    """Other values than those of the model."""
    return {name: value + 1 for name, value in _model().state_dict().items()}


def _pass_on(rank: int, world_size: int, how: str, source: str | None, folder: str) -> None:
    """Load what the sharding before has saved (the first: other values), and save it."""
    model = sharded(_model(), how)
    if source is None:
        model.load_state_dict(_moved())
    else:
        with FSDP.state_dict_type(model, SHARDED):
            state = model.state_dict()
            dcp.load(state, checkpoint_id=source)
            model.load_state_dict(state)
    found = model.state_dict()
    assert list(found) == list(_moved())
    assert_same(unsharded(found), _moved())
    with FSDP.state_dict_type(model, SHARDED), record_events() as log:
        dcp.save(model.state_dict(), checkpoint_id=folder)
    assert log.keys("all_gather", "unshard") == []


def _chunks(folder: Path) -> dict[str, list[int]]:
    """The sizes of all chunks of each tensor in a checkpoint."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    return {
        name: [math.prod(chunk.sizes) for chunk in info.chunks]
        for name, info in metadata.state_dict_metadata.items()
    }


def test_another_sharding_loads_it(ranks: RankPool, tmp_path: Path) -> None:
    """Passed on from one to the next; one process without our library reads the files of each.

    Every element is in them once, without padding; a rank's rows are one chunk.
    """
    hands = [
        ("blocks", 4),
        ("one unit", 3),
        ("composable", 1),
        ("replicas", 4),
        ("compiled", 2),
        ("hierarchy", 4),
        ("not sharded", 2),
    ]
    numels = {name: value.numel() for name, value in _model().state_dict().items()}
    source = None
    for number, (how, world_size) in enumerate(hands):
        folder = tmp_path / str(number)
        ranks.run(_pass_on, world_size, how, source, str(folder))
        source = str(folder)
        chunks = _chunks(folder)
        assert {name: sum(sizes) for name, sizes in chunks.items()} == numels
        assert max(len(sizes) for sizes in chunks.values()) <= world_size
        plain = _model().state_dict()
        dcp.load(plain, checkpoint_id=folder, no_dist=True)
        assert_same(plain, _moved())
    assert max(len(sizes) for sizes in _chunks(tmp_path / "0").values()) > 1


@on_ranks(2)
def test_ignored_ones_are_saved_once(rank: int, tmp_path: Path) -> None:
    """Two modules (one has a buffer) and a single parameter, which no unit holds."""

    def made() -> FSDP:
        model = _model()
        ignored = [model.odd, model.blocks[0].up]
        return wrap(model, ignored_modules=ignored, ignored_states=[model.scale])

    expected = _moved()
    ignored = [n for n in expected if n == "scale" or n.startswith(("odd.", "blocks.0.up."))]
    model, fresh = made(), made()
    held = {f"{u.fqn}.{o.fqn}".lstrip(".") for u in model._fsdp_root.units for o in u.originals()}
    assert len(ignored) == 10
    assert not held & set(ignored)
    model.load_state_dict(expected)
    assert_same(dict(model.state_dict()), expected)
    with FSDP.state_dict_type(model, FULL, FIRST):
        assert list(model.state_dict()) == (list(expected) if rank == 0 else [])
    with FSDP.state_dict_type(model, LOCAL):
        local = model.state_dict()
    with FSDP.state_dict_type(model, SHARDED):
        parts = model.state_dict()
        dcp.save(parts, checkpoint_id=tmp_path)
    for form in (local, parts):
        assert list(form) == list(expected)
        assert_same({n: form[n] for n in ignored}, {n: expected[n] for n in ignored})
    with FSDP.state_dict_type(fresh, SHARDED):
        state = fresh.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
        fresh.load_state_dict(state)
    assert_same(dict(fresh.state_dict()), expected)
    chunks = _chunks(tmp_path)
    assert chunks.keys() == expected.keys()
    assert {len(chunks[name]) for name in ignored} == {1}


@on_ranks(2)
def test_forms(rank: int) -> None:
    """The settings that choose a form, and what each of them gives and takes."""
    model = sharded(_model(), "blocks")
    expected = _model().state_dict()
    config = FullStateDictConfig(offload_to_cpu=True)
    config.rank0_only = True  # upstream's classes can be written to, and integrations do so
    with FSDP.state_dict_type(model, FULL, config):
        config.rank0_only = False  # too late
        assert FSDP.get_state_dict_type(model) == StateDictSettings(FULL, FIRST)
        assert_same(dict(model.state_dict()), expected if rank == 0 else {})
    assert FSDP.get_state_dict_type(model) == StateDictSettings()

    with FSDP.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
        parts = model.state_dict()
    assert isinstance(parts["head.weight"], DTensor)
    assert parts["head.weight"].shape == expected["head.weight"].shape
    other_part = distribute_tensor(torch.zeros(17), init_device_mesh("cpu", (2,)))
    with pytest.raises(FSDPValueError, match=r"norm\.weight"):
        model.load_state_dict({**parts, "norm.weight": other_part})
    with pytest.raises(FSDPTypeError):
        FSDP.set_state_dict_type(model, SHARDED, FIRST)
    with pytest.raises(FSDPStateError, match="got no unit"):
        FSDP.get_state_dict_type(nn.Linear(1, 1))


# -- memory, and whose it is -----------------------------------------------------------------------


def _stepped(rank: int, how: str = "blocks") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two groups, one with a learning rate in a tensor."""
    model = sharded(_model(), how)
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


def _copies(state: Any) -> list[torch.Tensor]:
    return [one.clone() for one in _tensors(state)]


def _is_changed(state: Any, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(_tensors(state), before, strict=True))


@pytest.mark.parametrize(
    ("form", "shares", "changed"),
    [
        ("FULL_STATE_DICT", False, (False, False, False)),
        ("SHARDED_STATE_DICT", False, (False, False, False)),
        ("SHARDED_STATE_DICT", True, (True, True, True)),
        ("LOCAL_STATE_DICT", False, (True, False, False)),
    ],
)
@on_ranks(2)
def test_what_a_step_changes(
    rank: int, form: str, shares: bool, changed: tuple[bool, bool, bool]
) -> None:
    """A dict of the model, one of the optimizer, and one that the optimizer was loaded from.

    As FSDP1: all but the model's local one have memory of their own, if not told otherwise.
    """
    model, optimizer = _stepped(rank)
    settings: tuple[Any, ...] = (StateDictType[form],)
    if shares:
        settings += (
            ShardedStateDictConfig(shares_memory=True),
            ShardedOptimStateDictConfig(shares_memory=True),
        )
    with FSDP.state_dict_type(model, *settings):
        kept = (model.state_dict(), FSDP.optim_state_dict(model, optimizer))
        before = [_copies(state) for state in kept]
        _step(model, optimizer, rank)
        assert tuple(map(_is_changed, kept, before)) == changed[:2]
        given = FSDP.optim_state_dict(model, optimizer)
        before_loading = _copies(given)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, given))
        _step(model, optimizer, rank)
        assert _is_changed(given, before_loading) is changed[2]


@on_ranks(2)
def test_local_ones_are_refused_by_dcp(rank: int, tmp_path: Path) -> None:
    """Ranks have other tensors by the same names; a file for each rank takes them."""
    model, optimizer = _stepped(rank)
    with FSDP.state_dict_type(model, LOCAL):
        local, states = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
        name = max(local, key=lambda key: local[key].numel())
        alone = f"{tmp_path}/alone-{rank}"
        dcp.save({name: torch.zeros(local[name].shape)}, checkpoint_id=alone, no_dist=True)
        for call in (
            lambda: dcp.save(local, checkpoint_id=tmp_path),
            lambda: dcp.save(states, checkpoint_id=tmp_path),
            lambda: dcp.async_save(local, checkpoint_id=tmp_path).result(),
            lambda: dcp.load({name: local[name]}, checkpoint_id=alone, no_dist=True),
        ):
            with pytest.raises(CheckpointException, match=r"Use StateDictType\.SHARDED"):
                call()
        expected = _copies((local, states))
        torch.save((local, states), f"{alone}.pt")
        _step(model, optimizer, rank)
        local, states = copy.deepcopy(torch.load(f"{alone}.pt", weights_only=True))
        model.load_state_dict(local)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
        own = (model.state_dict(), FSDP.optim_state_dict(model, optimizer))
        assert not _is_changed(own, expected)
    states = tree_leaves(optimizer.state_dict()["state"])
    assert all(type(one) in (DTensor, torch.Tensor) for one in states)


@pytest.mark.parametrize("form", ["SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@on_ranks(2)
def test_torchs_async_save(rank: int, tmp_path: Path, form: str) -> None:
    """A step meanwhile is not in the file. Local ones are taken where nothing is sharded."""
    settings: tuple[Any, ...] = (SHARDED,)
    if form == "LOCAL_STATE_DICT":
        settings = (LOCAL, None, LocalOptimStateDictConfig(offload_to_cpu=True))
    model, optimizer = _stepped(rank, "blocks" if settings == (SHARDED,) else "not sharded")
    with FSDP.state_dict_type(model, *settings):

        def states() -> dict[str, Any]:
            optim = FSDP.optim_state_dict(model, optimizer)
            return {"model": model.state_dict(), "optim": optim}

        expected = _copies(states())
        dcp.save(states(), checkpoint_id=tmp_path / "at once")
        saved = dcp.async_save(
            states(), checkpoint_id=tmp_path / "behind", process_group=dist.new_group()
        )
        _step(model, optimizer, rank)
        saved.result()
        for name in ("at once", "behind"):
            given = states()
            dcp.load(given, checkpoint_id=tmp_path / name)
            model.load_state_dict(given["model"])
            loaded = FSDP.optim_state_dict_to_load(model, optimizer, given["optim"])
            optimizer.load_state_dict(loaded)
            assert not _is_changed(states(), expected)
            _step(model, optimizer, rank)
            assert _is_changed(states(), expected)
