"""torch.distributed.checkpoint.state_dict on our models, others' checkpoints, older names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as upstream
from models import Block, batch, loss_of, make_transformer, wrap
from pool import RankPool
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
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig
from torch.distributed.fsdp import StateDictType as StateDictType1
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy1
from torch.distributed.tensor import DTensor

from fsdp_dynamo import (
    FSDP,
    FSDPValueError,
    OptimStateKeyType,
    StateDictType,
    UnsupportedError,
    checkpoint,
    fully_shard,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

FSDP1 = upstream.FullyShardedDataParallel
Pair = tuple[nn.Module, torch.optim.Optimizer]


def _plain() -> nn.Module:
    model = make_transformer(num_blocks=2)
    model.blocks[1].norm1.requires_grad_(False)
    return model


def _in_fsdp2(plain: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in plain.blocks:
        fsdp2(block, mesh=mesh)
    fsdp2(plain, mesh=mesh)
    return plain


MODES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapper": wrap,
    "one unit": FSDP,
    "composable": lambda plain: fully_shard(plain, policy=ModuleWrapPolicy({Block})),
    "DTensors": lambda plain: fully_shard(plain, policy=ModuleWrapPolicy({Block})),
    "compiled": lambda plain: torch.compile(wrap(plain), backend="fsdp_dynamo_aot_eager"),
    "FSDP2": _in_fsdp2,
    "FSDP1": lambda plain: FSDP1(
        plain,
        auto_wrap_policy=ModuleWrapPolicy1({Block}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    ),
    "plain": lambda plain: plain,
}


def _made(how: str, seed: int = 7) -> Pair:
    plain = _plain()
    if seed != 7:
        with torch.no_grad():
            for param in plain.parameters():
                param.mul_(0.5)
    model = MODES[how](plain)
    return model, torch.optim.AdamW(_trained_only(model), lr=1e-2)


def _trained_only(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _trained(how: str, rank: int) -> Pair:
    model, optimizer = _made(how)
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _whole(pair: Pair) -> dict[str, torch.Tensor]:
    """Whole tensors of the model and the optimizer, on every rank, by torch's function."""
    model, optim = get_state_dict(*pair, options=StateDictOptions(full_state_dict=True))
    states = {
        f"{fqn}/{name}": torch.as_tensor(value)
        for fqn, state in optim["state"].items()
        for name, value in state.items()
    }
    return {**{name: value.detach() for name, value in model.items()}, **states}


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of the values that differ."""
    wrong = [name for name in a if name in b and not torch.equal(a[name], b[name])]
    return wrong + sorted(a.keys() ^ b.keys())


def _through_files(rank: int, world_size: int, writer: str, reader: str, folder: str) -> list[str]:
    """Save one way and load another, as everybody does it; returns what is not the same."""
    trained = _trained(writer, rank)
    model, optim = get_state_dict(*trained)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    fresh = _made(reader, seed=8)
    model, optim = get_state_dict(*fresh)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return _same(_whole(trained), _whole(fresh))


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("wrapper", "composable"),
        ("composable", "one unit"),
        ("compiled", "compiled"),
        ("wrapper", "FSDP2"),
        ("FSDP2", "wrapper"),
        ("FSDP1", "wrapper"),
        ("FSDP1", "composable"),
        ("DTensors", "FSDP2"),
        ("FSDP2", "DTensors"),
        ("wrapper", "DTensors"),
        ("DTensors", "one unit"),
        ("FSDP1", "DTensors"),
    ],
)
def test_through_files(ranks: RankPool, tmp_path: Path, writer: str, reader: str) -> None:
    """Model and optimizer, with a frozen part: FSDP1's and FSDP2's files, and ours by FSDP2."""
    for wrong in ranks.run(_through_files, 2, writer, reader, str(tmp_path)):
        assert wrong == []


def _fsdp1_reads_ours(rank: int, world_size: int, writer: str, folder: str) -> list[str]:
    """The model; of the optimizer its template has no parameter groups on some ranks."""
    model, _ = _trained(writer, rank)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    theirs, _ = _made("FSDP1", seed=8)
    state = {"model": get_model_state_dict(theirs)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(theirs, state["model"])
    whole = StateDictOptions(full_state_dict=True)
    return _same(
        get_model_state_dict(model, options=whole), get_model_state_dict(theirs, options=whole)
    )


@pytest.mark.parametrize(
    "writer", ["wrapper", "composable", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_fsdp1_reads_our_model(ranks: RankPool, tmp_path: Path, writer: str) -> None:
    assert ranks.run(_fsdp1_reads_ours, 2, writer, str(tmp_path)) == [[], []]


def _fsdp1s_own_form(rank: int, world_size: int, folder: str) -> list[str]:
    """FSDP1 with its own context and ShardedTensors, as its checkpoints were written for years."""
    model, optimizer = _trained("FSDP1", rank)
    with FSDP1.state_dict_type(
        model,
        StateDictType1.SHARDED_STATE_DICT,
        ShardedStateDictConfig(_use_dtensor=False),
        ShardedOptimStateDictConfig(_use_dtensor=False),
    ):
        states = {"model": model.state_dict(), "optim": FSDP1.optim_state_dict(model, optimizer)}
        dcp.save(states, checkpoint_id=folder)
    fresh = _made("wrapper", seed=8)
    ours, optim = get_state_dict(*fresh)
    state = {"model": ours, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return _same(_whole((model, optimizer)), _whole(fresh))


def test_fsdp1s_own_form(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_fsdp1s_own_form, 2, str(tmp_path)) == [[], []]


FSDP1_VALUES = {
    "whole": (StateDictType1.FULL_STATE_DICT, None),
    "DTensor": (StateDictType1.SHARDED_STATE_DICT, True),
    "ShardedTensor": (StateDictType1.SHARDED_STATE_DICT, False),
}


def _fsdp1s_values(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    """What FSDP1's own context gives, loaded without torch.distributed.checkpoint."""
    found = {}
    for name, (kind, dtensor) in FSDP1_VALUES.items():
        plain = _plain()
        model = FSDP1(
            plain,
            auto_wrap_policy=ModuleWrapPolicy1({Block}),
            device_id=torch.device("cpu"),
            device_mesh=init_device_mesh("cpu", (world_size,)) if dtensor else None,
            use_orig_params=True,
        )
        optimizer = torch.optim.AdamW(_trained_only(model), lr=1e-2)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        with FSDP1.state_dict_type(model, kind):
            values = model.state_dict()
            states = None if dtensor is None else FSDP1.optim_state_dict(model, optimizer)
        types = {type(value).__name__ for value in values.values()}
        found[f"{name}: its type"] = (name if dtensor is not None else "Tensor") in types
        fresh = _made("one unit", seed=8)
        fresh[0].load_state_dict(values)
        expected, loaded = _whole((model, optimizer)), _whole(fresh)
        names = [key for key in expected if "/" not in key]
        found[f"{name}: model"] = all(torch.equal(expected[n], loaded[n]) for n in names)
        if states is not None:
            fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, states))
            found[f"{name}: optimizer"] = _same(expected, _whole(fresh)) == []
    try:
        with FSDP1.state_dict_type(model, StateDictType1.LOCAL_STATE_DICT):
            fresh[0].load_state_dict(model.state_dict(), strict=False)
        found["flat parameters are refused"] = False
    except UnsupportedError as error:
        found["flat parameters are refused"] = "_flat_param': expected a state" in str(error)
    return found


