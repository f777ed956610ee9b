"""Runtime features against one process or DDP: precision, freezing, sharing, outputs, no_sync."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, Transformer, batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

ALL_MODES = list(MODES)


# -- mixed precision ---------------------------------------------------------------------------


def _low_precision_mean(world_size: int) -> dict[str, torch.Tensor]:
    """Gradients of all ranks' batches, computed in bf16 but for LayerNorm, averaged in fp32."""
    means: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        model = make_transformer(num_blocks=2).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                module.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))
        loss_of(model, batch(rank, 0)).backward()
        for fqn, param in model.named_parameters():
            assert param.grad is not None
            means[fqn] = means.get(fqn, 0) + param.grad.float() / world_size
    return means


def _mixed(rank: int, world_size: int, mode: str) -> tuple[Any, Any, Any]:
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        _module_classes_to_ignore=(nn.LayerNorm,),
    )
    wrapped = wrap(make_transformer(num_blocks=2), mixed_precision=precision)
    model = in_mode(wrapped, mode)
    with record_events() as log:
        out = model(batch(rank, 0))
        loss_of(lambda _: out, batch(rank, 0)).backward()
    dtypes = {p.dtype for p in wrapped.parameters()} | {
        p.grad.dtype for p in wrapped.parameters() if p.grad is not None
    }
    with FSDP.summon_full_params(wrapped, with_grads=True, writeback=False):
        grads = {fqn: param.grad.clone() for fqn, param in wrapped.named_parameters()}
    in_block = [event for event in log if event.unit.startswith("blocks.0")]
    sent = {
        kind: {(event.unit, event.num_bytes) for event in in_block if event.kind == kind}
        for kind in ("all_gather", "reduce_scatter")
    }
    units = {u.fqn: u.flats for u in wrapped._fsdp_root.units if u.fqn.startswith("blocks.0")}
    numels = {fqn: flat.layout.padded_numel for fqn, (flat,) in units.items()}
    return grads, _low_precision_mean(world_size), (dtypes, out.dtype, sent, numels)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_mixed_precision(ranks: RankPool, mode: str) -> None:
    """bf16 on the wire of the gathers, fp32 on that of the reductions; norms, which are units of
    their own, stay in fp32."""
    for grads, means, (dtypes, out, sent, numels) in ranks.run(_mixed, 2, mode):
        assert grads.keys() == means.keys()
        for fqn, mean in means.items():
            torch.testing.assert_close(grads[fqn], mean, rtol=1e-5, atol=1e-7)
        assert dtypes == {torch.float32}
        assert out == torch.bfloat16
        assert numels.keys() == {"blocks.0", "blocks.0.norm1", "blocks.0.norm2"}
        gathered = {(fqn, n * (4 if "norm" in fqn else 2)) for fqn, n in numels.items()}
        assert sent == {
            "all_gather": gathered,
            "reduce_scatter": {(fqn, n * 4) for fqn, n in numels.items()},
        }


def _low_precision_grads(rank: int, world_size: int) -> tuple[set[torch.dtype], float, float]:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrap(make_transformer(num_blocks=1), mixed_precision=precision)
    loss_of(model, batch(rank, 0)).backward()
    dtypes = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    before = float(model.clip_grad_norm_(1e-3))
    return dtypes, before, float(model.clip_grad_norm_(1e-3))


def test_keep_low_precision_grads(ranks: RankPool) -> None:
    for dtypes, before, after in ranks.run(_low_precision_grads, 2):
        assert dtypes == {torch.bfloat16}
        assert before > 1e-2
        assert after == pytest.approx(1e-3, rel=2e-2)


# -- freezing --------------------------------------------------------------------------------------


def _freeze(model: Transformer) -> Transformer:
    model.embed.weight.requires_grad_(False)
    for block in model.blocks:
        block.qkv.weight.requires_grad_(False)
        block.norm1.bias.requires_grad_(False)
    return model


def _frozen(rank: int, world_size: int, mode: str) -> tuple[Any, Any, Any]:
    expected, _ = train(DistributedDataParallel(_freeze(make_transformer(num_blocks=2))), rank)
    wrapped = wrap(_freeze(make_transformer(num_blocks=2)))
    model = in_mode(wrapped, mode)
    got, _ = train(model, rank)
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    unit = next(u for u in wrapped._fsdp_root.units if u.fqn == "blocks.0")
    reduced = sum(e.num_bytes for e in log if e.key == ("reduce_scatter", "blocks.0", "backward"))
    frozen_grads = [p.grad for p in wrapped.parameters() if not p.requires_grad]
    assert frozen_grads == [None] * 5
    return expected, got, (reduced, [f.reduce_bytes for f in unit.flats if f.requires_grad])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_frozen_parameters(ranks: RankPool, mode: str) -> None:
    for expected, got, (reduced, trainable) in ranks.run(_frozen, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)
        assert reduced == sum(trainable)


