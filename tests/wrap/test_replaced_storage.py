"""Whatever replaces a unit's storage after wrapping, the model trains on the new values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from modes import in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPStateError, fully_shard


def _model() -> nn.Sequential:
    torch.manual_seed(7)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    return nn.Sequential(nn.Linear(6, 6), block, nn.LayerNorm(6), nn.Linear(6, 3, bias=False))


# -- what replaces storage, of a sharded model and of the plain one beside it ----------------------


def _initialise(modules: Iterable[nn.Module]) -> None:
    """Give values that ranks need not draw alike."""
    for module in modules:
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            for number, param in enumerate(module.parameters(recurse=False)):
                nn.init.constant_(param, 0.1 * (number + 1))


def _to_empty(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    _initialise(model.modules())


def _module_by_module(model: nn.Module) -> None:
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        _initialise([module])


def _children_first(model: nn.Module) -> None:
    for module in reversed([*model.modules()]):
        module.to_empty(device="cpu", recurse=False)
        _initialise([module])


def _assign(model: nn.Module) -> None:
    values = _model()
    _initialise(values.modules())
    model.load_state_dict(values.state_dict(), assign=True)


REPLACE: dict[str, Callable[[nn.Module], object]] = {
    "to_empty": _to_empty,
    "assign": _assign,
    "module by module": _module_by_module,
    "to": lambda model: model.to(torch.float64),
    "children first": _children_first,
    "float": lambda model: model.float(),
}


# -- units -----------------------------------------------------------------------------------------


def _list(model: nn.Sequential) -> nn.Module:
    fully_shard([model[2], model[3]])
    fully_shard(model[1])
    return fully_shard(model)


def _single(model: nn.Sequential) -> nn.Module:
    fully_shard(model[1])
    return fully_shard(model)


def _wrapper(model: nn.Sequential) -> nn.Module:
    model[1] = FSDP(model[1])
    return FSDP(model)


SHARD = {"list": _list, "single": _single, "wrapper": _wrapper}


UNITS = [
    ("list", "cpu", "float"),
    ("list", "meta", "to_empty"),
    ("list", "meta", "module by module"),
    ("single", "meta", "assign"),
    ("wrapper", "cpu", "float"),
]


@pytest.mark.parametrize(
    ("mode", "units", "device", "first"),
    [
        *(("eager", *units) for units in UNITS),
        ("hooks", "list", "meta", "module by module"),
        ("graph", "single", "meta", "to_empty"),
    ],
)
@on_ranks(2)
def test_trains_on_new_values(rank: int, mode: str, units: str, device: str, first: str) -> None:
    batches = [*torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(1))]
    plain = _model()
    with torch.device(device):
        model = SHARD[units](_model())
    run = in_mode(model, mode)
    for way in (first, *REPLACE) if mode == "eager" else (first, "assign", "to"):
        for one in (model, plain):
            torch.manual_seed(3)
            REPLACE[way](one)
            one.zero_grad()
        for one, inputs in ((run, [batches[rank]]), (plain, batches)):
            dtype = next(one.parameters()).dtype
            for x in inputs:
                (one(x.to(dtype)).square().sum() / len(inputs)).backward()
        with torch.no_grad():  # nor may a graph of autograd hold parameters that are to be swapped
            for one in (model, plain):
                for param in one.parameters():
                    param.sub_(param.grad, alpha=0.1)
            got = {f"{name} after {way}": p.full_tensor() for name, p in model.named_parameters()}
        expected = {f"{name} after {way}": p.detach() for name, p in plain.named_parameters()}
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_an_optimizer_of_what_the_next_forward_takes_values_from_raises(rank: int) -> None:
    model = _model()
    fully_shard(model)
    model[0].weight = nn.Parameter(torch.full((6, 6), 0.5))
    too_early = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(FSDPStateError, match="after the next forward"):
        too_early.step()
    assert torch.equal(model[0].weight.full_tensor(), torch.full((6, 6), 0.5))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert not torch.equal(model[0].weight.full_tensor(), torch.full((6, 6), 0.5))
