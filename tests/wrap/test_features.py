"""Runtime features against one process or DDP: precision, freezing, sharing, outputs, no_sync."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp.wrap as upstream_wrap
from loops import gradients, whole_gradients
from models import Block, Transformer, batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_dynamo import FSDP, MixedPrecision, ShardingStrategy, record_events
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.wrap_policy import CustomPolicy, ModuleWrapPolicy

# -- mixed precision ---------------------------------------------------------------------------


def _low_precision_mean() -> dict[str, torch.Tensor]:
    """Mean gradients of all ranks' batches, computed in bf16 except in LayerNorm."""
    means: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        model = make_transformer(num_blocks=2).to(torch.bfloat16)
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.float()
                module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
                module.register_forward_hook(lambda _, args, out: out.to(torch.bfloat16))
        loss_of(model, batch(rank, 0)).backward()
        for fqn, grad in gradients(model).items():
            means[fqn] = means.get(fqn, 0) + grad.float() / dist.get_world_size()
    return means


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_mixed_precision(rank: int, mode: str) -> None:
    """All-gathers send bf16, reduce-scatters fp32; norms are units of their own in fp32."""
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
    assert out.dtype == torch.bfloat16
    assert {t.dtype for p in wrapped.parameters() for t in (p, p.grad)} == {torch.float32}
    torch.testing.assert_close(
        whole_gradients(wrapped), _low_precision_mean(), rtol=1e-5, atol=1e-7
    )
    units = {u.fqn: u.flats for u in wrapped._fsdp_root.units if u.fqn.startswith("blocks.0")}
    assert units.keys() == {"blocks.0", "blocks.0.norm1", "blocks.0.norm2"}
    for fqn, (flat,) in units.items():
        collectives = [e for e in log if e.kind in ("all_gather", "reduce_scatter")]
        sent = {(e.kind, e.num_bytes) for e in collectives if e.unit == fqn}
        numel = flat.layout.padded_numel
        gathered_bytes = numel * (4 if "norm" in fqn else 2)
        assert sent == {("all_gather", gathered_bytes), ("reduce_scatter", numel * 4)}


@on_ranks(2)
def test_keep_low_precision_grads(rank: int) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = wrap(make_transformer(num_blocks=1), mixed_precision=precision)
    loss_of(model, batch(rank, 0)).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert float(model.clip_grad_norm_(1e-3)) > 1e-2
    assert float(model.clip_grad_norm_(1e-3)) == pytest.approx(1e-3, rel=2e-2)


# -- freezing --------------------------------------------------------------------------------------


def _freeze(model: Transformer) -> Transformer:
    model.embed.weight.requires_grad_(False)
    for block in model.blocks:
        block.qkv.weight.requires_grad_(False)
        block.norm1.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_frozen_parameters(rank: int, mode: str) -> None:
    expected, _ = train(DistributedDataParallel(_freeze(make_transformer(num_blocks=2))), rank)
    wrapped = wrap(_freeze(make_transformer(num_blocks=2)))
    model = in_mode(wrapped, mode)
    assert train(model, rank)[0] == pytest.approx(expected, rel=1e-6)
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    unit = next(u for u in wrapped._fsdp_root.units if u.fqn == "blocks.0")
    reduced = sum(e.num_bytes for e in log if e.key == ("reduce_scatter", "blocks.0", "backward"))
    assert reduced == sum(flat.reduce_bytes for flat in unit.flats if flat.requires_grad)
    assert [p.grad for p in wrapped.parameters() if not p.requires_grad] == [None] * 5


# -- sharing ------------------------------------------------------------------------------------


class TiedBlocks(Transformer):
    """Two blocks share a weight; the unit above both must own it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.blocks[1].up.weight = self.blocks[0].up.weight


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_parameters_tied_across_units(rank: int, mode: str) -> None:
    """The unit above all users owns them, and gathers once for all of them."""
    torch.manual_seed(2)
    expected, _ = train(DistributedDataParallel(TiedBlocks()), rank)
    torch.manual_seed(2)
    wrapped = wrap(TiedBlocks())
    model = in_mode(wrapped, mode)
    assert train(model, rank)[0] == pytest.approx(expected, rel=1e-6)
    assert wrapped.flat_parameter_of("blocks.1.up.weight").unit_fqn == ""
    state = wrapped.state_dict()
    assert torch.equal(state["blocks.0.up.weight"], state["blocks.1.up.weight"])
    with record_events() as log:
        loss_of(model, batch(rank, 0)).backward()
    gathered = [event.unit for event in log if event.kind == "all_gather"]
    assert gathered.count("") == 1
    assert set(gathered) == {"", "blocks.0", "blocks.1"}


# -- outputs, inputs, odd uses ---------------------------------------------------------------------


class OddBlock(nn.Module):
    """Takes a keyword, returns a nested dict, has an unused layer and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.no_parameters = nn.ReLU()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        y = self.no_parameters(self.linear(x)) * scale
        return {"hidden": y, "none": None, "twice": [(2 * y, None)]}


