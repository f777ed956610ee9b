"""Values that were put in the place of parameters after wrapping: in use from then on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import different, whole_gradients
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

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy

CHANGED = ("blocks.0.up.weight", "blocks.1.norm1.bias", "embed.weight", "scale")
"""Of every unit; with two ranks some have no element on one of them."""


def _new_values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    plain = dict(make_transformer(num_blocks=2).named_parameters())
    return {n: 0.3 * torch.randn(plain[n].shape, generator=generator) for n in CHANGED}


def _replace(wrapped: FSDP, kind: str) -> None:
    """Put new values in the place of this rank's parts."""
    shards = wrapped.parameter_shards()
    for fqn, whole in _new_values().items():
        shard = shards[fqn]
        part = whole.flatten()[shard.start : shard.start + shard.numel].view(shard.param.shape)
        if kind == "data":
            shard.param.data = part.clone()
        else:
            owner, _, name = fqn.rpartition(".")
            setattr(wrapped.module.get_submodule(owner), name, nn.Parameter(part.clone()))


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert FSDP.optim_state_dict(model, optimizer)["param_groups"]
    return _from_shards(model)


def _from_shards(model: FSDP) -> dict[str, torch.Tensor]:
    parts = {fqn: shard.param.detach() for fqn, shard in model.parameter_shards().items()}
    whole: dict[str, torch.Tensor] = {}
    model.update_whole(parts, lambda fqn, value: whole.setdefault(fqn, value.clone()))
    return whole


def _forward(model: FSDP) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        model(batch(0, 0))
    return model.state_dict()


USES: dict[str, Callable[[FSDP], dict[str, torch.Tensor]]] = {
    "forward": _forward,
    "summon": _summon,
    "state_dict": lambda model: model.state_dict(),
    "optimizer state dict": _optimizer_state_dict,
    "shards": _from_shards,
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
@pytest.mark.parametrize("kind", ["data", "object"])
def test_every_use_sees_new_values(ranks: RankPool, kind: str, strategy: str) -> None:
    for wrong in ranks.run(_written_back, 2, "eager", kind, strategy, list(USES)):
        assert wrong == []


@pytest.mark.parametrize("mode", ["hooks", "graph"])
@pytest.mark.parametrize("kind", ["data", "object"])
def test_compiled_models_see_new_values(ranks: RankPool, kind: str, mode: str) -> None:
    uses = ["forward", "summon", "state_dict"]
    for wrong in ranks.run(_written_back, 2, mode, kind, "FULL_SHARD", uses):
        assert wrong == []


def _objects(rank: int, world_size: int) -> dict[str, bool]:
    """A new parameter is the model's, as in a plain one; the one before it is free."""
    wrapped = wrap(make_transformer(num_blocks=2))
    up = wrapped.module.blocks[0].up
    old, new = up.bias, nn.Parameter(torch.full_like(up.bias, 2.0))
    up.bias = new
    before = old.detach().clone()
    loss_of(wrapped, batch(rank, 0)).backward()
    optimizer = torch.optim.SGD([new], lr=1.0)
    optimizer.step()
    whole = wrapped.state_dict()["blocks.0.up.bias"]
    return {
        "it is in the module": up.bias is new,
        "it has this rank's gradient": new.grad is not None and new.grad.shape == new.shape,
        "it is trained": not torch.equal(whole, torch.full_like(whole, 2.0)),
        "the old one keeps its values": torch.equal(old, before) and old.grad is None,
    }


def test_another_parameter_takes_the_place(ranks: RankPool) -> None:
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
    """Two parameters that take each other's storage."""
    wrapped = wrap(make_transformer(num_blocks=2), sharding_strategy=ShardingStrategy.NO_SHARD)
    first, second = wrapped.module.blocks[0].norm1.weight, wrapped.module.blocks[0].norm2.bias
    first.data, second.data = second.data, first.data
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
    model.module.norm.weight.data = torch.zeros(17)


def _another_dtype(model: FSDP) -> None:
    for name, param in model.named_parameters():
        if not name.startswith("blocks"):  # of the root unit: each rank has a part of some
            param.data = param.data.double()


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
    datas = [p.data for p in wrapped.parameters()]
    REFUSED[name][0](wrapped)
    messages = []
    for use in ("forward", "summon", "state_dict", "shards", "deepcopy", "conversion"):
        with pytest.raises(FSDPStateError) as caught:
            USES[use](wrapped)
        messages.append(str(caught.value))
    for module, parameters in holders:
        module._parameters.update(parameters)
    for param, data in zip(wrapped.parameters(), datas, strict=True):
        param.data = data
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
    _replace(wrapped, "data")
    loss.backward()
    wrong = []
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for name, param in wrapped.named_parameters():
            if not torch.allclose(param.grad, expected.get_parameter(name).grad, 1e-4, 1e-6):
                wrong.append(f"gradient of {name}")
            if name in CHANGED and not torch.equal(param, _new_values()[name]):
                wrong.append(f"value of {name}")
    return wrong


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_backward_is_that_of_its_forward(ranks: RankPool, strategy: str, mode: str) -> None:
    for wrong in ranks.run(_before_backward, 2, mode, strategy):
        assert wrong == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_replaced_between_forward_and_backward(rank: int, door: str, mode: str) -> None:
    """The backward is that of its forward; the new parameter is the next forward's."""
    models: list[Any] = [make_transformer(num_blocks=2)]
    models.append(through(door, copy.deepcopy(models[0])))
    losses = []
    for model, run in (models[0], models[0]), (models[1], in_mode(models[1], mode)):
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
    got = whole_gradients(models[1])
    if door == "fully_shard":  # the DTensor stays and takes the values, so its gradient stays, too
        got = {name: grad for name, grad in got.items() if name in expected}
    assert different(got, expected) == []


def _unit_without_a_backward(rank: int, world_size: int) -> bool:
    """A frozen root stays unsharded after its forward; then its values are replaced."""
    layer = nn.Linear(4, 4, bias=False).requires_grad_(False)
    model = FSDP(layer)
    x = torch.ones(2, 4, requires_grad=True)
    model(x)
    shard = model.parameter_shards()["weight"]
    shard.param.data = torch.full_like(shard.param, 2.0)
    return torch.equal(model(x), torch.full((2, 4), 8.0))


def test_a_unit_without_a_backward_takes_new_values(ranks: RankPool) -> None:
    assert all(ranks.run(_unit_without_a_backward, 2))
