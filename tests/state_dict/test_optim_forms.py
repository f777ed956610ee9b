"""Optimizer state dicts in all forms and directions, key by key beside FSDP1's.

FSDP1's are right on CPU with original parameters that are not sharded, and with flat parameters;
these it numbers in its own way, so that numbers are compared where nothing is sharded only.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from pool import on_ranks
from torch import nn
from torch.distributed.optim import _NamedOptimizer

import fsdp_dynamo
from fsdp_dynamo import FSDP
from fsdp_dynamo.core.dtensors import local_of

Library = Any


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(6, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.first(x)))


def _model(library: Library, kind: str, strategy: str) -> Any:
    """Units in a unit, in a plain module, or beside an ignored module."""
    model = _Plain()
    sharded = library is fsdp_dynamo or strategy == "NO_SHARD"
    wrap = functools.partial(
        library.FullyShardedDataParallel,
        auto_wrap_policy=library.wrap.ModuleWrapPolicy({nn.Sequential, nn.LayerNorm}),
        device_id=torch.device("cpu"),
        use_orig_params=sharded,
        sharding_strategy=library.ShardingStrategy[strategy],
    )
    if kind == "in a plain module":
        model.body = wrap(model.body)
        return model
    return wrap(model, ignored_modules=[model.first] if kind == "ignored" else None)


def _optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if kind == "groups":
        first = {"params": params[::2], "lr": 0.02, "weight_decay": 0.1}
        return torch.optim.Adam([first, {"params": params[1::2]}], lr=0.01)
    if kind == "adam":
        return torch.optim.Adam(params, lr=0.01)
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
    model(torch.arange(12.0).view(2, 6) / 10).square().sum().backward()
    optimizer.step()
    if kind == "odd":  # what is not as large as the parameter
        for state in optimizer.state.values():
            state.update(none=None, zero=torch.tensor(2.0), number=3)


def _answers(library: Library, kind: str, optim: str, strategy: str) -> dict[str, Any]:
    """What each function gives, by its name and arguments."""
    cls = library.FullyShardedDataParallel
    types, full_config = library.StateDictType, library.FullOptimStateDictConfig
    model = _model(library, kind, strategy)
    optimizer = _optimizer(model, optim)
    _step(model, optimizer, optim)

    def as_full(module: nn.Module, rank0_only: bool) -> Any:
        config = full_config(rank0_only=rank0_only)
        return cls.state_dict_type(module, types.FULL_STATE_DICT, None, config)

    def full(rank0_only: bool = False, more: Any = (), has_groups: bool = True) -> Any:
        given = optimizer.state_dict()
        given["state"].update(more)
        if not has_groups:
            del given["param_groups"]
        with as_full(model, rank0_only):
            return cls.optim_state_dict(model, optimizer, given, group=None)

    def loaded(rank0_only: bool) -> Any:
        state = full(rank0_only)
        other = _model(library, kind, strategy)
        into = _optimizer(other, optim)
        with as_full(other, rank0_only):
            cls.optim_state_dict_to_load(other, into, state, load_directly=True)
            return cls.optim_state_dict(other, into)

    def to_load(state: Any) -> Any:
        result = cls.optim_state_dict_to_load(model, optimizer, state)
        named = {key: value for key, value in result["state"].items() if isinstance(key, str)}
        return {"named": named, "keys": sorted(result)}

    def shard_full(**arguments: Any) -> Any:
        return cls.shard_full_optim_state_dict(full(), model, **arguments)

    def scatter(**arguments: Any) -> Any:
        state = full()
        mine = state if dist.get_rank() == 0 else None
        return cls.scatter_full_optim_state_dict(mine, model, **arguments)

    def sharded() -> Any:
        state = cls.sharded_optim_state_dict(model, optimizer)
        result = cls.flatten_sharded_optim_state_dict(state, model, optimizer)
        names = {name: sorted(one) for name, one in state["state"].items()}
        return {"saved": names, "groups": state["param_groups"], "numbers": sorted(result["state"])}

    def rekeyed(to: str, state: Any, **arguments: Any) -> Any:
        kinds = (upstream if to == "PARAM_NAME" else library).OptimStateKeyType  # both are taken
        return cls.rekey_optim_state_dict(state, kinds[to], _PLAIN, **arguments)

    plain = _optimizer(_PLAIN, optim)
    params, mine = list(model.parameters()), list(_PLAIN.parameters())
    extra = {"mine": torch.ones(2), "count": 3}
    by_number = rekeyed("PARAM_ID", full(), optim=plain)
    calls: dict[str, Callable[[], Any]] = {
        "full": full,
        "full, rank 0": lambda: full(rank0_only=True),
        "full, older name": lambda: cls.full_optim_state_dict(model, optimizer),
        "without groups": lambda: full(has_groups=False),
        "with more": lambda: full(more=extra),
        "loaded": lambda: loaded(False),
        "loaded, rank 0": lambda: loaded(True),
        "to load, without groups": lambda: to_load(full(has_groups=False)),
        "to load, with more": lambda: to_load(full(more=extra)),
        "to load, without states": lambda: to_load({"param_groups": []}),
        "numbers: shard": shard_full,
        "numbers: shard, optim": lambda: shard_full(optim=optimizer),
        "numbers: shard, input": lambda: shard_full(optim_input=params),
        "numbers: shard, groups": lambda: shard_full(optim_input=[{"params": params}]),
        "numbers: scatter": scatter,
        "numbers: scatter, group": lambda: scatter(optim=optimizer, group=dist.group.WORLD),
        "numbers: sharded": sharded,
        "rekeyed to ids": lambda: by_number,
        "rekeyed to ids, default": lambda: rekeyed("PARAM_ID", full()),
        "rekeyed to ids, input": lambda: rekeyed("PARAM_ID", full(), optim_input=mine),
        "rekeyed to names": lambda: rekeyed("PARAM_NAME", by_number, optim=plain),
        "rekeyed to names, input": lambda: rekeyed("PARAM_NAME", by_number, optim_input=mine),
        "rekeyed as it is": lambda: rekeyed("PARAM_ID", by_number),
        "rekeyed, two kinds": lambda: rekeyed("PARAM_ID", {**by_number, "state": {"a": {}, 0: {}}}),
    }
    left_out = ["numbers"] if strategy != "NO_SHARD" else []
    if optim == "odd":  # upstream's ranks wait for different tensors
        left_out += ["loaded, rank 0", "numbers: scatter"]
    return {
        name: _comparable(_attempt(call))
        for name, call in calls.items()
        if not name.startswith(tuple(left_out))
    }


_PLAIN = _Plain()


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ValueError:
        return "ValueError"


def _comparable(value: Any) -> Any:
    """Names without their order, which is that of flat parameters."""
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return sorted(value)
    return [_comparable(one) for one in value] if isinstance(value, list) else value


def _differences(theirs: Any, ours: Any, path: str) -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict) and theirs.keys() == ours.keys():
        return [d for key in theirs for d in _differences(theirs[key], ours[key], f"{path}/{key}")]
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        return [d for a, b in zip(theirs, ours, strict=True) for d in _differences(a, b, path)]
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        theirs, ours = local_of(theirs), local_of(ours)  # whole ones, where nothing is sharded
        is_like = theirs.dtype is ours.dtype and theirs.shape == ours.shape
        return [] if is_like and torch.allclose(theirs, ours) else [path]
    return [] if type(theirs) is type(ours) and theirs == ours else [path]


CASES = (
    ("whole", "adam", "FULL_SHARD"),
    ("ignored", "sgd", "FULL_SHARD"),
    ("whole", "groups", "NO_SHARD"),
    ("whole", "odd", "NO_SHARD"),
    ("in a plain module", "groups", "NO_SHARD"),
)


@on_ranks(2)
def test_forms_are_upstreams(rank: int) -> None:
    warnings.simplefilter("ignore")
    for case in CASES:
        theirs, ours = (_answers(library, *case) for library in (upstream, fsdp_dynamo))
        assert len(theirs) >= 15
        assert _differences(theirs, ours, "") == [], case


@on_ranks(2)
def test_an_optimizer_by_name(rank: int) -> None:
    """An optimizer that saves names and loads them."""
    model, other = (FSDP(_Plain()) for _ in range(2))
    optimizer, into = (
        _NamedOptimizer(m.named_parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
        for m in (model, other)
    )
    _step(model, optimizer, "")
    for _ in range(2):
        _step(other, into, "")
    state = FSDP.optim_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in _PLAIN.named_parameters()}
    FSDP.optim_state_dict_to_load(other, into, state, is_named_optimizer=True, load_directly=True)
    for one, two in zip(optimizer.state.values(), into.state.values(), strict=True):
        assert torch.equal(one["momentum_buffer"], two["momentum_buffer"])
