"""Units beside a policy's: batch norms under mixed precision; modules that are units already."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from pool import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_dynamo
from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy
from fsdp_dynamo.module_tree import plain_fqn
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

Library = Any


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([_Block(), _Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def _by_hit(library: Library, module: nn.Module) -> bool | dict[str, Any]:
    """Other precisions for some, one for a batch norm among them."""
    if isinstance(module, _Block):
        return {"mixed_precision": library.MixedPrecision(torch.float16, cast_forward_inputs=True)}
    if isinstance(module, nn.BatchNorm1d):
        return {"mixed_precision": library.MixedPrecision(torch.bfloat16)}
    return False


LIBRARIES = {upstream: upstream.wrap, fsdp_dynamo: fsdp_dynamo.wrap_policy}
POLICIES: dict[str, Callable[[Library], Any]] = {
    "classes": lambda library: LIBRARIES[library].ModuleWrapPolicy({_Block}),
    "custom": lambda library: LIBRARIES[library].CustomPolicy(partial(_by_hit, library)),
    "nothing": lambda _: lambda *_, **__: False,
}


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def _see(seen: dict[str, Any], name: str, module: Any, args: Any, out: torch.Tensor) -> None:
    seen[name] = (args[0].dtype, module.weight.dtype, out.dtype)


def _units_and_dtypes(library: Library, policy: Any, rank: int) -> Any:
    """Units; what each layer has seen; buffers and output; whether a warning named batch norms."""
    torch.manual_seed(0)
    precision = library.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = library.FullyShardedDataParallel(
            _Net(),
            auto_wrap_policy=policy,
            mixed_precision=precision,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    warned = any("BatchNorm1d" in str(one.message) for one in caught)
    seen: dict[str, Any] = {}
    for name, module in nn.Module.named_modules(model):
        if isinstance(module, nn.Linear | nn.BatchNorm1d):
            module.register_forward_hook(partial(_see, seen, plain_fqn(name)))
    out = model(_batch(rank))
    out.float().sum().backward()
    units = sorted(
        plain_fqn(name)
        for name, module in nn.Module.named_modules(model)
        if isinstance(module, library.FullyShardedDataParallel)
    )
    buffers = [
        (plain_fqn(name), buffer.dtype, buffer.tolist())
        for name, buffer in nn.Module.named_buffers(model)
    ]
    return units, seen, buffers, out.float().tolist(), warned


@pytest.mark.parametrize("policy", POLICIES)
@on_ranks(2)
def test_batch_norms_are_units_in_full_precision(rank: int, policy: str) -> None:
    theirs, ours = (
        _units_and_dtypes(library, POLICIES[policy](library), rank) for library in LIBRARIES
    )
    assert ours == theirs
    assert ours[-1]


def _low(model: nn.Module) -> FSDP:
    policy = ModuleWrapPolicy({_Block})
    return FSDP(model, auto_wrap_policy=policy, mixed_precision=MixedPrecision(torch.bfloat16))


@on_ranks(2)
def test_not_in_checkpoint_wrappers(rank: int) -> None:
    """A checkpointed block runs as one: a unit inside would be gathered in its recomputation."""
    model = _Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    wrapped = _low(model)
    torch.compile(wrapped, backend="aot_eager")(_batch(rank)).float().sum().backward()
    units = [unit.fqn for unit in wrapped._fsdp_root.units]
    assert units == ["", "norm", "blocks.0", "blocks.1", "blocks.1.1"]


@on_ranks(2)
def test_one_rank_says_that_it_shards_nothing(rank: int) -> None:
    """Unless NO_SHARD was asked for, as upstream does."""
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    for group, strategy, says in (
        (alone, ShardingStrategy.SHARD_GRAD_OP, True),
        (alone, ShardingStrategy.NO_SHARD, False),
        (None, ShardingStrategy.FULL_SHARD, False),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FSDP(_Net(), group, strategy)
        assert any("NO_SHARD" in str(one.message) for one in caught) is says
