"""Parameters that are frozen and trained again between steps, in all modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from modes import INDUCTOR_MODES, MODES, in_mode
from pool import RankPool, on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

PATTERNS = ["", "blocks.0", "blocks.1.up.weight", "", "blocks", "embed.weight", ""]
"""What is frozen, step by step: parameters whose names begin so."""


def _freeze(model: nn.Module, frozen: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not (frozen and name.startswith(frozen)))


def _train(
    model: nn.Module, call: Callable[..., Any], rank: int, average: Callable[[nn.Module], None]
) -> tuple[list[float], list[int]]:
    """Losses, and how many parameters have a gradient after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    losses, counts = [], []
    for step, frozen in enumerate(PATTERNS):
        _freeze(model, frozen)
        optimizer.zero_grad()
        loss = loss_of(call, batch(rank, step))  # type: ignore[arg-type]
        loss.backward()
        average(model)
        counts.append(sum(param.grad is not None for param in model.parameters()))
        optimizer.step()
        losses.append(loss.item())
    return losses, counts


def _called_again(model: nn.Module) -> Callable[..., Any]:
    """A whole graph notices what is trained anew, and is made anew by the call that follows."""

    def call(tokens: torch.Tensor) -> Any:
        try:
            return model(tokens)
        except FSDPStateError as error:
            if "expected parameters that are frozen, as they were" not in str(error):
                raise
            return model(tokens)

    return call


def _compare(rank: int, world_size: int, mode: str, before: str) -> tuple[Any, Any]:
    plain = make_transformer(num_blocks=2)
    _freeze(plain, before)
    reference = copy.deepcopy(plain)
    expected = _train(reference, reference, rank, average_gradients)
    model = wrap(plain)
    got = _train(model, _called_again(in_mode(model, mode)), rank, lambda _: None)
    return expected, got


@pytest.mark.parametrize("before", ["", "blocks.1"])
@pytest.mark.parametrize(
    "mode", [*MODES, *(pytest.param(mode, marks=pytest.mark.slow) for mode in INDUCTOR_MODES)]
)
def test_between_steps(ranks: RankPool, mode: str, before: str) -> None:
    for expected, got in ranks.run(_compare, 2, mode, before):
        assert got[1] == expected[1]
        assert got[0] == pytest.approx(expected[0], rel=1e-5)


def _thawed(rank: int, world_size: int, mode: str) -> list[tuple[str, bool]]:
    """Trained parameters, and whether their gradients are one process's.

    A forward with gradients has come before, when all parameters were frozen.
    """
    plain = make_transformer(num_blocks=2).requires_grad_(False)
    model = wrap(copy.deepcopy(plain))
    run = _called_again(in_mode(model, mode))
    for net, call in ((plain, plain), (model, run)):
        loss_of(call, batch(rank, 0))  # type: ignore[arg-type]
        for name, param in net.named_parameters():
            param.requires_grad_(name.startswith("blocks.1.up"))
        loss_of(call, batch(rank, 1)).backward()  # type: ignore[arg-type]
    average_gradients(plain)
    expected = {name: param.grad for name, param in plain.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True):
        got = {name: param.grad for name, param in model.named_parameters()}
    trained = [name for name, grad in expected.items() if grad is not None]
    assert trained == [name for name, grad in got.items() if grad is not None]
    return [(name, torch.allclose(got[name], expected[name], 1e-4, 1e-6)) for name in trained]


@pytest.mark.parametrize("mode", MODES)
def test_trained_after_a_forward(ranks: RankPool, mode: str) -> None:
    """Code that was made while a unit's output needed no gradient is not used any more."""
    names = ["blocks.1.up.weight", "blocks.1.up.bias"]
    assert ranks.run(_thawed, 2, mode) == [[(name, True) for name in names]] * 2


def _frozen_units(rank: int, world_size: int, mode: str) -> list[str]:
    model = wrap(make_transformer(num_blocks=2))
    call = in_mode(model, mode)
    loss_of(call, batch(rank, 0)).backward()
    _freeze(model, "blocks.1")
    with record_events() as log:
        loss_of(call, batch(rank, 0)).backward()
    return [event.unit for event in log if event.kind == "reduce_scatter"]


@pytest.mark.parametrize("mode", ["eager", "hooks"])
def test_a_frozen_unit_reduces_nothing(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_frozen_units, 2, mode) == [["blocks.0", ""]] * 2


