"""Parameters that are frozen and trained again between steps, in all modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from loops import different, gradients, whole_gradients
from models import average_gradients
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, fully_shard, record_events
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({nn.Linear})


class _Net(nn.Module):
    """Two units, and a parameter of the root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return y * self.scale


def _called_again(model: nn.Module, refusals: list[str]) -> Callable[..., Any]:
    """A whole graph notices what is trained anew, and is made anew by the call that follows."""

    def call(x: torch.Tensor) -> Any:
        try:
            return model(x)
        except FSDPStateError as error:
            if "expected parameters that are frozen, as they were" not in str(error):
                raise
            refusals.append(str(error))
            return model(x)

    return call


TRAINED = ("", "first second", "", "second.bias", "first second.weight scale", "second", "")
"""Beginnings of the names of what is trained, step by step; nothing at first."""


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_frozen_after_wrapping(rank: int, mode: str) -> None:
    """Gradients are one process's. A frozen unit reduces nothing, except in a whole graph, and code
    that was made while a unit's output needed no gradient is not used when it needs one."""
    plain = _Net()
    plain.first.requires_grad_(False)  # before wrapping, too
    model = FSDP(copy.deepcopy(plain), auto_wrap_policy=POLICY)
    refusals: list[str] = []
    run, x = _called_again(in_mode(model, mode), refusals), torch.ones(3, 4) + rank
    for trained in TRAINED:
        prefixes = tuple(trained.split())
        for one in (plain, model):
            one.zero_grad()
            for name, param in one.named_parameters():
                param.requires_grad_(name.startswith(prefixes))
        with record_events() as log:
            output, expected = run(x), plain(x)
            assert output.requires_grad == expected.requires_grad == bool(trained)
            if trained:
                expected.sum().backward()
                output.sum().backward()
        reduced = {unit for kind, unit, _ in log.keys("reduce_scatter")}
        if mode != "graph" or not trained:
            units = {prefix.partition(".")[0].replace("scale", "") for prefix in prefixes}
            assert reduced == units
        average_gradients(plain)
        assert different(whole_gradients(model), gradients(plain)) == []
    assert len(refusals) == (1 if mode == "graph" else 0)
    copied = in_mode(copy.deepcopy(model).requires_grad_(False), mode)
    with torch.no_grad():  # that predicts only, as a momentum encoder does
        torch.testing.assert_close(copied(x), plain(x))


# -- around a backward -----------------------------------------------------------------------------

Script = list[tuple[str, Any]]

BIAS = ("first.bias",)
PARTS = ("first.weight", "second.bias")
SCRIPTS: dict[str, Script] = {
    "all": [("forward", None), ("freeze", ("",)), ("backward", 0)],
    "some": [("forward", None), ("freeze", ("first", "second.bias", "scale")), ("backward", 0)],
    "trained again": [
        ("forward", None),
        ("freeze", PARTS),
        ("evaluate", None),
        ("freeze", ()),
        ("backward", 0),
    ],
    "between two forwards": [
        ("freeze", PARTS),
        ("forward", None),
        ("freeze", ()),
        ("forward", None),
        ("backward", 1),
        ("backward", 0),
    ],
    "after a sum": [("sum", None), ("forward", None), ("freeze", PARTS), ("backward", 0)],
    "in a sum": [("sum", PARTS), ("freeze", ()), ("forward", None), ("backward", 0)],
    "after a reduction": [
        ("forward", None),
        ("backward", 0),
        ("freeze", BIAS),
        ("sum", BIAS),
        ("forward", None),
        ("backward", 1),
    ],
    "with a sum that waits": [("sum", None), ("freeze", BIAS), ("forward", None), ("backward", 0)],
    "a unit with a sum that waits": [
        ("sum", None),
        ("freeze", ("first",)),
        ("forward", None),
        ("backward", 0),
    ],
    "within a sum": [
        ("sum", None),
        ("freeze", BIAS),
        ("sum", BIAS),
        ("freeze", ()),
        ("forward", None),
        ("backward", 0),
    ],
}
"""Scripts that freeze parameters, by the beginnings of their names."""


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
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        if action == "freeze":
            freeze(argument)
        elif action == "forward":
            losses.append(call(x).square().mean())
        elif action == "evaluate":
            with torch.no_grad():
                call(x)
        elif action == "backward":
            losses[argument].backward()
        else:
            with no_sync():
                loss = call(x).square().mean()
                freeze(argument or ())
                loss.backward()


@pytest.mark.parametrize(
    ("door", "mode", "strategy"),
    [
        ("wrapper", "eager", "FULL_SHARD"),
        ("wrapper", "eager", "NO_SHARD"),
        ("fully_shard", "eager", "FULL_SHARD"),
        ("fully_shard", "hooks", "FULL_SHARD"),
        ("wrapper", "graph", "FULL_SHARD"),
    ],
)
@on_ranks(2)
def test_scripts(rank: int, door: str, mode: str, strategy: str) -> None:
    """What is frozen when a backward runs gets no gradient, and keeps the one that it has; if that
    waits for a reduction, it is reduced before the next forward."""
    plain = _Net()
    model: Any = _Net()
    if door == "fully_shard":
        fully_shard(model, policy=POLICY)
    else:
        model = FSDP(model, None, ShardingStrategy[strategy], auto_wrap_policy=POLICY)
    run = in_mode(model, mode)
    wrong = {}
    for name, script in SCRIPTS.items():
        _run_script(script, plain, plain, rank, nullcontext)
        average_gradients(plain)
        expected = gradients(plain)
        _run_script(script, model, run, rank, model.no_sync)
        wrong[name] = different(whole_gradients(model), expected)
    assert not any(wrong.values()), wrong
