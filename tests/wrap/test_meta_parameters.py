"""``fully_shard`` leaves parameters on the meta device until the user gives them values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import error_of
from models import average_gradients, batch, loss_of
from modes import in_mode
from pool import on_ranks
from test_deferred_init import Resettable
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_dynamo import FSDP, FSDPStateError, fully_shard


def _on_meta(**kwargs: Any) -> Any:
    with torch.device("meta"):
        model: Any = Resettable(num_blocks=2, **kwargs)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _reset(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _reference(tied: bool = False) -> Any:
    torch.manual_seed(0)
    model = Resettable(num_blocks=2, tied=tied)
    torch.manual_seed(3)
    _reset(model)
    return model


# -- ways to values, as scripts for FSDP2 have them ------------------------------------------------


def _empty(model: Any, folder: Path) -> None:
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    _reset(model)


def _module_by_module(model: Any, folder: Path) -> None:
    torch.manual_seed(3)
    for module in model.modules():
        if any(tensor.is_meta for tensor in module.parameters(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _whole_values(model: Any, folder: Path) -> None:
    model.load_state_dict(_reference(model.head.weight is model.embed.weight).state_dict())


def _distributed_values(model: Any, folder: Path) -> None:
    like = model.state_dict()
    given = _reference(model.head.weight is model.embed.weight).state_dict()
    values = {
        name: nn.Parameter(distribute_tensor(value, like[name].device_mesh, like[name].placements))
        for name, value in given.items()
    }
    model.load_state_dict(values, assign=True)


def _from_rank_0(model: Any, folder: Path) -> None:
    given = _reference(model.head.weight is model.embed.weight).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, given if dist.get_rank() == 0 else {}, options=options)


def _from_files(model: Any, folder: Path) -> None:
    """Of a model of torch's own ``fully_shard``."""
    theirs = torchs_fully_shard(_reference(model.head.weight is model.embed.weight))
    dcp.save(get_model_state_dict(theirs), checkpoint_id=folder)
    values = model.state_dict()
    dcp.load(values, checkpoint_id=folder)
    model.load_state_dict(values, assign=True)


WAYS = {
    "to_empty": _empty,
    "module by module": _module_by_module,
    "whole values": _whole_values,
    "distributed values": _distributed_values,
    "from rank 0": _from_rank_0,
    "from files": _from_files,
}


def _assert_trains(rank: int, way: str, folder: Path, tied: bool) -> None:
    """After two steps the model is that of one process."""
    model = _on_meta(tied=tied)
    params = list(model.parameters())
    assert all(p.is_meta and isinstance(p, DTensor) for p in params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # before the values
    WAYS[way](model, folder)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    plain = _reference(tied)
    if way in ("to_empty", "module by module"):  # each rank has drawn values of its own
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_of(model, batch(step, rank)).backward()
        loss_of(plain, batch(step, rank)).backward()
        average_gradients(plain)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    expected = dict(plain.named_parameters())
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("way", "tied"), [(way, way not in ("to_empty", "from files")) for way in WAYS]
)
@on_ranks(2)
def test_values_of_one_process(rank: int, tmp_path: Path, way: str, tied: bool) -> None:
    """In eager mode; test_replaced_storage.py has compiled models on the meta device."""
    _assert_trains(rank, way, tmp_path, tied)


@pytest.mark.parametrize(
    ("way", "tied"), [("to_empty", True), ("whole values", False), ("from rank 0", False)]
)
@on_ranks(1)
def test_one_rank(rank: int, tmp_path: Path, way: str, tied: bool) -> None:
    """Nothing is sharded."""
    _assert_trains(rank, way, tmp_path, tied)


# -- before there are values -------------------------------------------------------------------


@on_ranks(2)
def test_a_use_without_values_is_refused(rank: int) -> None:
    model = _on_meta()
    full = StateDictOptions(full_state_dict=True)
    for use in (
        lambda: loss_of(model, batch(0, rank)),
        lambda: loss_of(in_mode(model, "graph"), batch(0, rank)),
        model.unshard,
        lambda: get_model_state_dict(model, options=full),
        FSDP.summon_full_params(model).__enter__,
    ):
        error = error_of(use)
        assert "meta device" in error
        assert "to_empty" in error
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        model.to("cpu")
    model.half()
    assert all(p.is_meta and p.dtype is torch.float16 for p in model.parameters())
    model.float()
    _empty(model, Path())
    assert loss_of(model, batch(0, rank)).isfinite()


@on_ranks(2)
def test_values_that_come_in_parts(rank: int) -> None:
    """The error names a parameter without values; the user then gives the missing ones."""
    model, plain = _on_meta(), _reference()
    values = plain.state_dict()
    missing = {name: values.pop(name) for name in ("embed.weight", "blocks.0.qkv.weight")}
    model.load_state_dict(values, strict=False, assign=True)
    with pytest.raises(FSDPStateError, match=r"'embed\.weight'") as error:
        loss_of(model, batch(0, rank))
    assert "head" not in str(error.value)
    assert [name for name, p in model.named_parameters() if p.is_meta] == [*missing]
    model.load_state_dict({"embed.weight": missing["embed.weight"]}, strict=False)
    qkv = model.blocks[0].qkv.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for param, whole in (
            (qkv.weight, missing["blocks.0.qkv.weight"]),
            (qkv.bias, values["blocks.0.qkv.bias"]),
        ):
            param.copy_(distribute_tensor(whole, param.device_mesh, param.placements))
    torch.testing.assert_close(loss_of(model, batch(0, rank)), loss_of(plain, batch(0, rank)))


@on_ranks(2)
def test_hooks_buffers_and_others_values(rank: int) -> None:
    """What has values keeps them; attributes and hooks of parameters stay; buffers are loaded."""
    with torch.device("meta"):
        inner = nn.BatchNorm1d(4)
    model: Any = nn.Sequential(nn.Linear(4, 4), inner)
    values = model[0].weight.detach().clone()
    model[1].weight.label = "scale"
    fully_shard(model)
    ran: list[str] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: ran.append(name))
    model.load_state_dict(nn.BatchNorm1d(4).state_dict(prefix="1."), strict=False)
    model(torch.ones(2, 4)).sum().backward()
    assert sorted(ran) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert torch.equal(model[0].weight.full_tensor(), values)
    assert model[1].weight.label == "scale"
