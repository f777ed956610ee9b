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
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fsdp_dynamo
from fsdp_dynamo import FSDP, MixedPrecision
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


def _module_policy(library: Library) -> Any:
    policies = upstream.wrap if library is upstream else fsdp_dynamo.wrap_policy
    return policies.ModuleWrapPolicy({_Block})


def _custom_policy(library: Library) -> Any:
    policies = upstream.wrap if library is upstream else fsdp_dynamo.wrap_policy
    return policies.CustomPolicy(lambda module: _by_hit(library, module))


POLICIES: tuple[Callable[[Library], Any], ...] = (
    _module_policy,
    _custom_policy,
    lambda _: lambda *_, **__: False,
)


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))


def _see(seen: dict[str, Any], name: str, module: Any, args: Any, out: torch.Tensor) -> None:
    seen[name] = (args[0].dtype, module.weight.dtype, out.dtype)


def _units_and_dtypes(library: Library, policy: Any, rank: int) -> Any:
    """Units; what each layer has seen; buffers and output; whether a warning named batch norms."""
    torch.manual_seed(0)
    precision = library.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    arguments = {"device_id": torch.device("cpu")} if library is upstream else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = library.FullyShardedDataParallel(
            _Net(),
            auto_wrap_policy=policy,
            mixed_precision=precision,
            use_orig_params=True,
            **arguments,
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


def _beside_upstream(rank: int, world_size: int) -> list[tuple[Any, Any]]:
    return [
        tuple(_units_and_dtypes(one, make(one), rank) for one in (upstream, fsdp_dynamo))
        for make in POLICIES
    ]


def test_batch_norms_are_units_in_full_precision(ranks: RankPool) -> None:
    for answers in ranks.run(_beside_upstream, 2):
        for theirs, ours in answers:
            assert ours == theirs
            assert ours[-1]


def _grads(rank: int, mode: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wrapped = FSDP(
        _Net(),
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        mixed_precision=MixedPrecision(torch.bfloat16),
    )
    in_mode(wrapped, mode)(_batch(rank)).float().pow(2).sum().backward()
    with FSDP.summon_full_params(wrapped, with_grads=True, writeback=False):
        found = {fqn: p.grad.clone() for fqn, p in wrapped.named_parameters() if p.grad is not None}
    return found | {fqn: buffer.clone() for fqn, buffer in wrapped.named_buffers()}


def _compiled(rank: int, world_size: int) -> list[Any]:
    return [_grads(rank, mode) for mode in MODES]


def test_compiled(ranks: RankPool) -> None:
    for eager, *others in ranks.run(_compiled, 2):
        for other in others:
            torch.testing.assert_close(other, eager, rtol=2e-2, atol=2e-2)


def _checkpointed(rank: int, world_size: int) -> list[str]:
    model = _Net()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    wrapped = FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({_Block}),
        mixed_precision=MixedPrecision(torch.bfloat16),
    )
    torch.compile(wrapped, backend="aot_eager")(_batch(rank)).float().sum().backward()
    return [unit.fqn for unit in wrapped._fsdp_root.units]


def test_not_in_checkpoint_wrappers(ranks: RankPool) -> None:
    """A checkpointed block runs as one: a unit inside would be gathered in its recomputation."""
    for units in ranks.run(_checkpointed, 2):
        assert units == ["", "norm", "blocks.0", "blocks.1", "blocks.1.1"]


def _says_no_shard(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    """Whether a warning names NO_SHARD: on one rank, asked for there, on all ranks; upstream's."""
    alone = [dist.new_group([one]) for one in range(world_size)][rank]
    found: list[list[bool]] = []
    for library in (upstream, fsdp_dynamo):
        device = {"device_id": torch.device("cpu")} if library is upstream else {}
        said = []
        for group, strategy in (
            (alone, library.ShardingStrategy.SHARD_GRAD_OP),
            (alone, library.ShardingStrategy.NO_SHARD),
            (None, library.ShardingStrategy.FULL_SHARD),
        ):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                library.FullyShardedDataParallel(
                    _Net(), process_group=group, sharding_strategy=strategy, **device
                )
            said.append(any("NO_SHARD" in str(one.message) for one in caught))
        found.append(said)
    return found[0], found[1]


def test_one_rank_says_that_it_shards_nothing(ranks: RankPool) -> None:
    for theirs, ours in ranks.run(_says_no_shard, 2):
        assert ours == theirs == [True, False, False]


def _wraps_units(rank: int, world_size: int) -> None:
    model = _Net()
    model.blocks[0] = FSDP(model.blocks[0])
    for cls in (_Block, FSDP):
        with pytest.raises(ValueError, match=r"module 'blocks.0': expected a policy that chooses"):
            FSDP(model, auto_wrap_policy=ModuleWrapPolicy({cls, nn.BatchNorm1d}))
    wrapped = FSDP(model, auto_wrap_policy=lambda module, **_: module is not model.blocks[0])
    assert isinstance(wrapped.module.first, FSDP)


def test_modules_that_are_units_already(ranks: RankPool) -> None:
    """A policy may not choose them, nor what is in them; others it may."""
    ranks.run(_wraps_units, 2)
