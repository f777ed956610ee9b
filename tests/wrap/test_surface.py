"""Import paths, policies and attributes by upstream's names, beside upstream on CPU ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
import torch.distributed.fsdp.wrap as upstream_wrap
from loops import different
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import fsdp_dynamo
import fsdp_dynamo.wrap
from fsdp_dynamo import (
    FSDP,
    FSDPStateError,
    FSDPTypeError,
)
from fsdp_dynamo.module_tree import plain_fqn

Library = Any
BOTH: tuple[tuple[Library, Library], ...] = (
    (upstream, upstream_wrap),
    (fsdp_dynamo, fsdp_dynamo.wrap),
)
CPU = torch.device("cpu")


class _Net(nn.Module):
    """Containers, a leaf of size-based policies, and sizes on both sides of a bound."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.list = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))])
        self.list.append(nn.Linear(8, 8))
        self.dict = nn.ModuleDict({"x": nn.Linear(8, 8)})
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for module in self.list:
            x = module(x)
        x = self.dict["x"](x)
        out: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return out


def _by_size(library: Library, **arguments: Any) -> Any:
    return functools.partial(library.size_based_auto_wrap_policy, **arguments)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


POLICIES: dict[str, Callable[[Library], Any]] = {
    "always": lambda w: w.always_wrap_policy,
    "size": lambda w: _by_size(w, min_num_params=100),
    "size, other classes": lambda w: _by_size(
        w, min_num_params=100, force_leaf_modules={nn.Sequential}, exclude_wrap_modules=set()
    ),
    "function": lambda w: functools.partial(w.lambda_auto_wrap_policy, lambda_fn=_is_linear),
    "either": lambda w: functools.partial(
        w._or_policy,
        policies=[
            w.ModuleWrapPolicy({nn.Sequential}),
            functools.partial(w.lambda_auto_wrap_policy, lambda_fn=_is_linear),
        ],
    ),
    "custom, empty dict": lambda w: w.CustomPolicy(
        lambda m: {} if isinstance(m, nn.Sequential) else _is_linear(m)
    ),
    "custom, containers": lambda w: w.CustomPolicy(
        lambda m: isinstance(m, (nn.ModuleDict, nn.ModuleList, nn.Linear))
    ),
    "custom, nonsense": lambda w: w.CustomPolicy(lambda m: 3),
}


def _units(library: Library, policy: Any, ignores: bool) -> list[str] | set[str]:
    """Names of the units, after a step; or the kinds of the error."""
    net = _Net()
    arguments = {"ignored_modules": [net.attention]} if ignores else {}
    try:
        model = library.FullyShardedDataParallel(
            net, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True, **arguments
        )
        model(torch.ones(2, 8)).sum().backward()
    except (ValueError, RuntimeError) as error:
        return {kind.__name__ for kind in (ValueError, RuntimeError) if isinstance(error, kind)}
    named = nn.Module.named_modules(model)
    found = [n for n, m in named if isinstance(m, library.FullyShardedDataParallel)]
    return sorted(plain_fqn(name) for name in found)


@on_ranks(2)
def test_policies_choose_as_upstreams_do(rank: int) -> None:
    warnings.simplefilter("ignore")
    for name, make in POLICIES.items():
        for ignores in (False, True) if "size" in name else (True,):
            theirs, ours = (_units(library, make(wrap), ignores) for library, wrap in BOTH)
            if isinstance(theirs, set):  # kinds of an error, to which ours adds
                assert theirs <= set(ours), (name, ignores)
            else:
                assert ours == theirs, (name, ignores)
                assert _units(fsdp_dynamo, make(upstream_wrap), ignores) == theirs, name


