"""fully_shard and replicate: units without a wrapper, in the wrapper's order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from loops import whole
from models import Block, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed._composable.replicate import replicate as replicate_of_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_dynamo import (
    FSDP,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPError,
    FSDPModule,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    record_events,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})


def _is_sharded(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor)


def _sharded(kind: str, num_blocks: int = 2, **kwargs: Any) -> nn.Module:
    """A model of units: by the wrapper, by a policy, or block by block."""
    model = make_transformer(num_blocks=num_blocks)
    if kind == "wrapper":
        return wrap(model, **kwargs)
    if kind == "policy":
        return fully_shard(model, policy=POLICY, **kwargs)
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def _run(rank: int, kind: str, mode: str, **kwargs: Any) -> tuple[Any, list[Any], int]:
    """Losses and norms, then the events and the peak of one more step."""
    num_blocks = 2 if mode == "eager" else 1  # compiling takes as long as there are blocks
    model = in_mode(_sharded(kind, num_blocks, **kwargs), mode)
    losses = train(model, rank, steps=2, clip=1.0)
    with record_events() as log:
        loss_of(model, batch(rank, 9)).backward()
    return losses, log.keys(), log.peak_unsharded_bytes()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_events_are_the_wrappers(rank: int, mode: str) -> None:
    wrapper = _run(rank, "wrapper", mode)
    assert {kind for kind, *_ in wrapper[1]} >= {"unshard", "all_gather", "reduce_scatter"}
    assert _run(rank, "policy", mode) == wrapper
    if mode == "eager":
        assert _run(rank, "one by one", mode) == wrapper
        low = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
        assert _run(rank, "policy", mode, **low) == _run(rank, "wrapper", mode, **low)


@on_ranks(2)
def test_order_is_that_of_modules(rank: int) -> None:
    """Nested units and their parameters; by the wrapper, by a policy and one by one."""
    classes = (Block, nn.LayerNorm)
    policy = ModuleWrapPolicy({*classes})
    by_hand = make_transformer(num_blocks=2)
    order = [name for name, m in by_hand.named_modules() if not name or isinstance(m, classes)]
    for module in reversed([*by_hand.modules()]):  # children before their parents
        if isinstance(module, classes):
            fully_shard(module)
    wrapped = FSDP(make_transformer(num_blocks=2), auto_wrap_policy=policy)
    composable = fully_shard(make_transformer(num_blocks=2), policy=policy)
    found = [
        [(unit.fqn, [original.fqn for original in unit.originals()]) for unit in root.units]
        for root in (m._fsdp_root for m in (wrapped, composable, fully_shard(by_hand)))
    ]
    assert [fqn for fqn, _ in found[0]] == order
    assert found[1] == found[0]
    assert found[2] == found[0]


# -- replicate -------------------------------------------------------------------------------------


@on_ranks(2)
def test_torchs_replicate_above_fully_shard(rank: int) -> None:
    expected = ddp_losses(rank, num_blocks=3)[0]
    model = make_transformer(num_blocks=3)
    for block in model.blocks[:2]:
        fully_shard(block)
    replicate_of_torch(model)
    assert train(model, rank)[0] == pytest.approx(expected, rel=1e-5)


# -- the module stays the user's -------------------------------------------------------------------


class _Talker(nn.Module):
    """Its method calls its forward, as ``generate()`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.bias

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self(x)) + self.bias


def _assert_holds(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """The state dict of a sharded model has these names, in this order, and values."""
    state = model.state_dict()
    assert list(state) == list(expected)
    assert [key for key in state if not torch.equal(whole(state[key]), expected[key])] == []


@on_ranks(2)
def test_the_module_stays_the_users(rank: int) -> None:
    torch.manual_seed(3)
    model = _Talker()
    plain = copy.deepcopy(model)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.bias.shape))
    names = [name for name, _ in model.named_parameters()]
    assert fully_shard(model.inner[0]) is model.inner[0]
    fully_shard(model)
    model.register_forward_method("twice")
    assert isinstance(model, _Talker)
    assert type(model).__name__ == "FSDP_Talker"
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model.inner[:1]) is nn.Sequential
    # The wrapper's static methods would hide methods of the user's class.
    assert not hasattr(model, "summon_full_params")
    assert not hasattr(model, "state_dict_type")

    before = {m: dict(m.__dict__) for m in model.modules()}
    are_units = [isinstance(m, FSDPModule) for m in model.modules()]
    assert are_units == [True, False, True, False, False]
    assert all(dict(m.__dict__) == attributes for m, attributes in before.items())

    x = torch.ones(2, 4)
    torch.testing.assert_close(model.twice(x), plain.twice(x))
    assert seen == [(4,), (4,)]  # the user's hooks see whole parameters
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert not copied(x).any()
    torch.testing.assert_close(model(x), plain(x))
    _assert_holds(model, plain.state_dict())
    loaded = fully_shard(copy.deepcopy(plain))
    loaded.load_state_dict({key: value + 1 for key, value in model.state_dict().items()})
    _assert_holds(loaded, {key: value + 1 for key, value in plain.state_dict().items()})
    assert all(map(_is_sharded, model.parameters()))


# -- arguments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Overriding(MixedPrecisionPolicy):
    """``MixedPrecisionPolicy`` of torch 2.15: biases compute in another dtype."""

    wanted: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype_override_fn", self._override)

    def _override(self, param: nn.Parameter) -> torch.dtype | None:
        return self.wanted if param.ndim == 1 else None


@on_ranks(2)
def test_arguments(rank: int) -> None:
    """Arguments of FSDP2 choose the strategy and the dtypes."""
    mesh = init_device_mesh("cpu", (1, 2))
    for kwargs, strategy in (
        ({"reshard_after_forward": 1}, "SHARD_GRAD_OP"),
        ({"mesh": mesh}, "HYBRID_SHARD"),
        ({"mesh": mesh, "reshard_after_forward": False}, "HYBRID_SHARD_ZERO2"),
        ({"reshard_after_forward": 2}, "FULL_SHARD"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "FULL_SHARD"),
    ):
        model = fully_shard(nn.Linear(2, 2), **kwargs)
        assert model._fsdp_unit.config.sharding_strategy.name == strategy
    overriding = _Overriding(param_dtype=torch.bfloat16, wanted=torch.float32)
    flats = fully_shard(nn.Linear(2, 2), mp_policy=overriding)._fsdp_unit.flats
    assert [flat.param_dtype for flat in flats] == [torch.bfloat16, torch.float32]


@on_ranks(2)
def test_refused_arguments(rank: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    two_ways = {"reshard_after_forward": True, "strategy": ShardingStrategy.NO_SHARD}
    two_precisions = {"mp_policy": policy, "mixed_precision": MixedPrecision()}
    two_offloads = {"cpu_offload": CPUOffload(), "offload_policy": OffloadPolicy()}
    overriding = _Overriding(param_dtype=torch.bfloat16, wanted=torch.half)
    linear = partial(nn.Linear, 3, 2)
    wrong: tuple[tuple[str, Callable[[], Any], dict[str, Any]], ...] = (
        ("no unit yet", lambda: fully_shard(linear()), {}),
        ("a module with a forward", lambda: nn.ModuleList([linear()]), {}),
        ("a torch.nn.Module", lambda: ["no module"], {}),
        ("modules that become one unit", list, {}),
        ("no strategy beside it", linear, two_ways),
        ("True, False or None", linear, {"reshard_after_forward": "2"}),
        ("a divisor of the number of shards, 2", linear, {"reshard_after_forward": 3}),
        ("no mixed_precision beside it", linear, two_precisions),
        ("no cpu_offload beside it", linear, two_offloads),
        (r"None, Shard\(0\), or Shard", linear, {"shard_placement_fn": lambda _: Shard(1)}),
        ("the parameter's own torch.float32", linear, {"mp_policy": overriding}),
    )
    for words, make, kwargs in wrong:
        with pytest.raises(FSDPError, match=words):
            fully_shard(make(), **kwargs)


class Stack(nn.Module, Sequence[nn.Module]):  # type: ignore[misc]
    """A module that is a sequence of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        return self.layers[index]


@on_ranks(2)
def test_a_module_that_is_a_sequence_is_one_module(rank: int) -> None:
    model = fully_shard(Stack())
    assert isinstance(model, FSDPModule)
    assert all(map(_is_sharded, model.parameters()))
