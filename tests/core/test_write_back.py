"""Values that were put in the place of parameters after wrapping: in use from then on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, error_of, whole_gradients
from models import (
    DOORS,
    Transformer,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    through,
    wrap,
)
from modes import MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.tensor import distribute_tensor

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy

CHANGED = ("blocks.0.up.weight", "blocks.1.norm1.bias", "embed.weight", "scale")
"""Of every unit; with two ranks some have no element on one of them."""


def _new_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    plain = dict(make_transformer(num_blocks=2).named_parameters())
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


def _step(model: nn.Module, rank: int, step: int) -> float:
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


USES: dict[str, Callable[[FSDP], dict[str, torch.Tensor]]] = {
    "forward": _forward,
    "summon": _summon,
    "state_dict": lambda model: model.state_dict(),
    "optimizer state dict": _optimizer_state_dict,
    "deepcopy": lambda model: copy.deepcopy(model).state_dict(),
    "conversion": lambda model: model.double().float().state_dict(),
}


def _written_back(
    rank: int, world_size: int, mode: str, kind: str, strategy: str, uses: list[str]
) -> list[str]:
    wrong: list[str] = []
    expected = make_transformer(num_blocks=2)
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy[strategy])
    model = in_mode(wrapped, mode)
    for use in uses:
        _step(expected, rank, 0)
        _step(model, rank, 0)
        with torch.no_grad():
            for fqn, value in _new_values().items():
                expected.get_parameter(fqn).copy_(value)
        _replace(wrapped, kind)
        for name, value in USES[use](wrapped).items():
            if not torch.allclose(value, expected.get_parameter(name), rtol=1e-5, atol=1e-6):
                wrong.append(f"{use}: {name}")
        if _step(model, rank, 1) != pytest.approx(_step(expected, rank, 1), rel=1e-5):
            wrong.append(f"{use}: loss")
        for name, value in wrapped.state_dict().items():
            if not torch.allclose(value, expected.get_parameter(name), rtol=1e-4, atol=1e-6):
                wrong.append(f"{use}: {name} after a step")
    return wrong


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("kind", ["in place", "object", "DTensor"])
def test_every_use_sees_new_values(ranks: RankPool, kind: str, strategy: str) -> None:
    for wrong in ranks.run(_written_back, 2, "eager", kind, strategy, list(USES)):
        assert wrong == []


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@pytest.mark.parametrize("kind", ["in place", "object"])
def test_compiled_models_see_new_values(ranks: RankPool, kind: str, mode: str) -> None:
    uses = ["forward", "summon", "state_dict"]
    for wrong in ranks.run(_written_back, 2, mode, kind, "FULL_SHARD", uses):
        assert wrong == []


def _objects(rank: int, world_size: int) -> dict[str, bool]:
    """The DTensor stays the model's and takes the values of a new parameter, which is free."""
    wrapped = wrap(make_transformer(num_blocks=2))
    up = wrapped.module.blocks[0].up
    old, new = up.bias, nn.Parameter(torch.full(up.bias.shape, 2.0))
    up.bias = new
    loss_of(wrapped, batch(rank, 0)).backward()
    optimizer = torch.optim.SGD([old], lr=1.0)
    taken = wrapped.state_dict()["blocks.0.up.bias"].clone()
    optimizer.step()
    whole = wrapped.state_dict()["blocks.0.up.bias"]
    new.grad = torch.ones_like(new)
    refused = error_of(torch.optim.SGD([new]).step)
    return {
        "it is in the module": up.bias is old,
        "it has the values": torch.equal(taken, torch.full_like(whole, 2.0)),
        "it has the gradient": old.grad is not None and old.grad.shape == old.shape,
        "it is trained": not torch.equal(whole, taken),
        "an optimizer of the other one is refused": "that a DTensor has replaced" in refused,
        "the other one keeps its values": torch.equal(new, torch.full_like(new, 2.0)),
    }