class OddModel(nn.Module):
    """Calls one unit twice, one never, one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never = OddBlock(), OddBlock()
        self.empty = nn.Sequential(nn.Tanh())
        self.last = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().mean()
        once = self.first(x, scale=scale)
        twice = self.first(self.empty(once["hidden"]), scale=scale)
        return self.last(once["twice"][0][0] + twice["twice"][0][0]).sum()


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_odd_outputs_and_uses(rank: int, mode: str) -> None:
    torch.manual_seed(4)
    plain = OddModel()
    policy = ModuleWrapPolicy({OddBlock, nn.Sequential})
    model = in_mode(FSDP(copy.deepcopy(plain), auto_wrap_policy=policy), mode)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(rank))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ddp, model)]
    for _ in range(3):
        losses = [ddp(x), model(x)]
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def _num_allocated(wrapped: FSDP) -> int:
    return sum(flat.is_allocated for unit in wrapped._fsdp_root.units for flat in unit.flats)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_no_grad_eval_and_abandoned_forwards(rank: int, mode: str) -> None:
    expected = make_transformer(num_blocks=2)(batch(0, 0))
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0, 0)), expected)
    assert _num_allocated(wrapped) == 0
    loss_of(model, batch(rank, 0))  # a forward that no backward follows
    torch.testing.assert_close(model.eval()(batch(0, 0)), expected)
    model.train()
    loss_of(model, batch(rank, 0)).backward()
    assert _num_allocated(wrapped) == 0


# -- construction ----------------------------------------------------------------------------------

BY_BLOCK = dict.fromkeys(["", "blocks.0", "blocks.1"], "FULL_SHARD")


@on_ranks(2)
def test_policies(rank: int) -> None:
    """Ours and upstream's, functions and objects; a custom policy also gives a unit's arguments."""

    def by_function(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        return recurse or (isinstance(module, Block) and nonwrapped_numel > 1000)

    def custom(module: nn.Module) -> bool | dict[str, Any]:
        options = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return options if isinstance(module, Block) else False

    for policy, strategies in (
        (None, {"": "FULL_SHARD"}),
        (ModuleWrapPolicy({Block}), BY_BLOCK),
        (upstream_wrap.ModuleWrapPolicy({Block}), BY_BLOCK),
        (
            partial(upstream_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
            BY_BLOCK,
        ),
        (by_function, BY_BLOCK),
        (CustomPolicy(custom), BY_BLOCK | dict.fromkeys(["blocks.0", "blocks.1"], "SHARD_GRAD_OP")),
    ):
        model = FSDP(make_transformer(num_blocks=2), auto_wrap_policy=policy)
        units = model._fsdp_root.units
        assert {unit.fqn: unit.config.sharding_strategy.name for unit in units} == strategies


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_ignored(rank: int, mode: str) -> None:
    """Ignored parameters keep their shapes and are not reduced (so equal batches are used)."""
    expected, _ = train(make_transformer(num_blocks=2), 0)
    model = make_transformer(num_blocks=2)
    model.blocks[0] = FSDP(model.blocks[0], ignored_modules=[model.blocks[0].up])
    wrapped = FSDP(model, ignored_modules=[model.head], ignored_states=[model.scale])
    assert wrapped.head.weight.shape == (31, 16)
    assert wrapped.blocks[0].up.weight.shape == (32, 16)
    managed = {o.fqn for unit in wrapped._fsdp_root.units for o in unit.originals()}
    assert managed.isdisjoint({"head.weight", "scale", "up.weight"})
    assert train(in_mode(wrapped, mode), 0)[0] == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_sync_module_states(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(rank)
    torch.manual_seed(0)
    of_rank_0 = nn.Linear(3, 3)
    state = FSDP(model, sync_module_states=True).state_dict()
    assert torch.equal(state["0.weight"], of_rank_0.weight)
    assert state["1.running_mean"].tolist() == [0] * 3


@on_ranks(2)
def test_each_tensor_is_broadcast_once(rank: int) -> None:
    model = make_transformer(num_blocks=1, tied=True)
    model.register_buffer("table", torch.arange(5.0))
    model.blocks[0].register_buffer("count", torch.zeros((), dtype=torch.long))
    expected = [t.shape for t in (*model.parameters(), *model.buffers())]
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        wrap(model, sync_module_states=True)
    assert sorted(call.args[0].shape for call in broadcast.call_args_list) == sorted(expected)


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda model: model.double(),
    "to": lambda model: model.to("cpu", torch.float64),
    "storage": lambda model: model._apply(torch.clone),  # as a move to another device does
}


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("double", "eager"),
        ("double", "hooks"),
        ("double", "graph"),
        ("storage", "graph"),
        ("to", "eager"),
    ],
)
@on_ranks(2)
def test_conversion_refreshes_views(rank: int, how: str, mode: str) -> None:
    """Parameters keep identity and gradients; training goes on, in float64 where converted."""
    convert = CONVERSIONS[how]
    wrapped, plain = wrap(make_transformer(num_blocks=1)), make_transformer(num_blocks=1)
    model = in_mode(wrapped, mode)
    assert train(model, 0, steps=2)[0] == pytest.approx(train(plain, 0, steps=2)[0], rel=1e-6)
    parameters = list(wrapped.parameters())
    grads = [p.grad.clone() for p in parameters]
    flats = [flat for unit in wrapped._fsdp_root.units for flat in unit.flats]
    shards = [flat.sharded for flat in flats]
    convert(wrapped)
    assert all(f.sharded.data_ptr() != s.data_ptr() for f, s in zip(flats, shards, strict=True))
    for before, grad, after in zip(parameters, grads, wrapped.parameters(), strict=True):
        assert after is before
        assert torch.equal(after.grad.float(), grad)
    assert train(model, 0)[0] == pytest.approx(train(convert(plain), 0)[0], rel=1e-5)


@on_ranks(3)
def test_ranks_hold_parts(rank: int) -> None:
    """Names and shapes stay; a parameter of one row leaves two of the ranks without elements."""
    model = make_transformer(num_blocks=1)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sharded = dict(wrap(model).named_parameters())
    assert {name: p.shape for name, p in sharded.items()} == shapes
    numels = torch.tensor([local_of(p).numel() for p in sharded.values()])
    of_all_ranks = [torch.zeros_like(numels) for _ in range(3)]
    dist.all_gather(of_all_ranks, numels)
    assert sum(of_all_ranks).tolist() == [shape.numel() for shape in shapes.values()]
    of_scale = [*shapes].index("scale")
    assert sorted(int(one[of_scale]) for one in of_all_ranks) == [0, 0, 1]


@on_ranks(3)
def test_groups_and_meshes(rank: int) -> None:
    """A group of two of three ranks, and a 1-D mesh."""
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (3,))
    expected, _ = train(wrap(make_transformer(num_blocks=1)), rank, steps=2)
    got, _ = train(wrap(make_transformer(num_blocks=1), device_mesh=mesh), rank, steps=2)
    assert got == expected
    if rank < 2:
        model = wrap(make_transformer(num_blocks=1), process_group=pair)
        train(model, rank, steps=2)
        assert model.flat_parameter_of("embed.weight").layout.world_size == 2


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_unit_hooks_run_first(rank: int, mode: str) -> None:
    """A module's own pre-hooks see unsharded parameters; the root takes keyword inputs."""
    seen: list[Any] = []
    model = make_transformer(num_blocks=1)
    model.blocks[0].register_forward_pre_hook(
        lambda m, args, kwargs: seen.append(m.qkv.weight.shape), with_kwargs=True
    )
    wrapped = wrap(model)
    run = in_mode(wrapped, mode)
    run(tokens=batch(rank, 0))  # it may trace
    assert isinstance(wrapped.blocks[0].qkv.weight, DTensor)
    seen.clear()
    run(tokens=batch(rank, 1))
    assert seen == [(48, 16)]
