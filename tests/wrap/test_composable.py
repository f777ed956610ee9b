"""fully_shard and replicate: units without a wrapper, in the wrapper's order."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Block, batch, ddp_losses, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from fsdp_dynamo import (
    FSDP,
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    record_events,
    replicate,
)
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({Block})


def _is_sharded(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor)


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _sharded(kind: str, model: nn.Module, **kwargs: Any) -> nn.Module:
    """A model of units: by the wrapper, by a policy, or block by block."""
    if kind == "wrapper":
        return wrap(model, **kwargs)
    if "sharding_strategy" in kwargs:
        kwargs["strategy"] = kwargs.pop("sharding_strategy")
    if kind == "policy":
        return fully_shard(model, policy=POLICY, **kwargs)
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def _run(
    rank: int, world_size: int, kind: str, mode: str, kwargs: dict[str, Any]
) -> tuple[Any, list[Any], int]:
    """Losses and norms, then the events and the peak of one more step."""
    model = in_mode(_sharded(kind, make_transformer(num_blocks=2), **kwargs), mode)
    losses = train(model, rank, steps=3, clip=1.0)
    with record_events() as log:
        loss_of(model, batch(rank, 9)).backward()
    return losses, log.keys(), log.peak_unsharded_bytes()


@pytest.mark.parametrize(
    "mode", ["eager", "hooks", "graph", pytest.param("graph-inductor", marks=pytest.mark.slow)]
)
def test_events_are_the_wrappers(ranks: RankPool, mode: str) -> None:
    wrapper = ranks.run(_run, 2, "wrapper", mode, {})
    for kind in ("policy", "one by one") if mode == "eager" else ("policy",):
        assert ranks.run(_run, 2, kind, mode, {}) == wrapper
    assert {kind for kind, *_ in wrapper[0][1]} >= {"unshard", "all_gather", "reduce_scatter"}


def test_events_are_the_wrappers_in_low_precision(ranks: RankPool) -> None:
    kwargs = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
    wrapper = ranks.run(_run, 2, "wrapper", "eager", kwargs)
    assert ranks.run(_run, 2, "policy", "eager", kwargs) == wrapper


class _Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.subsubmod = _Leaf()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.subsubmod(x) + self.weight


class _Tree(nn.Module):
    """``mod(submod1, submod2(subsubmod))``."""

    def __init__(self) -> None:
        super().__init__()
        self.submod1 = _Leaf()
        self.submod2 = _Outer()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.submod2(self.submod1(x)) * self.weight


def _traversal(rank: int, world_size: int) -> list[tuple[list[str], list[str]]]:
    """Units and original parameters in order; wrapper and composable, by policy and by hand."""
    policy = ModuleWrapPolicy({_Leaf, _Outer})
    by_hand = _Tree()
    for module in (by_hand.submod2.subsubmod, by_hand.submod1, by_hand.submod2, by_hand):
        fully_shard(module)
    found = []
    for model in (FSDP(_Tree(), auto_wrap_policy=policy), fully_shard(_Tree(), policy=policy)):
        found.append(model)
    return [
        (
            [unit.fqn for unit in model._fsdp_root.units],
            [f"{u.fqn}:{o.fqn}" for u in model._fsdp_root.units for o in u.originals()],
        )
        for model in (*found, by_hand)
    ]


def test_order_is_that_of_modules(ranks: RankPool) -> None:
    order = ["", "submod1", "submod2", "submod2.subsubmod"]
    for found in ranks.run(_traversal, 2):
        assert found == [(order, [f"{fqn}:weight" for fqn in order])] * 3


# -- replicate -------------------------------------------------------------------------------------


def _replicated(rank: int, world_size: int, whose: str, mode: str) -> tuple[Any, Any, list[str]]:
    """One block replicated below fully_shard; losses of DDP, ours, and what the root holds."""
    from torch.distributed._composable.replicate import replicate as replicate_of_torch

    expected = ddp_losses(rank, num_blocks=3)[0]
    model = make_transformer(num_blocks=3)
    (replicate if whose == "ours" else replicate_of_torch)(model.blocks[1])
    fully_shard(model, policy=lambda module, recurse, **_: recurse or module is model.blocks[0])
    held = [f"{u.fqn}.{o.fqn}" for u in model._fsdp_root.units[:1] for o in u.originals()]
    return expected, train(in_mode(model, mode), rank)[0], held


@pytest.mark.parametrize(
    ("whose", "mode"),
    [("ours", "eager"), ("ours", "hooks"), ("ours", "graph"), ("torch's", "eager")],
)
def test_replicate_below_fully_shard(ranks: RankPool, whose: str, mode: str) -> None:
    for expected, got, held in ranks.run(_replicated, 2, whose, mode):
        assert got == pytest.approx(expected, rel=1e-5)
        assert not any("blocks.1." in name for name in held)
        assert any("blocks.2." in name for name in held)


def _replicated_above(rank: int, world_size: int) -> tuple[Any, Any]:
    """Losses of DDP and of blocks that are sharded, in a model that torch replicates."""
    from torch.distributed._composable.replicate import replicate as replicate_of_torch

    expected = ddp_losses(rank, num_blocks=3)[0]
    model = make_transformer(num_blocks=3)
    for block in model.blocks[:2]:
        fully_shard(block)
    replicate_of_torch(model)
    return expected, train(model, rank)[0]


def test_torchs_replicate_above_fully_shard(ranks: RankPool) -> None:
    for expected, got in ranks.run(_replicated_above, 2):
        assert got == pytest.approx(expected, rel=1e-5)


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


def _stays_the_users(rank: int, world_size: int) -> dict[str, bool]:
    torch.manual_seed(3)
    model = _Talker()
    plain = copy.deepcopy(model)
    seen: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.bias.shape))
    params = dict(model.named_parameters())
    returned = fully_shard(model.inner[0])
    fully_shard(model)
    model.register_forward_method("twice")
    before = {m: dict(m.__dict__) for m in model.modules()}
    asked = [isinstance(m, FSDPModule) for m in model.modules()]
    unchanged = all(dict(m.__dict__) == d for m, d in before.items())
    x = torch.ones(2, 4)
    twice = torch.allclose(model.twice(x), plain.twice(x))
    whole = all(shape == (4,) for shape in seen)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    state = model.state_dict()
    loaded = fully_shard(copy.deepcopy(plain))
    loaded.load_state_dict({key: value + 1 for key, value in state.items()})
    return {
        "the same object": returned is model.inner[0],
        "its class": isinstance(model, _Talker) and type(model).__name__ == "FSDP_Talker",
        "parameters have the same names": list(dict(model.named_parameters())) == list(params),
        "two units": asked == [True, False, True, False, False],
        "asking changes nothing": unchanged,
        "no static methods of the wrapper": not hasattr(model, "summon_full_params")
        and not hasattr(model, "state_dict_type"),
        "a method that calls the module": twice,
        "the user's hooks see whole parameters": whole and len(seen) == 2,
        "slices are plain": type(model.inner[:1]) is nn.Sequential,
        "a copy is another model": torch.allclose(model(x), plain(x)) and not copied(x).abs().sum(),
        "state dict": list(state) == list(plain.state_dict())
        and all(torch.equal(v, _whole(state[k])) for k, v in plain.state_dict().items()),
        "loaded": all(
            torch.equal(_whole(v), _whole(state[k]) + 1) for k, v in loaded.state_dict().items()
        ),
        "no summon left": all(map(_is_sharded, model.parameters())),
    }


def test_the_module_stays_the_users(ranks: RankPool) -> None:
    for found in ranks.run(_stays_the_users, 2):
        assert [what for what, holds in found.items() if not holds] == []


def _summoned(rank: int, world_size: int, mode: str) -> dict[str, bool]:
    """Whole parameters between two steps of a model without a wrapper."""
    plain = make_transformer(num_blocks=2)
    model = fully_shard(make_transformer(num_blocks=2), policy=POLICY)
    run = in_mode(model, mode)
    expected, got = [train(plain, 0, steps=2)[0]], [train(run, 0, steps=2)[0]]
    with FSDP.summon_full_params(model, with_grads=True):
        pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
        values = all(torch.allclose(p, q, 1e-5, 1e-6) for p, q in pairs)
        grads = all(torch.allclose(p.grad, q.grad, 1e-4, 1e-6) for p, q in pairs)
        with torch.no_grad():
            model.head.weight.mul_(3.0)
            plain.head.weight.mul_(3.0)
    sharded = all(map(_is_sharded, model.parameters()))
    with FSDP.summon_full_params(model.blocks[0], writeback=False):
        weights = (model.blocks[0].up.weight, model.head.weight)
        one_block = [*map(_is_sharded, weights)] == [False, True]
        model.blocks[0].up.weight.detach().zero_()
    expected.append(train(plain, 0, steps=2)[0])
    got.append(train(run, 0, steps=2)[0])
    return {
        "values": values,
        "gradients": grads,
        "sharded again": sharded,
        "one block": one_block,
        "losses": got == [pytest.approx(losses, rel=1e-5) for losses in expected],
    }


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_whole_parameters(ranks: RankPool, mode: str) -> None:
    for found in ranks.run(_summoned, 2, mode):
        assert [what for what, holds in found.items() if not holds] == []


ORDERS = [
    ("shard", "compile"),
    ("compile", "shard"),
    ("shard", "checkpoint"),
    ("checkpoint", "shard", "compile"),
    ("compile", "checkpoint", "shard"),
]


def _names(rank: int, world_size: int, order: tuple[str, ...]) -> tuple[bool, bool, Any, Any]:
    plain = make_transformer(num_blocks=2, tied=True)
    expected = ddp_losses(rank, num_blocks=2, tied=True)[0]
    model: nn.Module = make_transformer(num_blocks=2, tied=True)
    for step in order:
        if step == "shard":
            model = fully_shard(model, policy=POLICY)
        elif step == "compile":
            model = torch.compile(model, backend="aot_eager")
        else:
            apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    same = list(state) == list(plain.state_dict()) and all(
        torch.equal(value, _whole(state[key])) for key, value in plain.state_dict().items()
    )
    model.load_state_dict({key: value + 1 for key, value in state.items()})
    loaded = all(
        torch.equal(_whole(v), _whole(state[k]) + 1) for k, v in model.state_dict().items()
    )
    model.load_state_dict(plain.state_dict())
    return same, loaded, expected, train(model, rank)[0]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: "-".join(order))
def test_names_and_losses(ranks: RankPool, order: tuple[str, ...]) -> None:
    for same, loaded, expected, losses in ranks.run(_names, 2, order):
        assert same
        assert loaded
        assert losses == pytest.approx(expected, rel=1e-5)


# -- unshard, reshard, accumulation ----------------------------------------------------------------


def _by_hand(rank: int, world_size: int) -> tuple[list[Any], list[Any], list[str], list[str]]:
    """Unshard and reshard by the user; accumulation with and without reductions."""
    expected = ddp_losses(rank, num_blocks=2)[0]
    model = fully_shard(make_transformer(num_blocks=2), policy=POLICY, forward_prefetch=False)
    with record_events() as log:
        handle = model.blocks[1].unshard(async_op=True)
        handle.wait()
        model.blocks[0].unshard()
        with torch.no_grad():
            model(batch(rank, 0))
        model.blocks[0].unshard()
        model.blocks[0].reshard()
    gathers = [(event.unit, event.kind) for event in log if event.kind in ("all_gather", "reshard")]
    losses = train(model, rank)[0]
    model.set_requires_gradient_sync(False)
    with record_events() as kept:
        loss_of(model, batch(rank, 0)).backward()
    model.set_requires_gradient_sync(True)
    with record_events() as reduced:
        loss_of(model, batch(rank, 1)).backward()
    reductions = [
        [e.unit for e in events if e.kind == "reduce_scatter"] for events in (kept, reduced)
    ]
    return [expected, losses], gathers, *reductions


def test_unshard_and_reshard_by_hand(ranks: RankPool) -> None:
    for (expected, losses), gathers, kept, reduced in ranks.run(_by_hand, 2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert gathers == [
            ("blocks.1", "all_gather"),
            ("blocks.0", "all_gather"),
            ("", "all_gather"),
            ("blocks.0", "reshard"),
            ("blocks.1", "reshard"),
            ("", "reshard"),
            ("blocks.0", "all_gather"),
            ("blocks.0", "reshard"),
        ]
        assert kept == []
        assert reduced == ["blocks.1", "blocks.0", ""]


# -- arguments -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Overriding(MixedPrecisionPolicy):
    """``MixedPrecisionPolicy`` of torch 2.15: biases compute in another dtype."""

    wanted: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "param_dtype_override_fn", self._override)

    def _override(self, param: nn.Parameter) -> torch.dtype | None:
        return self.wanted if param.ndim == 1 else None


def _arguments(rank: int, world_size: int) -> tuple[list[str], list[Any]]:
    """What is refused, and how upstream's spellings are read."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrong: dict[str, Any] = {
        "no unit yet": lambda: fully_shard(fully_shard(nn.Linear(2, 2))),
        "a module with a forward": lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)])),
        "a torch.nn.Module": lambda: fully_shard(["no module"]),
        "modules that become one unit": lambda: fully_shard([]),
        "no strategy beside it": lambda: fully_shard(
            nn.Linear(2, 2), reshard_after_forward=True, strategy=ShardingStrategy.NO_SHARD
        ),
        "True, False or None": lambda: fully_shard(nn.Linear(2, 2), reshard_after_forward="2"),
        "a divisor of the number of shards, 2": lambda: fully_shard(
            nn.Linear(2, 2), reshard_after_forward=3
        ),
        "no mixed_precision beside it": lambda: fully_shard(
            nn.Linear(2, 2), mp_policy=half, mixed_precision=MixedPrecision()
        ),
        "no cpu_offload beside it": lambda: fully_shard(
            nn.Linear(2, 2), cpu_offload=CPUOffload(), offload_policy=OffloadPolicy()
        ),
        "None, Shard(0), or Shard of a dimension": lambda: fully_shard(
            nn.Linear(3, 2), shard_placement_fn=lambda param: Shard(1)
        ),
        "the parameter's own torch.float32": lambda: fully_shard(
            nn.Linear(2, 2), mp_policy=_Overriding(param_dtype=torch.bfloat16, wanted=torch.half)
        ),
    }
    missing = []
    for words, call in wrong.items():
        try:
            call()
            missing.append(words)
        except (RuntimeError, TypeError, ValueError) as error:
            if f"expected {words}" not in str(error) and words not in str(error):
                missing.append(f"{words}: {error}")
    mesh = init_device_mesh("cpu", (1, 2))
    fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy(pin_memory=False))
    kept = fully_shard(
        nn.Linear(2, 2), mp_policy=_Overriding(param_dtype=torch.bfloat16, wanted=torch.float32)
    )
    models = [
        fully_shard(nn.Linear(2, 2), reshard_after_forward=1),
        fully_shard(nn.Linear(2, 2), mesh=mesh),
        fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=False),
        fully_shard(nn.Linear(2, 2), mp_policy=half, reshard_after_forward=2),
    ]
    strategies = [model._fsdp_unit.config.sharding_strategy.name for model in models]
    bias = nn.Linear(2, 2)
    fully_shard(bias, ignored_params=[bias.bias])
    return missing, [
        strategies,
        str(models[-1](torch.ones(1, 2)).dtype),
        [tuple(p.shape) for p in bias.parameters()],
        [str(flat.param_dtype) for flat in kept._fsdp_unit.flats],
    ]


def test_arguments(ranks: RankPool) -> None:
    for missing, found in ranks.run(_arguments, 2):
        assert missing == []
        assert found == [
            ["SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "FULL_SHARD"],
            "torch.bfloat16",
            [(2, 2), (2,)],
            ["torch.bfloat16", "torch.float32"],
        ]