# -- sharing ------------------------------------------------------------------------------------


class TiedBlocks(Transformer):
    """Two blocks share a weight; the unit above both must own it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight


def _tied_across_units(rank: int, world_size: int, mode: str) -> tuple[Any, Any, Any, list[str]]:
    torch.manual_seed(2)
    expected, _ = train(DistributedDataParallel(TiedBlocks()), rank)
    torch.manual_seed(2)
    wrapped = wrap(TiedBlocks())
    model = in_mode(wrapped, mode)
    got, _ = train(model, rank)
    owner = wrapped.flat_parameter_of("blocks.1.up.weight")
    state = wrapped.state_dict()
    assert torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    return expected, got, owner.unit_fqn, [e.unit for e in log if e.kind == "all_gather"]


@pytest.mark.parametrize("mode", ALL_MODES)
def test_parameters_tied_across_units(ranks: RankPool, mode: str) -> None:
    """The unit above all users owns them, and gathers once for all of them."""
    for expected, got, owner, gathered in ranks.run(_tied_across_units, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)
        assert owner == ""
        assert gathered.count("") == 1
        assert set(gathered) == {"", "blocks.0", "blocks.1"}


# -- outputs, inputs, odd uses ---------------------------------------------------------------------


@dataclass
class Output:
    """What some models return."""

    hidden: torch.Tensor
    extras: dict[str, list[torch.Tensor]]


class OddBlock(nn.Module):
    """Returns a dataclass, a dict or nested tuples; takes keyword inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.no_parameters = nn.ReLU()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> Any:
        y = self.no_parameters(self.linear(x)) * scale
        if self.kind == "dataclass":
            return Output(y, {"twice": [2 * y]})
        if self.kind == "dict":
            return {"hidden": y, "none": None, "twice": [2 * y]}
        return (y, (2 * y, None))