def _accumulated(rank: int, world_size: int, mode: str, strategy: str) -> list[str]:
    """Names of gradients that are not one process's, after one parameter was frozen in between."""
    plain = make_transformer(num_blocks=1)
    model = wrap(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy])
    run = _called_again(in_mode(model, mode))

    def accumulate(call: Callable[..., Any], no_sync: AbstractContextManager[Any]) -> None:
        loss_of(call, batch(rank, 0)).backward()  # type: ignore[arg-type]
        for one in (model, plain):
            _freeze(one, "blocks.0.up.bias")
        with no_sync:
            loss_of(call, batch(rank, 1)).backward()  # type: ignore[arg-type]
        loss_of(call, batch(rank, 2)).backward()  # type: ignore[arg-type]

    accumulate(plain, nullcontext())
    average_gradients(plain)
    _freeze(model, "")
    accumulate(run, model.no_sync())
    with FSDP.summon_full_params(model, with_grads=True):
        return [
            name
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
            if not torch.allclose(p.grad, q.grad, 1e-4, 1e-6)
        ]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("mode", MODES)
def test_a_reduced_gradient_of_what_is_frozen_then(
    ranks: RankPool, mode: str, strategy: str
) -> None:
    """Steps that accumulate do not change it."""
    assert ranks.run(_accumulated, 2, mode, strategy) == [[], []]


Frozen = tuple[str, str]
"""What is frozen before the second and before the third step; the third alone reduces."""


def _unreduced(rank: int, world_size: int, mode: str, strategy: str, frozen: Frozen) -> list[str]:
    """Names of gradients that are not one process's, after steps of which the last one reduces."""
    plain = make_transformer(num_blocks=1)
    model = wrap(copy.deepcopy(plain), sharding_strategy=ShardingStrategy[strategy])
    run = _called_again(in_mode(model, mode))

    def accumulate(net: nn.Module, call: Callable[..., Any], no_sync: Callable[[], Any]) -> None:
        with no_sync():
            loss_of(call, batch(rank, 0)).backward()  # type: ignore[arg-type]
            _freeze(net, frozen[0])
            loss_of(call, batch(rank, 1)).backward()  # type: ignore[arg-type]
        _freeze(net, frozen[1])
        loss_of(call, batch(rank, 2)).backward()  # type: ignore[arg-type]

    accumulate(plain, plain, nullcontext)
    average_gradients(plain)
    accumulate(model, run, model.no_sync)
    _freeze(model, "")
    with FSDP.summon_full_params(model, with_grads=True):
        return [
            name
            for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True)
            if p.grad is None or q.grad is None or not torch.allclose(p.grad, q.grad, 1e-4, 1e-6)
        ]


FROZEN_LATER: tuple[Frozen, ...] = (
    ("", "blocks.0.up.bias"),
    ("", "blocks.0"),
    ("blocks.0.up.bias", ""),
)


@pytest.mark.parametrize(
    ("mode", "strategy"), [*((mode, "FULL_SHARD") for mode in MODES), ("eager", "NO_SHARD")]
)
@pytest.mark.parametrize("frozen", FROZEN_LATER)
def test_an_unreduced_gradient_of_what_is_frozen_then(
    ranks: RankPool, mode: str, strategy: str, frozen: Frozen
) -> None:
    """It is reduced before the next forward, and nothing that comes later goes into it."""
    assert ranks.run(_unreduced, 2, mode, strategy, frozen) == [[], []]


class _Critic(Transformer):
    """Judges sequences of vectors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).mean()


def _in_turn(
    generator: Any, critic: Any, calls: tuple[Any, Any], rank: int, average: Any
) -> list[float]:
    """A generator and its critic, each frozen by hand while the other is trained."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (generator, critic)]
    losses = []
    for step in range(3):
        for param in critic.parameters():
            param.requires_grad_(True)
        tokens = batch(rank, step)
        real = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(step))
        fake = calls[0](tokens)[..., :16]
        optimizers[1].zero_grad()
        (calls[1](fake.detach()) - calls[1](real)).backward()
        average(critic)
        optimizers[1].step()
        for param in critic.parameters():
            param.requires_grad_(False)
        optimizers[0].zero_grad()
        loss = -calls[1](calls[0](tokens)[..., :16])
        loss.backward()
        average(generator)
        optimizers[0].step()
        losses.append(loss.item())
    return losses


def _adversaries(rank: int, world_size: int, mode: str) -> tuple[list[float], list[float]]:
    torch.manual_seed(0)
    plain = Transformer(num_blocks=1), _Critic(num_blocks=1)
    reference = copy.deepcopy(plain)
    expected = _in_turn(*reference, reference, rank, average_gradients)
    policy = ModuleWrapPolicy({type(plain[0].blocks[0])})
    models = tuple(FSDP(m, auto_wrap_policy=policy) for m in plain)
    calls = tuple(in_mode(model, mode) for model in models)
    return expected, _in_turn(*models, calls, rank, lambda _: None)


