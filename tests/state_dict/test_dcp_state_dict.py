"""torch.distributed.checkpoint.state_dict on our models, others' checkpoints, older names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import error_of
from models import Block, make_transformer, wrap
from pool import RankPool, on_ranks
from shardings import assert_same, fit_tokens, sharded, whole_run
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import StateDictType as StateDictType1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy1
from torch.distributed.tensor import DTensor

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
    checkpoint,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FSDP1 = FullyShardedDataParallel
Pair = tuple[nn.Module, torch.optim.Optimizer]
SHARDED = StateDictType.SHARDED_STATE_DICT
WHOLE = StateDictOptions(full_state_dict=True)


def _plain(scale: float = 1.0) -> nn.Module:
    model = make_transformer(num_blocks=1)
    model.blocks[0].norm1.requires_grad_(False)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(scale)
    return model


def _in_fsdp1(plain: nn.Module, **arguments: Any) -> FSDP1:
    arguments["auto_wrap_policy"] = ModuleWrapPolicy1({Block})
    return FSDP1(plain, use_orig_params=True, device_id=torch.device("cpu"), **arguments)


def _in_fsdp2(plain: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in plain.blocks:
        fsdp2(block, mesh=mesh)
    return fsdp2(plain, mesh=mesh)


def _with_optimizer(model: nn.Module) -> Pair:
    return model, torch.optim.AdamW(_trained_only(model), lr=1e-2)


def _trained_only(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _made(how: str, scale: float = 1.0) -> Pair:
    plain = _plain(scale)
    if how == "FSDP1":
        return _with_optimizer(_in_fsdp1(plain))
    return _with_optimizer(_in_fsdp2(plain) if how == "FSDP2" else sharded(plain, how))


def _fresh(how: str) -> Pair:
    """With other values, and without states."""
    return _made(how, 0.5)


def _trained(how: str, rank: int) -> Pair:
    pair = _made(how)
    fit_tokens(*pair, rank, range(2))
    return pair


def _load(pair: Pair, folder: Path | str, options: StateDictOptions | None = None) -> None:
    """As everybody does it."""
    model, optim = get_state_dict(*pair, options=options)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        *pair,
        model_state_dict=state["model"],
        optim_state_dict=state["optim"],
        options=options,
    )


def _save(pair: Pair, folder: Path | str, options: StateDictOptions | None = None) -> None:
    model, optim = get_state_dict(*pair, options=options)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)


def _written(rank: int, world_size: int, writer: str, folder: str) -> dict[str, torch.Tensor]:
    trained = _trained(writer, rank)
    _save(trained, folder)  # FSDP1's values are ShardedTensors, as in its files for years
    return whole_run(*trained)


def _read(rank: int, world_size: int, reader: str, folder: str) -> dict[str, torch.Tensor]:
    fresh = _fresh(reader)
    if reader == "FSDP1":  # its template for an optimizer has no groups on some ranks
        state = {"model": get_model_state_dict(fresh[0])}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(fresh[0], state["model"])
        return get_model_state_dict(fresh[0], options=WHOLE)
    _load(fresh, folder)
    return whole_run(*fresh)


@pytest.mark.parametrize(
    ("writer", "num_writers", "reader", "num_readers"),
    [
        ("compiled", 2, "compiled", 2),
        ("composable", 2, "one unit", 3),
        ("blocks", 2, "FSDP1", 2),
        ("FSDP1", 2, "blocks", 2),
        ("blocks", 3, "FSDP2", 2),
        ("FSDP2", 3, "composable", 2),
    ],
)
def test_through_files(
    ranks: RankPool, tmp_path: Path, writer: str, num_writers: int, reader: str, num_readers: int
) -> None:
    """Model and optimizer, with a frozen part; of and for FSDP1, FSDP2, other numbers of ranks."""
    first, *others = ranks.run(_written, num_writers, writer, str(tmp_path))
    found = ranks.run(_read, num_readers, reader, str(tmp_path))
    expected = {n: v for n, v in first.items() if reader != "FSDP1" or "/" not in n}
    for got in found:
        assert_same(got, expected)
    for other in others:
        assert_same(other, first)


@pytest.mark.parametrize(
    ("kind", "form", "has_mesh"),
    [
        ("Tensor", "FULL_STATE_DICT", False),
        ("DTensor", "SHARDED_STATE_DICT", True),
        ("ShardedTensor", "SHARDED_STATE_DICT", False),
    ],
)
@on_ranks(2)
def test_fsdp1s_values(rank: int, kind: str, form: str, has_mesh: bool) -> None:
    """What FSDP1's own context gives, loaded without torch.distributed.checkpoint."""
    mesh = init_device_mesh("cpu", (2,)) if has_mesh else None
    pair = _with_optimizer(_in_fsdp1(_plain(), device_mesh=mesh))
    fit_tokens(*pair, rank)
    with FSDP1.state_dict_type(pair[0], StateDictType1[form]):
        values, states = pair[0].state_dict(), FSDP1.optim_state_dict(*pair)
    assert kind in {type(value).__name__ for value in values.values()}
    fresh = _fresh("one unit")
    fresh[0].load_state_dict(values)
    if form == "SHARDED_STATE_DICT":  # whole states of sharded parameters are wrong in FSDP1
        fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, states))
        assert_same(whole_run(*fresh), whole_run(*pair))
    else:
        assert_same(get_model_state_dict(fresh[0], options=WHOLE), dict(values))
    if not has_mesh:
        with FSDP1.state_dict_type(pair[0], StateDictType1.LOCAL_STATE_DICT):
            flat = pair[0].state_dict()
        error = error_of(lambda: fresh[0].load_state_dict(flat, strict=False))
        assert "_flat_param': expected a state" in error