SETTINGS: dict[str, Callable[[Library], dict[str, Any]]] = {
    "NO_SHARD": lambda u: {"sharding_strategy": u.ShardingStrategy.NO_SHARD},
    "SHARD_GRAD_OP": lambda u: {
        "sharding_strategy": u.ShardingStrategy.SHARD_GRAD_OP,
        "backward_prefetch": None,
        "forward_prefetch": True,
        "limit_all_gathers": False,
    },
    "precision": lambda u: {
        "mixed_precision": u.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    },
    "hybrid": lambda u: {
        "sharding_strategy": u.ShardingStrategy.HYBRID_SHARD,
        "device_mesh": init_device_mesh("cpu", (dist.get_world_size() // 2, 2)),
    },
    "alone": lambda _: {
        "process_group": dist.new_group([dist.get_rank()], use_local_synchronization=True)
    },
}
ATTRIBUTES = (
    "sharding_strategy",
    "cpu_offload",
    "mixed_precision",
    "backward_prefetch",
    "forward_prefetch",
    "limit_all_gathers",
    "rank",
    "world_size",
    "compute_device",
    "training_state",
)


OURS_ONLY = {"_pin_memory", "output_dtype", "_param_dtype_override_fn"}
"""Fields of FSDP2's policies, which the dataclasses of FSDP1 lack."""


def _comparable(value: object) -> object:
    fields = {k: v for k, v in getattr(value, "__dict__", {}).items() if k not in OURS_ONLY}
    return getattr(value, "name", None) or fields or str(value)


def _attributes(library: Library, setting: str) -> list[Any]:
    """Attributes of all units, and their states through a step and a summon."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    cls = library.FullyShardedDataParallel
    policy = library.wrap.ModuleWrapPolicy({nn.Linear, nn.Sequential})
    arguments = {"forward_prefetch": False, **SETTINGS[setting](library)}
    model = cls(net, auto_wrap_policy=policy, device_id=CPU, use_orig_params=True, **arguments)
    units = cls.fsdp_modules(model)
    seen: list[Any] = [
        [_comparable(getattr(unit, name)) for name in ATTRIBUTES]
        + [dist.get_process_group_ranks(unit.process_group), unit.check_is_root()]
        + [[param.dim() for param in unit.params]]
        for unit in units
    ]

    def states(*_: object) -> None:
        seen.append([unit.training_state.name for unit in units])

    model.module[1].module[0].module.register_forward_hook(states)
    out = model(torch.ones(2, 4))
    states()
    out.register_hook(states)
    out.sum().backward()
    states()
    for part, recurse in ((model, True), (units[2], False)):
        with cls.summon_full_params(part, recurse=recurse):
            states()
    return seen


@on_ranks(4)
def test_attributes_are_upstreams(rank: int) -> None:
    warnings.simplefilter("ignore")
    for setting in SETTINGS:
        theirs, ours = (_attributes(library, setting) for library, _ in BOTH)
        assert ours == theirs, setting


@on_ranks(2)
def test_setting_attributes(rank: int) -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(4, 4))), forward_prefetch=True, device_id="cpu")
    for wrapper in (model, model[0]):
        wrapper.backward_prefetch = upstream.BackwardPrefetch.BACKWARD_POST
        assert wrapper.backward_prefetch is fsdp_dynamo.BackwardPrefetch.BACKWARD_POST
        with pytest.raises(FSDPTypeError, match="backward_prefetch"):
            wrapper.backward_prefetch = "pre"
        wrapper.forward_prefetch = wrapper.limit_all_gathers = False
        assert not wrapper.forward_prefetch
        for name in ("sharding_strategy", "process_group", "training_state", "params"):
            with pytest.raises(FSDPStateError, match=name):
                setattr(wrapper, name, nn.Parameter(torch.ones(1)))
    inner = nn.Linear(2, 2)
    assert FSDP(checkpoint_wrapper(inner)).module is inner  # as upstream's


@on_ranks(2)
def test_modules_wrapped_where_they_are_built(rank: int) -> None:
    answers: list[Any] = []
    for library, wrap in BOTH:
        cls = library.FullyShardedDataParallel
        settings = {"process_group": dist.new_group(), "device_id": CPU, "use_orig_params": True}
        no_shard = library.ShardingStrategy.NO_SHARD
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with wrap.enable_wrap(wrapper_cls=cls, **settings):
                inner = wrap.wrap(nn.Linear(4, 4), sharding_strategy=no_shard)
                blocks = wrap.wrap(nn.ModuleList([inner, wrap.wrap(nn.Linear(4, 4))]))
                with pytest.raises(NotImplementedError):
                    wrap.enable_wrap(wrapper_cls=cls).__enter__()
        assert type(wrap.wrap(nn.Linear(4, 4))) is nn.Linear
        assert type(blocks) is cls
        out = blocks[1](blocks[0](torch.ones(1, 4)))
        answers.append(([block.sharding_strategy.name for block in blocks], out.tolist()))
    theirs, ours = answers
    assert ours == theirs


@on_ranks(4)
def test_a_group_smaller_than_the_world(rank: int) -> None:
    """Half of the ranks train; rank 0's plain state is scattered to them, and gathered again."""
    warnings.simplefilter("ignore")
    norms, states = [], []
    for library, wrap in BOTH:
        cls, kind = library.FullyShardedDataParallel, library.fully_sharded_data_parallel
        half = dist.new_group([0, 1])
        torch.manual_seed(0)
        plain, net = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(2))
        before = torch.optim.Adam(plain.parameters(), lr=0.1)
        plain(torch.ones(1, 4)).square().sum().backward()
        before.step()
        if rank >= 2:
            continue
        policy = wrap.ModuleWrapPolicy({nn.Linear})
        kept = library is fsdp_dynamo  # upstream's original parameters are wrong on CPU
        model = cls(net, half, auto_wrap_policy=policy, device_id=CPU, use_orig_params=kept)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        names = kind.OptimStateKeyType.PARAM_NAME
        whole = cls.rekey_optim_state_dict(before.state_dict(), names, plain)
        mine = whole if rank == 0 else None
        state = cls.scatter_full_optim_state_dict(mine, model, optim=optimizer, group=half)
        optimizer.load_state_dict(state)
        for _ in range(2):
            model(torch.ones(1, 4) + rank).square().sum().backward()
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        saved = cls.full_optim_state_dict(model, optimizer, group=half).get("state", {})
        moments = {f"{name} avg": one["exp_avg"] for name, one in saved.items()}
        norms.append(float(norm))
        states.append({**model.state_dict(), **moments})
    if rank < 2:
        assert norms[1] == pytest.approx(norms[0])
        assert different(states[1], states[0]) == []