class OddModel(nn.Module):
    """Calls one unit twice, one never, one without parameters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = OddBlock(kind)
        self.never = OddBlock(kind)
        self.empty = nn.Sequential(nn.Tanh())
        self.last = nn.Linear(6, 1)

    def _hidden(self, out: Any) -> torch.Tensor:
        if isinstance(out, Output):
            return out.hidden + out.extras["twice"][0]
        if isinstance(out, dict):
            return out["hidden"] + out["twice"][0]
        return out[0] + out[1][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean()
        once = self._hidden(self.first(x, scale=scale))
        twice = self._hidden(self.first(self.empty(once), scale=scale))
        return self.last(once + twice).sum()


def _odd_model(kind: str) -> OddModel:
    torch.manual_seed(4)
    return OddModel(kind)


def _odd(rank: int, world_size: int, kind: str, mode: str) -> tuple[Any, Any]:
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    plain = _odd_model(kind)
    policy = ModuleWrapPolicy({OddBlock, nn.Sequential})
    model = in_mode(FSDP(_odd_model(kind), auto_wrap_policy=policy), mode)
    results = []
    for net in (DistributedDataParallel(plain, find_unused_parameters=True), model):
        losses = []
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = net(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    return results[0], results[1]


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("kind", ["dataclass", "dict", "tuple"])
def test_odd_outputs_and_uses(ranks: RankPool, kind: str, mode: str) -> None:
    for expected, got in ranks.run(_odd, 2, kind, mode):
        assert got == pytest.approx(expected, rel=1e-5)


def _no_grad_and_eval(rank: int, world_size: int, mode: str) -> tuple[Any, Any, list[int]]:
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    plain = make_transformer(num_blocks=2)
    alive = []
    outputs = []
    for net in (plain, model):
        with torch.no_grad():
            outputs.append(net(batch(0, 0)))
        alive.append(sum(f.is_allocated for u in wrapped._fsdp_root.units for f in u.flats))
    loss_of(model, batch(rank, 0))  # a forward that no backward follows
    net = model.eval()
    outputs.append(net(batch(0, 0)).detach())
    model.train()
    loss_of(model, batch(rank, 0)).backward()
    alive.append(sum(f.is_allocated for u in wrapped._fsdp_root.units for f in u.flats))
    return outputs[0], outputs[1:], alive


@pytest.mark.parametrize("mode", ALL_MODES)
def test_no_grad_eval_and_abandoned_forwards(ranks: RankPool, mode: str) -> None:
    for expected, got, alive in ranks.run(_no_grad_and_eval, 2, mode):
        for output in got:
            torch.testing.assert_close(output, expected)
        assert alive == [0, 0, 0]


def _two_forwards(rank: int, world_size: int, mode: str) -> tuple[float, float]:
    """Two forwards, then one backward through both."""
    plain = make_transformer(num_blocks=2)
    wrapped = wrap(make_transformer(num_blocks=2))
    for net in (plain, in_mode(wrapped, mode)):
        loss = loss_of(net, batch(0, 0)) + loss_of(net, batch(0, 1))
        loss.backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    return float(expected), float(wrapped.clip_grad_norm_(1e9))


@pytest.mark.parametrize("mode", ALL_MODES)
def test_two_forwards_one_backward(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_two_forwards, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)


# -- construction ----------------------------------------------------------------------------------


BY_CLASS: dict[str, Any] = {"transformer_layer_cls": {Block}}


def _policies(rank: int, world_size: int) -> list[list[str]]:
    def units(**kwargs: Any) -> list[str]:
        return [u.fqn for u in FSDP(make_transformer(num_blocks=2), **kwargs)._fsdp_root.units]

    def by_lambda(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return lambda_auto_wrap_policy(
            module, recurse, nonwrapped_numel, lambda m: isinstance(m, Block)
        )

    def by_size(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, 1500)

    from torch.distributed.fsdp.wrap import ModuleWrapPolicy as UpstreamPolicy
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as upstreams

    custom = CustomPolicy(
        lambda m: (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(m, Block) else False
        )
    )
    wrapped = FSDP(make_transformer(num_blocks=2), auto_wrap_policy=custom)
    strategies = [u.config.sharding_strategy.name for u in wrapped._fsdp_root.units]
    return [
        units(),
        units(auto_wrap_policy=ModuleWrapPolicy({Block})),
        units(auto_wrap_policy=UpstreamPolicy({Block})),
        units(auto_wrap_policy=partial(upstreams, **BY_CLASS)),
        units(auto_wrap_policy=partial(transformer_auto_wrap_policy, **BY_CLASS)),
        units(auto_wrap_policy=by_lambda),
        units(auto_wrap_policy=by_size),
        strategies,
    ]


def test_policies(ranks: RankPool) -> None:
    blocks = ["", "blocks.0", "blocks.1"]
    for whole, *by_block, by_size, strategies in ranks.run(_policies, 2):
        assert whole == [""]
        assert by_block == [blocks] * 5
        assert set(blocks) <= set(by_size)
        assert strategies == ["FULL_SHARD", "SHARD_GRAD_OP", "SHARD_GRAD_OP"]


def _ignored(rank: int, world_size: int, mode: str) -> tuple[Any, Any, Any]:
    """Ignored parameters keep their shapes and are not reduced (so equal batches are used)."""
    expected, _ = train(make_transformer(num_blocks=2), 0)
    model = make_transformer(num_blocks=2)
    ignored = [model.head]
    state = [model.scale]
    inner = FSDP(model.blocks[0], ignored_modules=[model.blocks[0].up])
    model.blocks[0] = inner
    wrapped = FSDP(model, ignored_modules=ignored, ignored_states=state)
    assert wrapped.head.weight.shape == (31, 16)
    assert wrapped.blocks[0].up.weight.shape == (32, 16)
    got, _ = train(in_mode(wrapped, mode), 0)
    names = {o.fqn for u in wrapped._fsdp_root.units for o in u.originals()}
    return expected, got, names & {"head.weight", "scale", "up.weight"}


@pytest.mark.parametrize("mode", ALL_MODES)
def test_ignored(ranks: RankPool, mode: str) -> None:
    for expected, got, managed in ranks.run(_ignored, 2, mode):
        assert got == pytest.approx(expected, rel=1e-6)
        assert managed == set()


def _sync_states(rank: int, world_size: int) -> tuple[bool, bool]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)
    torch.manual_seed(0)
    expected = nn.Linear(3, 3)
    wrapped = FSDP(model, sync_module_states=True)
    state = wrapped.state_dict()
    same = torch.equal(state["0.weight"], expected.weight.detach())
    return same, bool((state["1.running_mean"] == 0).all())


def test_sync_module_states(ranks: RankPool) -> None:
    assert ranks.run(_sync_states, 2) == [(True, True)] * 2


def _broadcasts(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """Shapes that were broadcast, and those of a model with a tied weight and two buffers."""
    model = make_transformer(num_blocks=1, tied=True)
    model.register_buffer("table", torch.arange(5.0))
    model.blocks[0].register_buffer("count", torch.zeros((), dtype=torch.long))
    expected = [t.shape for t in (*model.parameters(), *model.buffers())]
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        wrap(model, sync_module_states=True)
    return [call.args[0].shape for call in broadcast.call_args_list], expected


def test_each_tensor_is_broadcast_once(ranks: RankPool) -> None:
    for sent, expected in ranks.run(_broadcasts, 2):
        assert sorted(sent) == sorted(expected)


def _conversion(rank: int, world_size: int, how: str, mode: str) -> tuple[Any, Any, Any]:
    """In the middle of training; optimizers keep their parameters."""
    convert = CONVERSIONS[how]
    wrapped, plain = wrap(make_transformer(num_blocks=1)), make_transformer(num_blocks=1)
    model = in_mode(wrapped, mode)
    before = train(plain, 0, steps=2)[0], train(model, 0, steps=2)[0]
    grads = [p.grad.clone() for p in wrapped.parameters() if p.grad is not None]
    parameters = list(wrapped.parameters())
    flats = [flat for unit in wrapped._fsdp_root.units for flat in unit.flats]
    shards = [flat.sharded for flat in flats]
    convert(wrapped)
    assert all(f.sharded.data_ptr() != s.data_ptr() for f, s in zip(flats, shards, strict=True))
    assert all(a is b for a, b in zip(parameters, wrapped.parameters(), strict=True))
    kept = all(
        torch.equal(p.grad.float(), g) for p, g in zip(wrapped.parameters(), grads, strict=True)
    )
    losses = train(convert(plain), 0)[0], train(model, 0)[0]
    return kept, (before[0], losses[0]), (before[1], losses[1])


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "to": lambda model: model.to("cpu", torch.float64),
    "storage": lambda model: model._apply(torch.clone),  # as where the device is another one
}


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("double", "eager"),
        ("double", "hooks"),
        ("double", "graph"),
        ("storage", "eager"),
        ("storage", "graph"),
        ("to", "eager"),
        pytest.param("storage", "hooks", marks=pytest.mark.slow),
        pytest.param("to", "hooks", marks=pytest.mark.slow),
        pytest.param("to", "graph", marks=pytest.mark.slow),
    ],
)
def test_conversion_refreshes_views(ranks: RankPool, how: str, mode: str) -> None:
    """Parameters keep identity and gradients; training goes on, in float64 where converted."""
    for kept, (first, then), (got_first, got) in ranks.run(_conversion, 2, how, mode):
        assert kept
        assert got_first == pytest.approx(first, rel=1e-6)
        assert got == pytest.approx(then, rel=1e-5)


def _original_parameters(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Elements that a rank holds of each parameter; whether names and shapes stay."""
    model = make_transformer(num_blocks=1)
    before = [(name, p.shape) for name, p in model.named_parameters()]
    after = dict(wrap(model).named_parameters())
    same = before == [(name, p.shape) for name, p in after.items()]
    return [local_of(p).numel() for p in after.values()], same


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_hold_parts(ranks: RankPool, world_size: int) -> None:
    model = make_transformer(num_blocks=1)
    whole = [p.numel() * (1 if p.dim() else world_size) for p in model.parameters()]
    results = ranks.run(_original_parameters, world_size)
    assert all(same for _, same in results)
    assert [sum(parts) for parts in zip(*(n for n, _ in results), strict=True)] == whole
    has_few_rows = any(p.dim() and len(p) < world_size for p in model.parameters())
    assert has_few_rows is any(0 in numels for numels, _ in results)