@on_ranks(3)
def test_torchs_optimizer_reader(rank: int, tmp_path: Path) -> None:
    """As FSDP1's tutorials: torch reads the states as ShardedTensors, the wrapper takes those."""
    trained, fresh = _trained("blocks", rank), _fresh("one unit")
    with FSDP.state_dict_type(trained[0], SHARDED):
        states = {"model": trained[0].state_dict(), "optim": FSDP.optim_state_dict(*trained)}
        dcp.save(states, checkpoint_id=tmp_path)
    with FSDP.state_dict_type(fresh[0], SHARDED):
        model = {"model": fresh[0].state_dict()}
        dcp.load(model, checkpoint_id=tmp_path)
        fresh[0].load_state_dict(model["model"])
        read = load_sharded_optimizer_state_dict(
            model["model"], "optim", dcp.FileSystemReader(tmp_path)
        )
        fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, read["optim"]))
    assert_same(whole_run(*fresh), whole_run(*trained))


@on_ranks(2)
def test_options(rank: int) -> None:
    pair = _trained("blocks", rank)
    model = pair[0]
    expected = whole_run(*pair)
    flat = get_optimizer_state_dict(
        *pair, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    assert isinstance(flat["state.head.weight.exp_avg"], DTensor)
    assert flat["param_groups.head.weight.lr"] == 1e-2
    flattened = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    whole, flat_whole = get_state_dict(*pair, options=flattened)
    other = _fresh("one unit")
    set_state_dict(*other, model_state_dict=whole, optim_state_dict=flat_whole, options=flattened)
    assert_same(whole_run(*other), expected)

    parts = get_model_state_dict(model)
    assert all(isinstance(value, DTensor) for value in parts.values())
    trained_only = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    frozen = {"blocks.0.norm1.bias", "blocks.0.norm1.weight"}
    assert parts.keys() - trained_only.keys() == frozen
    missing = set_model_state_dict(
        model, {"scale": whole["scale"]}, options=StateDictOptions(strict=False)
    )
    assert len(missing.missing_keys) == len(whole) - 1


class _OddlyNamed(nn.Module):
    """Keys of a ``ModuleDict`` with what separates names elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        keys = ("a|b", "c,d", "e;f", "g h", "i/j", "k:l", 'm"n', "state", "param_groups", "0")
        self.parts = nn.ModuleDict({key: nn.Linear(3, 3) for key in keys})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = x + part(x)
        return x


@on_ranks(2)
def test_odd_names(rank: int, tmp_path: Path) -> None:
    def made() -> Pair:
        return _with_optimizer(FSDP(_OddlyNamed(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear})))

    trained = made()
    trained[0](torch.ones(2, 3)).sum().backward()
    trained[1].step()
    assert list(trained[0].state_dict()) == list(_OddlyNamed().state_dict())
    expected = whole_run(*trained)
    nested, flat, ours = made(), made(), made()
    _save(trained, tmp_path / "nested")
    _load(nested, tmp_path / "nested")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    _save(trained, tmp_path / "flat", options)
    _load(flat, tmp_path / "flat", options)
    checkpoint.save(tmp_path / "ours", *trained, step=1)
    checkpoint.load(tmp_path / "ours", *ours)
    for fresh in (nested, flat, ours):
        assert_same(whole_run(*fresh), expected)


@on_ranks(4)
def test_on_two_of_four_ranks(rank: int, tmp_path: Path) -> None:
    """All ranks write a checkpoint; two of them, not the first, load it and go on alone."""
    trained = _trained("blocks", rank)
    expected = whole_run(*trained)
    full = FSDP.full_optim_state_dict(*trained, rank0_only=False)
    with FSDP.state_dict_type(trained[0], SHARDED):
        dcp.save({"model": trained[0].state_dict()}, checkpoint_id=tmp_path)
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return

    def fresh() -> Pair:
        return _with_optimizer(wrap(_plain(0.5), process_group=group))

    pair, received, loaded = fresh(), fresh(), fresh()
    model, optimizer = pair
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, process_group=group)
        model.load_state_dict(state["model"])
    given = full if rank == 1 else None
    scattered = FSDP.scatter_full_optim_state_dict(given, model, optim=optimizer, group=group)
    optimizer.load_state_dict(scattered)
    assert_same(whole_run(*pair), expected)

    fit_tokens(*pair, rank)
    later = whole_run(*pair)
    assert not torch.equal(later["head.weight"], expected["head.weight"])
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        assert bool(model.state_dict()) is bool(FSDP.optim_state_dict(*pair)) is (rank == 1)
    alone = get_state_dict(*pair, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert [bool(one) for one in alone] == [rank == 1] * 2
    set_state_dict(
        *received,
        model_state_dict=alone[0],
        optim_state_dict=alone[1],
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_same(whole_run(*received), later)
    checkpoint.save(tmp_path / "run", *pair, step=1, process_group=group)
    found = checkpoint.load(tmp_path / "run", *loaded, process_group=group)
    assert found is not None
    assert found.world_size == 2
    assert_same(whole_run(*loaded), later)


# -- older names ---------------------------------------------------------------------------------


@on_ranks(2)
def test_older_names(rank: int) -> None:
    """Whole states into another sharding, and parts into the same."""
    pair = _trained("blocks", rank)
    expected = whole_run(*pair)
    full = FSDP.full_optim_state_dict(*pair)
    assert bool(full) == (rank == 0)
    everywhere = FSDP.full_optim_state_dict(*pair, rank0_only=False)
    parts = FSDP.sharded_optim_state_dict(*pair)
    ways: dict[str, Callable[[nn.Module, Any], dict[str, Any]]] = {
        "scattered": lambda m, o: FSDP.scatter_full_optim_state_dict(full, m, optim=o),
        "scattered to what it is made of": lambda m, o: FSDP.scatter_full_optim_state_dict(
            full, m, _trained_only(m)
        ),
        "whole": lambda m, o: FSDP.shard_full_optim_state_dict(everywhere, m, optim=o),
        "without an optimizer": lambda m, o: FSDP.shard_full_optim_state_dict(everywhere, m),
        "parts": lambda m, o: FSDP.flatten_sharded_optim_state_dict(parts, m, o),
    }
    values = pair[0].state_dict()
    for way, load in ways.items():
        fresh = _fresh("blocks" if way == "parts" else "one unit")
        fresh[0].load_state_dict(values)
        fresh[1].load_state_dict(load(*fresh))
        assert_same(whole_run(*fresh), expected)
    with pytest.raises(FSDPValueError, match="a parameter of the model"):
        FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, nn.Linear(1, 1))