@pytest.mark.parametrize("mode", MODES)
def test_two_models_in_turn(ranks: RankPool, mode: str) -> None:
    for expected, got in ranks.run(_adversaries, 2, mode):
        assert got == pytest.approx(expected, rel=1e-5)


def _evaluated(rank: int, world_size: int, mode: str) -> bool:
    """A frozen copy that only predicts, as a momentum encoder does."""
    model = wrap(make_transformer(num_blocks=1))
    with torch.no_grad():
        expected = model(batch(rank, 0))
        frozen = in_mode(copy.deepcopy(model).requires_grad_(False), mode)
        return torch.allclose(frozen(batch(rank, 0)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_copy(ranks: RankPool, mode: str) -> None:
    assert ranks.run(_evaluated, 2, mode) == [True, True]


Script = list[tuple[str, Any]]

HEAD = ("blocks.0.up", "head.weight")
LATER: dict[str, Script] = {
    "all": [("forward", None), ("freeze", ("",)), ("backward", 0)],
    "some": [("forward", None), ("freeze", ("blocks.0", "head.weight")), ("backward", 0)],
    "trained again": [
        ("forward", None),
        ("freeze", HEAD),
        ("evaluate", None),
        ("freeze", ()),
        ("backward", 0),
    ],
    "between two forwards": [
        ("freeze", HEAD),
        ("forward", None),
        ("freeze", ()),
        ("forward", None),
        ("backward", 1),
        ("backward", 0),
    ],
    "after a sum": [("sum", None), ("forward", None), ("freeze", HEAD), ("backward", 0)],
    "in a sum": [("sum", HEAD), ("freeze", ()), ("forward", None), ("backward", 0)],
}
"""Scripts that freeze parameters, by the beginnings of their names, after a forward."""


def _run_script(
    script: Script,
    model: nn.Module,
    call: Callable[..., Any],
    rank: int,
    no_sync: Callable[[], AbstractContextManager[Any]],
) -> None:
    def freeze(prefixes: tuple[str, ...]) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(prefixes))

    losses: list[torch.Tensor] = []
    freeze(())
    model.zero_grad()
    for step, (action, argument) in enumerate(script):
        tokens = batch(rank, step)
        if action == "freeze":
            freeze(argument)
        elif action == "forward":
            losses.append(loss_of(call, tokens))  # type: ignore[arg-type]
        elif action == "evaluate":
            with torch.no_grad():
                call(tokens)
        elif action == "backward":
            losses[argument].backward()
        else:
            with no_sync():
                loss = loss_of(call, tokens)  # type: ignore[arg-type]
                freeze(argument or ())
                loss.backward()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_frozen_between_forward_and_backward(rank: int, door: str, mode: str) -> None:
    """What is frozen when the backward runs gets no gradient, and keeps the one that it has."""
    plain = make_transformer(num_blocks=2)
    model = through(door, copy.deepcopy(plain))
    run = in_mode(model, mode)
    wrong = {}
    for name, script in LATER.items():
        _run_script(script, plain, plain, rank, nullcontext)
        average_gradients(plain)
        expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
        _run_script(script, model, run, rank, model.no_sync)
        wrong[name] = different(whole_gradients(model), expected)
    assert not any(wrong.values()), wrong


def _frozen_later(rank: int, world_size: int, mode: str) -> Any:
    """Step by step: whether outputs require gradients as they should, whether the reductions are
    none where nothing is trained, and gradients that differ."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    run, x, found = in_mode(model, mode), torch.ones(3, 4), []
    for trained in ("02", "", "0", "02", "2", ""):
        for one in (plain, model):
            one.requires_grad_(False)
            one.zero_grad()
        for position in map(int, trained):
            plain[position].requires_grad_(True)
            model[position].requires_grad_(True)
        with record_events() as log:
            output, expected = run(x), plain(x)
            if trained:
                expected.sum().backward()
                output.sum().backward()
        num_reductions = [event.kind for event in log].count("reduce_scatter")
        grads = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        is_right = output.requires_grad == expected.requires_grad
        found.append((is_right, bool(num_reductions), different(whole_gradients(model), grads)))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_frozen_after_wrapping(ranks: RankPool, mode: str) -> None:
    expected = [(True, bool(trained), []) for trained in ("02", "", "0", "02", "2", "")]
    assert ranks.run(_frozen_later, 2, mode) == [expected] * 2