def _groups(rank: int, world_size: int) -> tuple[str, list[float], list[float]]:
    """A group of two of three ranks, and a 1-D mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (world_size,))
    with_mesh, _ = train(wrap(make_transformer(num_blocks=1), device_mesh=mesh), rank, steps=2)
    expected, _ = train(wrap(make_transformer(num_blocks=1)), rank, steps=2)
    name = ""
    if rank < 2:
        model = wrap(make_transformer(num_blocks=1), process_group=pair)
        train(model, rank, steps=2)
        name = str(model.flat_parameter_of("embed.weight").layout.world_size)
    return name, expected, with_mesh


def test_groups_and_meshes(ranks: RankPool) -> None:
    results = ranks.run(_groups, 3)
    assert [name for name, _, _ in results] == ["2", "2", ""]
    for _, expected, got in results:
        assert got == expected


def _hook_order(rank: int, world_size: int, mode: str) -> list[Any]:
    seen: list[Any] = []
    model = make_transformer(num_blocks=1)
    model.blocks[0].register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(m.qkv.weight.shape), with_kwargs=True
    )
    wrapped = wrap(model)
    run = in_mode(wrapped, mode)
    run(tokens=batch(rank, 0))  # the root's forward by keyword; it may trace
    assert isinstance(wrapped.blocks[0].qkv.weight, DTensor)
    seen.clear()
    run(tokens=batch(rank, 1))
    return seen


@pytest.mark.parametrize("mode", ALL_MODES)
def test_unit_hooks_run_first(ranks: RankPool, mode: str) -> None:
    """A module's own pre-hooks see unsharded parameters; the root takes keyword inputs."""
    assert ranks.run(_hook_order, 2, mode) == [[torch.Size([48, 16])]] * 2