def test_another_parameter_gives_its_values(ranks: RankPool) -> None:
    for found in ranks.run(_objects, 2):
        assert all(found.values()), found


def _in_summon(rank: int, world_size: int, kind: str) -> list[Any]:
    wrapped = wrap(make_transformer(num_blocks=2))
    loss_of(wrapped, batch(rank, 0)).backward()
    with FSDP.summon_full_params(wrapped):
        up = wrapped.module.blocks[0].up
        if kind == "data":
            up.weight.data = torch.full_like(up.weight, 3.0)
        else:
            up.weight = nn.Parameter(torch.full_like(up.weight, 3.0))
    loss_of(wrapped, batch(rank, 0)).backward()
    return wrapped.state_dict()["blocks.0.up.weight"].unique().tolist()


@pytest.mark.parametrize("kind", ["data", "object"])
def test_replaced_while_whole(ranks: RankPool, kind: str) -> None:
    for values in ranks.run(_in_summon, 2, kind):
        assert values == [3.0]


def _exchanged(rank: int, world_size: int) -> bool:
    """Two parameters in whose places are others that have each other's memory."""
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy.NO_SHARD)
    block = wrapped.module.blocks[0]
    first, second = block.norm1.weight.detach(), block.norm2.bias.detach()
    block.norm1.weight = nn.Parameter(second.to_local())
    block.norm2.bias = nn.Parameter(first.to_local())
    values = wrapped.state_dict()
    plain = make_transformer(num_blocks=2).blocks[0]
    return torch.equal(values["blocks.0.norm1.weight"], plain.norm2.bias) and torch.equal(
        values["blocks.0.norm2.bias"], plain.norm1.weight
    )


def test_parameters_that_exchange_storage(ranks: RankPool) -> None:
    assert ranks.run(_exchanged, 2) == [True, True]


