"""fully_shard of a list: one unit of several modules, against one process and torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import different, gradients, whole_gradients
from models import Transformer, average_gradients, batch, loss_of, make_transformer
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.utils.checkpoint import checkpoint

import fsdp_dynamo
from fsdp_dynamo import FSDPError, fully_shard, record_events

Pick = Callable[[Transformer], list[nn.Module]]


class _Looped(Transformer):
    """Runs its blocks, norm and head as a function says."""

    way = "plain"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return WAYS[self.way](self, tokens)


def _blocks(model: Transformer, x: torch.Tensor) -> torch.Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def _plain(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.head(model.norm(_blocks(model, model.embed(tokens)))) * model.scale


def _without_norm(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    return model.head(_blocks(model, model.embed(tokens))) * model.scale


def _norm_twice(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    x = model.norm(_blocks(model, model.norm(model.embed(tokens))))
    return model.head(x) * model.scale


def _norm_again(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """After the last module of the unit."""
    x = model.norm(_blocks(model, model.embed(tokens)))
    return (model.head(x) + model.head(model.norm(2 * x))) * model.scale


def _embed_without_grad(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = model.embed(tokens)
    return model.head(model.norm(_blocks(model, x))) * model.scale


def _checkpointed(reentrant: bool) -> Callable[[Transformer, torch.Tensor], torch.Tensor]:
    def run(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return model.head(checkpoint(model.norm, x, use_reentrant=reentrant)) * model.scale

    return run


def _checkpoint_of_all(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    def run(x: torch.Tensor) -> torch.Tensor:
        return model.head(model.norm(_blocks(model, x)))

    return checkpoint(run, model.embed(tokens), use_reentrant=False) * model.scale


WAYS: dict[str, Callable[[Transformer, torch.Tensor], torch.Tensor]] = {
    "plain": _plain,
    "without the norm": _without_norm,
    "norm twice": _norm_twice,
    "norm again": _norm_again,
    "embed without grad": _embed_without_grad,
    "checkpointed": _checkpointed(False),
    "reentrant": _checkpointed(True),
    "checkpoint of all": _checkpoint_of_all,
}
PICKS: dict[str, Pick] = {
    "norm, head": lambda model: [model.norm, model.head],
    "head, norm": lambda model: [model.head, model.norm],
    "embed, head": lambda model: [model.embed, model.head],
    "embed, norm, head": lambda model: [model.embed, model.norm, model.head],
    "blocks": lambda model: [model.blocks[0], model.blocks[2]],
    "a block and its norm": lambda model: [model.blocks[1].norm1, model.blocks[1], model.norm],
}
TIED = {"embed, head", "embed, norm, head"}


def _model(pick: str, way: str) -> _Looped:
    torch.manual_seed(7)
    model = _Looped(num_blocks=3 if pick == "blocks" else 2, tied=pick in TIED)
    model.way = way
    return model


def _shard(model: Any, pick: str, library: Any = fsdp_dynamo) -> Any:
    shard = library.fully_shard
    given = PICKS[pick](model)
    assert shard(given) is given
    for block in model.blocks:
        if block not in given:
            shard(block)
    return shard(model)


CASES = [(pick, "plain") for pick in PICKS] + [
    (pick, way) for pick in ("norm, head", "embed, norm, head") for way in WAYS if way != "plain"
]


SOME = [
    ("a block and its norm", "plain"),
    ("embed, norm, head", "embed without grad"),
    ("norm, head", "checkpointed"),
]


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        ("eager", CASES),
        ("hooks", [*SOME, ("norm, head", "norm again"), ("embed, norm, head", "reentrant")]),
        ("graph", [*SOME, ("embed, norm, head", "norm twice")]),
    ],
    ids=["eager", "hooks", "graph"],
)
@on_ranks(2)
def test_equals_one_process(rank: int, mode: str, cases: list[tuple[str, str]]) -> None:
    for pick, way in cases:
        torch._dynamo.reset()
        plain = _model(pick, way)
        model = _shard(_model(pick, way), pick)
        run = in_mode(model, mode)
        for step in range(2):  # the second with what the first has learned of the order
            loss_of(plain, batch(rank, step)).backward()
            with record_events() as log:
                loss_of(run, batch(rank, step)).backward()
        average_gradients(plain)
        with torch.no_grad():
            model(batch(rank, 0))
        expected = gradients(plain)
        has = {name for name, param in model.named_parameters() if param.grad is not None}
        assert has == expected.keys(), (pick, way)
        assert different(whole_gradients(model), expected) == [], (pick, way)
        unit = pick.replace(", ", "+")
        if "norm+head" in unit and way in ("plain", "embed without grad"):
            kinds = [e.kind for e in log if e.unit == unit]
            assert kinds.count("reduce_scatter") == 1
            assert kinds.count("all_gather") in (1, 2)  # maybe there when the backward begins


@on_ranks(2)
def test_state_dicts_and_copies(rank: int) -> None:
    """Another model of ours and one of torch's load the values."""
    model, other, theirs = (
        _shard(_model("embed, head", "plain"), "embed, head", library)
        for library in (fsdp_dynamo, fsdp_dynamo, upstream)
    )
    loss_of(model, batch(rank, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    saved = model.state_dict()
    whole = {key: value.full_tensor() for key, value in saved.items()}
    assert whole.keys() == _model("embed, head", "plain").state_dict().keys()
    other.load_state_dict(saved)
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(theirs, dict(whole), options=options)  # it replaces the values
    for loaded in (other.state_dict(), get_model_state_dict(theirs)):
        torch.testing.assert_close(
            {key: value.full_tensor() for key, value in loaded.items()}, whole, rtol=0, atol=0
        )

    copied = copy.deepcopy(model)
    losses = [loss_of(one, batch(rank, 1)) for one in (model, copied)]
    losses[1].backward()
    assert losses[0] == losses[1]
    assert copied.embed._fsdp_own_unit is copied.head._fsdp_own_unit
    assert copied.embed._fsdp_own_unit is not model.embed._fsdp_own_unit
    assert model.head.weight.grad is None


class _Fails(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("as planned")
        return super().forward(x)


@on_ranks(2)
def test_goes_on_after_an_exception(rank: int) -> None:
    """Between two modules, and without a unit above them."""
    plain = nn.Sequential(nn.Linear(4, 4), _Fails(4, 4), nn.Linear(4, 4)).to(torch.float64)
    model = copy.deepcopy(plain)
    fully_shard([model[0], model[2]])
    model[1].fails = True
    with pytest.raises(RuntimeError, match="as planned"):
        model(torch.ones(2, 4, dtype=torch.float64))
    model[1].fails = False
    x = torch.ones(2, 4, dtype=torch.float64)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for _ in range(3):
        losses = [net(x).square().sum() for net in (plain, model)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_refused(rank: int) -> None:
    model = make_transformer(num_blocks=1)
    fully_shard([model.norm, model.head])
    for shard, words in (
        (lambda: fully_shard([]), "got an empty list"),
        (lambda: fully_shard([model.embed], policy=nn.Linear), "a list without a policy"),
        (lambda: fully_shard(nn.Sequential(model.embed, model.norm)), "got 1 of 2"),
    ):
        with pytest.raises(FSDPError, match=words):
            shard()
    loss_of(fully_shard(model), batch(rank, 0)).backward()
