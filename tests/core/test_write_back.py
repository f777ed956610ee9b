"""Values that were put in the place of parameters after wrapping: in use from then on. Parameters
that come into the model: an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from loops import different, error_of, gradients, whole_gradients
from models import (
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    through,
    wrap,
)
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy

CHANGED = ("blocks.0.up.weight", "blocks.0.norm1.bias", "embed.weight", "scale")
"""Of every unit; with two ranks some have no element on one of them."""


def _new_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    plain = dict(make_transformer(num_blocks=1).named_parameters())
    return {n: 0.3 * torch.randn(plain[n].shape, generator=generator) for n in CHANGED}


def _replace(wrapped: FSDP, kind: str) -> None:
    """Put new values into parameters, or a whole parameter or a DTensor in their place."""
    for fqn, whole in _new_values().items():
        owner, _, name = fqn.rpartition(".")
        module = wrapped.module.get_submodule(owner)
        param = getattr(module, name)
        placed = distribute_tensor(whole, param.device_mesh, param.placements)
        if kind == "in place":
            with torch.no_grad():
                param.copy_(placed)
        else:
            setattr(module, name, nn.Parameter(whole if kind == "object" else placed))


def _step(model: nn.Module, step: int) -> float:
    """One step of SGD, which sees how large gradients are; returns the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = loss_of(model, batch(0, step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _summon(model: FSDP) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _optimizer_state_dict(model: FSDP) -> dict[str, torch.Tensor]:
    params = [original.param for unit in model._fsdp_root.units for original in unit.originals()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    assert FSDP.optim_state_dict(model, optimizer)["param_groups"]
    return {
        unit.paths.fqn_of(original.fqn): original.param.full_tensor()  # type: ignore[attr-defined]
        for unit in model._fsdp_root.units
        for original in unit.originals()
    }


def _forward(model: FSDP) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        model(batch(0, 0))
    return model.state_dict()


Change = Callable[[FSDP], None]
USES: dict[str, Callable[[FSDP], dict[str, torch.Tensor]]] = {
    "forward": _forward,
    "summon": _summon,
    "state_dict": lambda model: model.state_dict(),
    "optimizer state dict": _optimizer_state_dict,
    "deepcopy": lambda model: copy.deepcopy(model).state_dict(),
    "conversion": lambda model: model.double().float().state_dict(),
}


COMPILED_USES = ("forward", "summon", "state_dict")


@pytest.mark.parametrize(
    ("kind", "strategy", "mode"),
    [
        ("in place", "FULL_SHARD", "eager"),
        ("in place", "SHARD_GRAD_OP", "eager"),
        ("object", "FULL_SHARD", "eager"),
        ("object", "NO_SHARD", "eager"),
        ("DTensor", "SHARD_GRAD_OP", "eager"),
        ("object", "FULL_SHARD", "hooks"),
        ("in place", "FULL_SHARD", "graph"),
    ],
)
@on_ranks(2)
def test_every_use_sees_new_values(rank: int, kind: str, strategy: str, mode: str) -> None:
    expected = make_transformer(num_blocks=1)
    wrapped = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy[strategy])
    model = in_mode(wrapped, mode)
    for use in USES if mode == "eager" else COMPILED_USES:
        _step(expected, 0)
        _step(model, 0)
        with torch.no_grad():
            for fqn, value in _new_values().items():
                expected.get_parameter(fqn).copy_(value)
        _replace(wrapped, kind)
        assert different(USES[use](wrapped), dict(expected.named_parameters())) == [], use
        assert _step(model, 1) == pytest.approx(_step(expected, 1), rel=1e-5), use
        after = dict(wrapped.state_dict())
        assert different(after, dict(expected.named_parameters())) == [], use


@on_ranks(2)
def test_another_parameter_gives_its_values(rank: int) -> None:
    """The DTensor stays the model's and takes the values of a new parameter, which is free."""
    wrapped = wrap(make_transformer(num_blocks=1))
    up = wrapped.module.blocks[0].up
    old, new = up.bias, nn.Parameter(torch.full(up.bias.shape, 2.0))
    up.bias = new
    loss_of(wrapped, batch(rank, 0)).backward()
    assert up.bias is old
    assert old.grad.shape == old.shape
    taken = wrapped.state_dict()["blocks.0.up.bias"].clone()
    assert torch.equal(taken, torch.full_like(taken, 2.0))
    torch.optim.SGD([old], lr=1.0).step()
    assert not torch.equal(wrapped.state_dict()["blocks.0.up.bias"], taken)
    new.grad = torch.ones_like(new)
    assert "that a DTensor has replaced" in error_of(torch.optim.SGD([new]).step)
    assert torch.equal(new, torch.full_like(new, 2.0))


@pytest.mark.parametrize("kind", ["data", "object"])
@on_ranks(2)
def test_replaced_while_whole(rank: int, kind: str) -> None:
    wrapped = wrap(make_transformer(num_blocks=1))
    loss_of(wrapped, batch(rank, 0)).backward()
    with FSDP.summon_full_params(wrapped):
        up = wrapped.module.blocks[0].up
        if kind == "data":
            up.weight.data = torch.full_like(up.weight, 3.0)
        else:
            up.weight = nn.Parameter(torch.full_like(up.weight, 3.0))
    loss_of(wrapped, batch(rank, 0)).backward()
    assert wrapped.state_dict()["blocks.0.up.weight"].unique().tolist() == [3.0]


@on_ranks(2)
def test_parameters_that_exchange_storage(rank: int) -> None:
    """In the places of two parameters are others that have each other's memory."""
    wrapped = wrap(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy.NO_SHARD)
    block = wrapped.module.blocks[0]
    first, second = block.norm1.weight.detach(), block.norm2.bias.detach()
    block.norm1.weight = nn.Parameter(second.to_local())
    block.norm2.bias = nn.Parameter(first.to_local())
    values = wrapped.state_dict()
    plain = make_transformer(num_blocks=1).blocks[0]
    assert torch.equal(values["blocks.0.norm1.weight"], plain.norm2.bias)
    assert torch.equal(values["blocks.0.norm2.bias"], plain.norm1.weight)


def _put(module: str, name: str, make: Callable[[nn.Module], nn.Module | nn.Parameter]) -> Change:
    """Give a module of the model a parameter or a module, made of the module itself."""

    def put(model: FSDP) -> None:
        holder = model.module.get_submodule(module)
        setattr(holder, name, make(holder))

    return put


REFUSED: dict[str, tuple[Change, str]] = {
    "shape": (
        _put("norm", "weight", lambda _: nn.Parameter(torch.zeros(17))),
        "got a tensor of shape (17,)",
    ),
    "dtype": (
        _put("norm", "weight", lambda _: nn.Parameter(torch.zeros(16, dtype=torch.float64))),
        "torch.float64",
    ),
    "tied": (
        _put("head", "weight", lambda head: nn.Parameter(torch.zeros_like(head.weight))),
        "got two parameters in places that were tied",
    ),
    "held": (_put("norm", "weight", lambda norm: norm.bias), "which a unit holds already"),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_refused(rank: int, name: str) -> None:
    """By every use; what was there before is used again once it is back."""
    wrapped = wrap(make_transformer(num_blocks=1, tied=True))
    before = {fqn: value.clone() for fqn, value in wrapped.state_dict().items()}
    holders = [(m, dict(m._parameters)) for m in wrapped.modules()]
    replace, message = REFUSED[name]
    replace(wrapped)
    for use in ("forward", "summon", "state_dict", "deepcopy", "conversion"):
        with pytest.raises(FSDPStateError) as caught:
            USES[use](wrapped)
        assert message in str(caught.value), use
    for module, parameters in holders:
        module._parameters.update(parameters)
    torch.testing.assert_close(dict(wrapped.state_dict()), before, rtol=0, atol=0)
    loss_of(wrapped, batch(rank, 0)).backward()


@pytest.mark.parametrize(
    ("door", "strategy", "mode"),
    [
        ("wrapper", "FULL_SHARD", "eager"),
        ("wrapper", "SHARD_GRAD_OP", "eager"),
        ("wrapper", "NO_SHARD", "eager"),
        ("fully_shard", None, "eager"),
        ("fully_shard", None, "hooks"),
        ("wrapper", "SHARD_GRAD_OP", "graph"),
    ],
)
@on_ranks(2)
def test_replaced_around_a_backward(rank: int, door: str, strategy: str | None, mode: str) -> None:
    """Between forward and backward: the backward is that of its forward, the new parameter's values
    are the next forward's. After it: a replacement brings its gradient, which is None, as a new
    one's is, or its own, to which the next backward adds; frozen ones get none."""
    plain = make_transformer(num_blocks=1)
    kwargs = {} if strategy is None else {"sharding_strategy": ShardingStrategy[strategy]}
    model = through(door, copy.deepcopy(plain), **kwargs)
    pairs = [(plain, plain), (model, in_mode(model, mode))]
    for one, run in pairs:
        loss_of(run, batch(rank, 0)).backward()
        one.zero_grad()
        loss = loss_of(run, batch(rank, 0))
        for linear in (one.head, one.blocks[0].up):
            linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.25))
        loss.backward()
    average_gradients(plain)
    assert different(whole_gradients(model), gradients(plain)) == []
    losses = [loss_of(run, batch(rank, 1)).item() for _, run in pairs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for one, _ in pairs:
        up, head, down = one.blocks[0].up, one.head, one.blocks[0].down
        for linear, is_frozen in (up, False), (head, False), (down, True):
            values = torch.full_like(linear.weight, 0.5)
            linear.weight = nn.Parameter(values, requires_grad=not is_frozen)
        head.weight.grad = torch.full_like(head.weight, 2.0)
    before = {name: param.grad for name, param in plain.named_parameters()}
    plain.zero_grad()
    for _, run in pairs:
        loss_of(run, batch(rank, 1)).backward()
    average_gradients(plain)
    expected = gradients(plain)
    for name, grad in expected.items():
        if before[name] is not None:
            grad += before[name]
    assert different(whole_gradients(model), expected) == []


@on_ranks(2)
def test_a_unit_without_a_backward_takes_new_values(rank: int) -> None:
    """A frozen root stays unsharded after its forward; then its values are replaced."""
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model = FSDP(layer)
    x = torch.ones(2, 4, requires_grad=True)
    model(x)
    layer.weight = nn.Parameter(torch.full((4, 4), 2.0), requires_grad=False)
    assert torch.equal(model(x), torch.full((2, 4), 8.0))


# -- parameters that come into the model -----------------------------------------------------------


class Adapter(nn.Module):
    """A layer beside another one."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.low = nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.low(x)


ADDED: dict[str, Change] = {
    "blocks.0.up.low.weight": _put("blocks.0.module", "up", lambda block: Adapter(block.up)),
    "norm.extra": _put("norm", "extra", lambda _: nn.Parameter(torch.zeros(3))),
    "head.bias": _put("head", "bias", lambda _: nn.Parameter(torch.zeros(31))),  # it was None
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, "eager") for name in ADDED),
        ("blocks.0.up.low.weight", "hooks"),
        ("head.bias", "graph"),
    ],
)
@on_ranks(2)
def test_added_ones_are_refused(rank: int, name: str, mode: str) -> None:
    wrapped = wrap(make_transformer(num_blocks=1, tied=True))
    model = in_mode(wrapped, mode)
    loss_of(model, batch(rank, 0)).backward()
    ADDED[name](wrapped)
    for use in (lambda: model(batch(rank, 0)), wrapped.state_dict):
        with pytest.raises(FSDPStateError, match=f"parameter '{name}': expected all trainable"):
            use()


@on_ranks(2)
def test_what_may_be_added(rank: int) -> None:
    """Modules without parameters, frozen ones, and units of their own."""
    wrapped = wrap(make_transformer(num_blocks=1))
    loss_of(wrapped, batch(rank, 0)).backward()
    wrapped.module.blocks[0].activation = nn.ReLU()
    wrapped.module.teacher = nn.Linear(2, 2).requires_grad_(False)
    wrapped.module.extra = FSDP(nn.Linear(2, 2))
    loss_of(wrapped, batch(rank, 0)).backward()
    assert "blocks.0.up.weight" in wrapped.state_dict()