def test_fsdp1s_values(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_fsdp1s_values, 2, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []


def _torchs_optimizer_reader(rank: int, world_size: int, folder: str) -> list[str]:
    """As FSDP1's tutorials: torch reads the states as ShardedTensors, the wrapper takes those."""
    trained = _trained("wrapper", rank)
    fresh = _made("one unit", seed=8)
    with FSDP.state_dict_type(trained[0], StateDictType.SHARDED_STATE_DICT):
        states = {"model": trained[0].state_dict(), "optim": FSDP.optim_state_dict(*trained)}
        dcp.save(states, checkpoint_id=folder)
    with FSDP.state_dict_type(fresh[0], StateDictType.SHARDED_STATE_DICT):
        model = {"model": fresh[0].state_dict()}
        dcp.load(model, checkpoint_id=folder)
        fresh[0].load_state_dict(model["model"])
        read = load_sharded_optimizer_state_dict(
            model["model"], "optim", dcp.FileSystemReader(folder)
        )
        fresh[1].load_state_dict(FSDP.optim_state_dict_to_load(*fresh, read["optim"]))
    return _same(_whole(trained), _whole(fresh))


def test_torchs_optimizer_reader(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_torchs_optimizer_reader, 3, str(tmp_path)) == [[], [], []]


def _options(rank: int, world_size: int, how: str) -> dict[str, bool]:
    pair = _trained(how, rank)
    model, optimizer = pair
    expected = _whole(pair)
    first = StateDictOptions(full_state_dict=True, cpu_offload=True)
    alone, optim_alone = get_state_dict(model, optimizer, options=first)
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    parts = get_model_state_dict(model)
    trained_only = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    receiver = _made("DTensors" if how == "DTensors" else "composable", seed=8)
    set_state_dict(
        *receiver,
        model_state_dict=alone if rank == 0 else {},
        optim_state_dict=optim_alone if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    other = _made("one unit", seed=8)
    flat_whole = get_optimizer_state_dict(
        model,
        optimizer,
        options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True),
    )
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    flattened = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    set_state_dict(*other, model_state_dict=whole, optim_state_dict=flat_whole, options=flattened)
    missing = set_model_state_dict(
        model, {"scale": whole["scale"]}, options=StateDictOptions(strict=False)
    )
    return {
        "rank 0 alone": bool(alone) is bool(optim_alone) is (rank == 0),
        "flat": isinstance(flat["state.head.weight.exp_avg"], DTensor),
        "flat groups": flat["param_groups.head.weight.lr"] == 1e-2,
        "parts": all(isinstance(value, DTensor) for value in parts.values()),
        "frozen left out": sorted(set(parts) - set(trained_only))
        == ["blocks.1.norm1.bias", "blocks.1.norm1.weight"],
        "received": _same(_whole(receiver), expected) == [],
        "from flat": _same(_whole(other), expected) == [],
        "not strict": len(missing.missing_keys) == len(whole) - 1,
    }


@pytest.mark.parametrize("how", ["wrapper", "DTensors"])
def test_options(ranks: RankPool, how: str) -> None:
    for found in ranks.run(_options, 2, how):
        assert [what for what, holds in found.items() if not holds] == []


def _one_parameter_in_two(rank: int, world_size: int) -> str:
    model, optimizer = _trained("wrapper", rank)
    other = torch.optim.SGD([model.head.weight, model.head.bias], lr=0.1)
    try:
        get_optimizer_state_dict(model, (optimizer, other))
    except FSDPValueError as error:
        return str(error)
    return "no error"


def test_one_parameter_in_two_optimizers(ranks: RankPool) -> None:
    for message in ranks.run(_one_parameter_in_two, 2):
        assert "expected each parameter in one optimizer, got 'head.bias' in two" in message


def _written(rank: int, world_size: int, writer: str, folder: str) -> dict[str, torch.Tensor]:
    trained = _trained(writer, rank)
    model, optim = get_state_dict(*trained)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder)
    return _whole(trained)


