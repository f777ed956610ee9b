"""fully_shard of a list: one unit of several modules, against one process and torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as upstream
from loops import error_of
from models import Transformer, batch, loss_of, make_transformer
from modes import in_mode
from pool import RankPool
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_dynamo import FSDP, fully_shard, record_events

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
    model = _Looped(num_blocks=3, tied=pick in TIED)
    model.way = way
    return model


def _shard(model: Any, pick: str, library: Any = None) -> Any:
    shard = library.fully_shard if library else fully_shard
    given = PICKS[pick](model)
    assert shard(given) is given
    for block in model.blocks:
        if block not in given:
            shard(block)
    return shard(model)


def _whole_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, with_grads=True):
        named = model.named_parameters()
        return {name: _full(p.grad).clone() for name, p in named if p.grad is not None}


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _expected(pick: str, way: str, world_size: int, steps: int) -> dict[str, torch.Tensor]:
    model = _model(pick, way)
    for step in range(steps):
        for rank in range(world_size):
            (loss_of(model, batch(rank, step)) / world_size).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _beside(rank: int, world_size: int, cases: list[tuple[str, str]], mode: str) -> list[str]:
    """Cases whose gradients are not those of one process."""
    wrong = []
    for pick, way in cases:
        torch._dynamo.reset()
        model = _shard(_model(pick, way), pick)
        run = in_mode(model, mode)
        expected = _expected(pick, way, world_size, steps=2)
        for step in range(2):  # the second with what the first has learned of the order
            loss_of(run, batch(rank, step)).backward()
        with torch.no_grad():
            run(batch(rank, 0))
        has = {name for name, param in model.named_parameters() if param.grad is not None}
        wrong += [f"{pick}, {way}: {name} (None)" for name in sorted(has ^ expected.keys())]
        for name, grad in _whole_grads(model).items():
            if not torch.allclose(grad, expected[name], rtol=1e-4, atol=1e-6):
                wrong.append(f"{pick}, {way}: {name}")
    return wrong


CASES = [(pick, "plain") for pick in PICKS] + [
    (pick, way) for pick in ("norm, head", "embed, norm, head") for way in WAYS if way != "plain"
]


SOME = [
    ("norm, head", "plain"),
    ("a block and its norm", "plain"),
    ("embed, norm, head", "embed without grad"),
    ("embed, norm, head", "checkpointed"),
]
IN_A_GRAPH = [case for case in CASES if case[1] != "reentrant"]


@pytest.mark.parametrize(
    ("mode", "cases"),
    [
        pytest.param("eager", CASES, id="eager"),
        pytest.param("hooks", SOME, id="hooks"),
        pytest.param("graph", SOME, id="graph"),
        pytest.param("hooks", CASES, id="hooks, all", marks=pytest.mark.slow),
        pytest.param("graph", IN_A_GRAPH, id="graph, all", marks=pytest.mark.slow),
    ],
)
def test_equals_one_process(ranks: RankPool, mode: str, cases: list[tuple[str, str]]) -> None:
    for wrong in ranks.run(_beside, 2, cases, mode):
        assert wrong == []


def _collectives(rank: int, world_size: int, pick: str, mode: str) -> list[tuple[str, str]]:
    model = _shard(_model(pick, "plain"), pick)
    run = in_mode(model, mode)
    loss_of(run, batch(rank, 0)).backward()
    with record_events() as log:
        loss_of(run, batch(rank, 1)).backward()
    kinds = ("all_gather", "reduce_scatter")
    return [(event.kind, event.unit) for event in log if event.kind in kinds]


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_gathers_and_reduces_once(ranks: RankPool, mode: str) -> None:
    for pick, unit in (("norm, head", "norm+head"), ("embed, norm, head", "embed+norm+head")):
        for found in ranks.run(_collectives, 2, pick, mode):
            of_unit = [kind for kind, name in found if name == unit]
            assert sorted(of_unit) in (
                ["all_gather", "all_gather", "reduce_scatter"],
                ["all_gather", "reduce_scatter"],  # still there when the backward begins
            )
            assert {name for _, name in found} >= {"", unit, "blocks.0", "blocks.2"}


def _saved(rank: int, world_size: int) -> dict[str, Any]:
    """State dicts and copies of a model, and what torch's own has in their place."""
    found: dict[str, Any] = {}
    model = _shard(_model("embed, head", "plain"), "embed, head")
    loss_of(model, batch(rank, 0)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    with FSDP.summon_full_params(model):
        found["whole"] = {k: v.clone() for k, v in model.state_dict().items()}
    saved = model.state_dict()
    other = _shard(_model("embed, head", "plain"), "embed, head")
    other.load_state_dict(saved)
    with FSDP.summon_full_params(other):
        found["loaded"] = {k: v.clone() for k, v in other.state_dict().items()}
    copied = copy.deepcopy(model)
    losses = [loss_of(one, batch(rank, 1)) for one in (model, copied)]
    losses[1].backward()
    found["copied"] = [loss.item() for loss in losses]
    found["shares"] = copied.embed._fsdp_own_unit is copied.head._fsdp_own_unit
    found["is new"] = copied.embed._fsdp_own_unit is not model.embed._fsdp_own_unit
    found["no grad"] = model.head.weight.grad is None
    theirs = _shard(_model("embed, head", "plain"), "embed, head", upstream)
    whole = {key: value.full_tensor() for key, value in saved.items()}
    set_model_state_dict(theirs, whole, options=StateDictOptions(full_state_dict=True))
    values = get_model_state_dict(theirs)
    found["torch's"] = {key: _full(value) for key, value in values.items()}
    return found


def test_state_dicts_and_copies(ranks: RankPool) -> None:
    for found in ranks.run(_saved, 2):
        assert found["whole"].keys() == _model("embed, head", "plain").state_dict().keys()
        for other in ("loaded", "torch's"):
            for key, value in found.get(other, {}).items():
                assert torch.equal(value, found["whole"][key]), (other, key)
        assert found["copied"][0] == found["copied"][1]
        assert (found["shares"], found["is new"], found["no grad"]) == (True, True, True)


class _Fails(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("as planned")
        return super().forward(x)


def _goes_on(rank: int, world_size: int) -> tuple[str, list[float], list[float]]:
    """After an exception between two modules, and without a unit above them."""
    plain, model = (nn.Sequential(nn.Linear(4, 4), _Fails(4, 4), nn.Linear(4, 4)) for _ in "ab")
    model.load_state_dict(plain.state_dict())
    model, plain = (one.to(torch.float64) for one in (model, plain))
    fully_shard([model[0], model[2]])
    x = torch.ones(2, 4, dtype=torch.float64)
    model[1].fails = True
    error = error_of(lambda: model(x))
    model[1].fails = False
    losses: tuple[list[float], list[float]] = ([], [])
    for one, into in zip((model, plain), losses, strict=True):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(3):
            loss = one(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            into.append(loss.item())
    return error, *losses


def test_goes_on_after_an_exception(ranks: RankPool) -> None:
    for error, losses, expected in ranks.run(_goes_on, 2):
        assert "as planned" in error
        assert losses == pytest.approx(expected)


def _refused(rank: int, world_size: int) -> list[str]:
    model = make_transformer(num_blocks=1)
    fully_shard([model.norm, model.head])
    part = nn.Sequential(model.embed, model.norm)
    return [
        error_of(lambda: fully_shard([])),
        error_of(lambda: fully_shard([model.embed], policy=nn.Linear)),
        error_of(lambda: fully_shard(part)),
        error_of(lambda: loss_of(fully_shard(model), batch(rank, 0)).backward()),
    ]


def test_refused(ranks: RankPool) -> None:
    for empty, policy, part, whole in ranks.run(_refused, 2):
        assert "got an empty list" in empty
        assert "a list without a policy" in policy
        assert "got 1 of 2" in part
        assert whole == ""