class Tied(Transformer):
    """Embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__(num_blocks=1, tied=True)


def _another_shape(model: FSDP) -> None:
    model.module.norm.weight = nn.Parameter(torch.zeros(17))


def _another_dtype(model: FSDP) -> None:
    model.module.norm.weight = nn.Parameter(torch.zeros(16, dtype=torch.float64))


def _one_of_two(model: FSDP) -> None:
    model.module.head.weight = nn.Parameter(torch.zeros_like(model.module.head.weight))


def _of_a_unit(model: FSDP) -> None:
    model.module.norm.weight = model.module.norm.bias


REFUSED: dict[str, tuple[Callable[[FSDP], None], str]] = {
    "shape": (_another_shape, "got a tensor of shape (17,)"),
    "dtype": (_another_dtype, "torch.float64"),
    "tied": (_one_of_two, "got two parameters in places that were tied"),
    "held": (_of_a_unit, "which a unit holds already"),
}


def _refused(rank: int, world_size: int, name: str) -> list[str]:
    torch.manual_seed(0)
    wrapped = wrap(Tied())
    before = {fqn: value.clone() for fqn, value in wrapped.state_dict().items()}
    holders = [(m, dict(m._parameters)) for m in wrapped.modules()]
    REFUSED[name][0](wrapped)
    messages = []
    for use in ("forward", "summon", "state_dict", "deepcopy", "conversion"):
        with pytest.raises(FSDPStateError) as caught:
            USES[use](wrapped)
        messages.append(str(caught.value))
    for module, parameters in holders:
        module._parameters.update(parameters)
    after = wrapped.state_dict()
    assert all(torch.equal(after[fqn], value) for fqn, value in before.items())
    loss_of(wrapped, batch(rank, 0)).backward()
    return messages


@pytest.mark.parametrize("name", REFUSED)
def test_refused(ranks: RankPool, name: str) -> None:
    for messages in ranks.run(_refused, 2, name):
        assert all(REFUSED[name][1] in message for message in messages), messages


def _before_backward(rank: int, world_size: int, mode: str, strategy: str) -> list[str]:
    """New values between forward and backward."""
    expected = make_transformer(num_blocks=2)
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy[strategy])
    model = in_mode(wrapped, mode)
    loss_of(expected, batch(0, 0)).backward()
    loss = loss_of(model, batch(0, 0))
    _replace(wrapped, "object")
    loss.backward()
    wrong = []
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for name, param in wrapped.named_parameters():
            if name in CHANGED:
                if param.grad is not None:  # the backward was that of the one before
                    wrong.append(f"gradient of {name}")
                if not torch.equal(param, _new_values()[name]):
                    wrong.append(f"value of {name}")
            elif not torch.allclose(param.grad, expected.get_parameter(name).grad, 1e-4, 1e-6):
                wrong.append(f"gradient of {name}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_backward_is_that_of_its_forward(ranks: RankPool, strategy: str, mode: str) -> None:
    for wrong in ranks.run(_before_backward, 2, mode, strategy):
        assert wrong == []


def _plain_and_sharded(door: str, mode: str) -> list[tuple[Any, Any]]:
    """A model and a sharded copy of it, each with what runs it."""
    plain = make_transformer(num_blocks=2)
    sharded = through(door, copy.deepcopy(plain))
    return [(plain, plain), (sharded, in_mode(sharded, mode))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_replaced_between_forward_and_backward(rank: int, door: str, mode: str) -> None:
    """The backward is that of its forward; the new parameter's values are the next forward's."""
    pairs = _plain_and_sharded(door, mode)
    models = [model for model, _ in pairs]
    losses = []
    for model, run in pairs:
        loss_of(run, batch(rank, 0)).backward()
        model.zero_grad()
        loss = loss_of(run, batch(rank, 0))
        for linear in (model.head, model.blocks[0].up):
            linear.weight = nn.Parameter(torch.full_like(linear.weight, 0.25))
        loss.backward()
        losses.append(loss_of(run, batch(rank, 1)).item())
        if model is models[0]:
            average_gradients(model)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    expected = {n: p.grad for n, p in models[0].named_parameters() if p.grad is not None}
    assert different(whole_gradients(models[1]), expected) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_replaced_parameter_brings_its_gradient(rank: int, door: str, mode: str) -> None:
    """None, as a new one has, or its own, to which the next backward adds; frozen ones get none."""
    pairs = _plain_and_sharded(door, mode)
    models = [model for model, _ in pairs]
    for model, run in pairs:
        loss_of(run, batch(rank, 0)).backward()
        if model is models[0]:
            average_gradients(model)
        up, head, down = model.blocks[0].up, model.head, model.blocks[1].down
        for linear, is_frozen in (up, False), (head, False), (down, True):
            values = torch.full_like(linear.weight, 0.25)
            linear.weight = nn.Parameter(values, requires_grad=not is_frozen)
        head.weight.grad = torch.full_like(head.weight, 2.0)
        before = {name: param.grad for name, param in model.named_parameters()}
        if model is models[0]:
            model.zero_grad()
        loss_of(run, batch(rank, 1)).backward()
        if model is models[0]:
            average_gradients(model)
            for name, param in model.named_parameters():
                if param.grad is not None and before[name] is not None:
                    param.grad += before[name]
    expected = {n: p.grad for n, p in models[0].named_parameters() if p.grad is not None}
    assert different(whole_gradients(models[1]), expected) == []


def _unit_without_a_backward(rank: int, world_size: int) -> bool:
    """A frozen root stays unsharded after its forward; then its values are replaced."""
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model = FSDP(layer)
    x = torch.ones(2, 4, requires_grad=True)
    model(x)
    layer.weight = nn.Parameter(torch.full((4, 4), 2.0), requires_grad=False)
    return torch.equal(model(x), torch.full((2, 4), 8.0))


def test_a_unit_without_a_backward_takes_new_values(ranks: RankPool) -> None:
    assert all(ranks.run(_unit_without_a_backward, 2))