def _read(rank: int, world_size: int, reader: str, folder: str) -> dict[str, torch.Tensor]:
    fresh = _made(reader, seed=8)
    model, optim = get_state_dict(*fresh)
    state = {"model": model, "optim": optim}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(*fresh, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return _whole(fresh)


@pytest.mark.parametrize("pair", [("DTensors", "FSDP2"), ("FSDP2", "DTensors")], ids="-".join)
def test_other_world_sizes(ranks: RankPool, tmp_path: Path, pair: tuple[str, str]) -> None:
    """Files of three ranks of one library, read by two of the other."""
    expected = ranks.run(_written, 3, pair[0], str(tmp_path))[0]
    for got in ranks.run(_read, 2, pair[1], str(tmp_path)):
        assert _same(expected, got) == []


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


def _odd_names(rank: int, world_size: int, composable: bool, folder: str) -> dict[str, bool]:
    policy = ModuleWrapPolicy({nn.Linear})

    def made() -> Pair:
        plain = _OddlyNamed()
        model = (
            fully_shard(plain, policy=policy)
            if composable
            else FSDP(plain, auto_wrap_policy=policy)
        )
        return model, torch.optim.AdamW(model.parameters())

    trained = made()
    trained[0](torch.ones(2, 3)).sum().backward()
    trained[1].step()
    expected = _whole(trained)

    def through(options: StateDictOptions, name: str) -> bool:
        fresh = made()
        model, optim = get_state_dict(*trained, options=options)
        dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/{name}")
        model, optim = get_state_dict(*fresh, options=options)
        dcp.load({"model": model, "optim": optim}, checkpoint_id=f"{folder}/{name}")
        set_state_dict(*fresh, model_state_dict=model, optim_state_dict=optim, options=options)
        return _same(_whole(fresh), expected) == []

    ours = made()
    checkpoint.save(f"{folder}/ours", *trained, step=1)
    checkpoint.load(f"{folder}/ours", *ours)
    return {
        "keys": list(trained[0].state_dict()) == list(_OddlyNamed().state_dict()),
        "dcp": through(StateDictOptions(), "nested"),
        "flat": through(StateDictOptions(flatten_optimizer_state_dict=True), "flat"),
        "checkpoint": _same(_whole(ours), expected) == [],
    }


@pytest.mark.parametrize("composable", [False, True])
def test_odd_names(ranks: RankPool, tmp_path: Path, composable: bool) -> None:
    for found in ranks.run(_odd_names, 2, composable, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []


# -- older names ---------------------------------------------------------------------------------


def _older_names(rank: int, world_size: int) -> dict[str, bool]:
    pair = _trained("wrapper", rank)
    model, optimizer = pair
    expected = _whole(pair)
    state_of_model = model.state_dict()
    full = FSDP.full_optim_state_dict(model, optimizer)
    everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    parts = FSDP.sharded_optim_state_dict(model, optimizer)

    def given(load: Callable[[Pair], dict[str, Any]]) -> bool:
        other = _made("one unit", seed=8)
        other[0].load_state_dict(state_of_model)
        other[1].load_state_dict(load(other))
        return _same(_whole(other), expected) == []

    def same_sharding() -> bool:
        other = _made("wrapper", seed=8)
        other[0].load_state_dict(state_of_model)
        flat = FSDP.flatten_sharded_optim_state_dict(parts, *other)
        other[1].load_state_dict(flat)
        return _same(_whole(other), expected) == []

    plain, plain_optimizer = _made("plain")
    by_id = FSDP.rekey_optim_state_dict(
        everywhere, OptimStateKeyType.PARAM_ID, plain, None, plain_optimizer
    )
    plain_optimizer.load_state_dict(by_id)
    again = FSDP.rekey_optim_state_dict(
        plain_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, plain, None, plain_optimizer
    )
    backward = [
        {**everywhere["param_groups"][0], "params": everywhere["param_groups"][0]["params"][::-1]}
    ]
    sorted_ids = FSDP.rekey_optim_state_dict(
        {"state": {}, "param_groups": backward},
        upstream.OptimStateKeyType.PARAM_ID,
        plain,
        _trained_only(plain),
    )
    try:
        FSDP.rekey_optim_state_dict(everywhere, OptimStateKeyType.PARAM_ID, nn.Linear(1, 1))
        refused = False
    except FSDPValueError:
        refused = True
    return {
        "rank 0 alone": bool(full) == (rank == 0),
        "scattered": given(
            lambda pair: FSDP.scatter_full_optim_state_dict(
                full if rank == 0 else None, pair[0], optim=pair[1]
            )
        ),
        "sharded": given(
            lambda pair: FSDP.shard_full_optim_state_dict(everywhere, pair[0], optim=pair[1])
        ),
        "without an optimizer": given(
            lambda pair: FSDP.shard_full_optim_state_dict(everywhere, pair[0])
        ),
        "scattered to what it is made of": given(
            lambda pair: FSDP.scatter_full_optim_state_dict(
                full if rank == 0 else None, pair[0], _trained_only(pair[0])
            )
        ),
        "flattened": same_sharding(),
        "numbers": set(by_id["state"]) <= set(range(99)),
        "in order": sorted_ids["param_groups"][0]["params"]
        == list(range(len(everywhere["param_groups"][0]["params"]))),
        "names": all(
            torch.equal(value, everywhere["state"][fqn][name])
            for fqn, state in again["state"].items()
            for name, value in state.items()
        )
        and again["state"].keys() == everywhere["state"].keys(),
        "refused": refused,
    }


def test_older_names(ranks: RankPool) -> None:
    for found in ranks.run(_older_names, 2):
        assert [what for what, holds in found.items() if not holds] == []
