"""``fully_shard`` leaves parameters on the meta device until the user gives them values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from loops import error_of
from models import batch, loss_of
from modes import in_mode
from pool import RankPool
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


def _trained(
    rank: int, world_size: int, way: str, mode: str, tied: bool, folder: Path
) -> tuple[bool, bool, float]:
    """Whether all was a DTensor on the meta device, stayed the same objects and is the same model
    as in one process after two steps."""
    model = _on_meta(tied=tied)
    params = list(model.parameters())
    is_meta = all(p.is_meta and isinstance(p, DTensor) for p in params)
    early = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    WAYS[way](model, folder)
    is_same = all(a is b for a, b in zip(params, model.parameters(), strict=True))
    plain = _reference(tied)
    if way in ("to_empty", "module by module"):  # each rank has drawn values of its own
        plain.load_state_dict({k: v.full_tensor() for k, v in model.state_dict().items()})
    runs, optimizer = (
        in_mode(model, mode),
        torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9),
    )
    early = early if is_same else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_of(runs, batch(step, rank)).backward()
        early.step()
        early.zero_grad()
        losses = [loss_of(plain, batch(step, other)) for other in range(world_size)]
        (sum(losses) / world_size).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    whole = [p.full_tensor() for p in model.parameters()]
    pairs = zip(whole, plain.parameters(), strict=True)
    return is_meta, is_same, max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_values_of_one_process(ranks: RankPool, tmp_path: Path, way: str, tied: bool) -> None:
    for is_meta, is_same, difference in ranks.run(_trained, 2, way, "eager", tied, tmp_path):
        assert is_meta
        assert is_same
        assert difference < 1e-5


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@pytest.mark.parametrize("way", ["to_empty", "module by module", "whole values"])
def test_compiled(ranks: RankPool, tmp_path: Path, way: str, mode: str) -> None:
    for is_meta, _, difference in ranks.run(_trained, 3, way, mode, False, tmp_path):
        assert is_meta
        assert difference < 1e-5


@pytest.mark.parametrize("way", ["to_empty", "module by module", "whole values", "from rank 0"])
def test_one_rank(ranks: RankPool, tmp_path: Path, way: str) -> None:
    """Nothing is sharded."""
    ((is_meta, is_same, difference),) = ranks.run(_trained, 1, way, "eager", False, tmp_path)
    assert is_meta
    assert is_same
    assert difference < 1e-5


# -- before there are values -------------------------------------------------------------------


def _used_too_early(rank: int, world_size: int) -> dict[str, str]:
    model = _on_meta()
    uses = {
        "forward": lambda: loss_of(model, batch(0, rank)),
        "graph": lambda: loss_of(in_mode(model, "graph"), batch(0, rank)),
        "unshard": model.unshard,
        "whole values": lambda: get_model_state_dict(
            model, options=StateDictOptions(full_state_dict=True)
        ),
        "summon": lambda: FSDP.summon_full_params(model).__enter__(),
        "device": lambda: model.to("cpu"),
    }
    errors = {name: error_of(use) for name, use in uses.items()}
    model.half()
    assert all(p.is_meta and p.dtype is torch.float16 for p in model.parameters())
    model.float()
    _empty(model, Path())
    assert loss_of(model, batch(0, rank)).isfinite()
    return errors


def test_a_use_without_values_is_refused(ranks: RankPool) -> None:
    for errors in ranks.run(_used_too_early, 2):
        assert "Cannot copy out of meta tensor" in errors.pop("device")
        for text in errors.values():
            assert "meta device" in text
            assert "to_empty" in text


def _in_parts(rank: int, world_size: int) -> tuple[str, list[bool], float]:
    """The error after some values have come; which parameters have none then; the difference after
    the others have been initialised by hand."""
    model, plain = _on_meta(), _reference()
    values = plain.state_dict()
    rest = {name: values.pop(name) for name in ("blocks.0.qkv.weight", "embed.weight")}
    model.load_state_dict(values, strict=False, assign=True)
    error = error_of(lambda: loss_of(model, batch(0, rank)))
    lacking = [p.is_meta for p in model.parameters()]
    model.load_state_dict({"embed.weight": rest["embed.weight"]}, strict=False)
    model.blocks[0].qkv.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for name in ("weight", "bias"):
            param, value = getattr(model.blocks[0].qkv, name), {**values, **rest}
            whole = value[f"blocks.0.qkv.{name}"]
            param.copy_(distribute_tensor(whole, param.device_mesh, param.placements))
    loss = loss_of(model, batch(0, rank))
    return error, lacking, abs(loss.item() - loss_of(plain, batch(0, rank)).item())


def test_values_that_come_in_parts(ranks: RankPool) -> None:
    names = [name for name, _ in _reference().named_parameters()]
    for error, lacking, difference in ranks.run(_in_parts, 2):
        assert FSDPStateError.__name__ in error
        assert "'embed.weight'" in error
        assert "head" not in error
        missing = [name for name, lacks in zip(names, lacking, strict=True) if lacks]
        assert missing == ["embed.weight", "blocks.0.qkv.weight"]
        assert difference < 1e-6


def _kept(rank: int, world_size: int) -> tuple[list[str], bool, bool]:
    """Which of two hooks ran, one of a parameter with values; buffers' values and attributes."""
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
    has_buffers = not any(buffer.is_meta for buffer in model.buffers())
    keeps = torch.equal(model[0].weight.full_tensor(), values) and model[1].weight.label == "scale"
    return ran, has_buffers, keeps


def test_hooks_buffers_and_others_values(ranks: RankPool) -> None:
    for ran, has_buffers, keeps in ranks.run(_kept, 2):
        assert sorted(ran) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        assert has_buffers
        assert keeps
