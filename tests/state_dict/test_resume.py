"""What the state of an optimizer must not lose on its way into another run, by every way."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import classification_loss, examples, fit, make_classifier, shard
from pool import on_ranks
from resumes import RESUMES, TEMPLATES, Pair, settings_of, whole_states
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fsdp_dynamo import FSDPStateError, FSDPValueError, fully_shard


def _folder() -> str:
    """A new one, the same for all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, src=0)
    return made[0]


def _front(door: str) -> nn.Module:
    model = make_classifier()
    return fully_shard(model) if door == "fully_shard" else shard(model)


def _adamw(door: str) -> Pair:
    model = _front(door)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _with_empty_groups(order: list[str]) -> Pair:
    """Groups by what they hold: "all" parameters, or none."""
    model = _front("wrapper")
    rates = {"all": 0.25, "first": 1.0, "second": 2.0}
    groups = [
        {"params": list(model.parameters()) if name == "all" else [], "lr": rates[name]}
        for name in order
    ]
    return model, torch.optim.AdamW(groups)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (["all", "first"], ["all", "first"]),
        (["first", "all", "second"], ["first", "all", "second"]),
        (["all", "first"], ["first", "all"]),
    ],
    ids=["behind", "around", "reordered"],
)
@on_ranks(2)
def test_groups_without_parameters(rank: int, saved: list[str], own: list[str]) -> None:
    for way, resume in RESUMES.items():
        if saved != own and way in TEMPLATES:
            continue  # the template decides which group is which
        trained, fresh = _with_empty_groups(saved), _with_empty_groups(own)
        fit(*trained, rank, range(1))
        for group in trained[1].param_groups:
            group["lr"] /= 8
        resume(trained, fresh, _folder())
        settings = dict(zip(saved, settings_of(trained[1]), strict=True))
        assert settings_of(fresh[1]) == [settings[name] for name in own], way


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_a_model_with_gradients(rank: int, door: str) -> None:
    trained = _adamw(door)
    fit(*trained, rank, range(2))
    expected = whole_states(*trained)
    for way, resume in RESUMES.items():
        fresh = _adamw(door)
        classification_loss(fresh[0], examples(rank)).backward()
        grads = [param.grad for param in fresh[0].parameters()]
        if way.startswith("dcp") and way in TEMPLATES:
            with pytest.raises(FSDPStateError, match=r"parameter '0\.0\.weight'.*zero_grad"):
                resume(trained, fresh, _folder())
            assert not fresh[1].state
        else:
            resume(trained, fresh, _folder())
            torch.testing.assert_close(whole_states(*fresh), expected, rtol=0, atol=0)
        if way != "template":  # it makes a step
            assert all(a is p.grad for a, p in zip(grads, fresh[0].parameters(), strict=True))


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_a_parameter_frozen_since(rank: int, door: str) -> None:
    trained = _adamw(door)
    fit(*trained, rank, range(2))
    trained[0].get_parameter("1.0.weight").requires_grad_(False)
    trained[1].zero_grad()
    expected = whole_states(*trained)
    for way, resume in RESUMES.items():
        fresh = _adamw(door)
        fresh[0].get_parameter("1.0.weight").requires_grad_(False)
        if way in TEMPLATES:
            continue
        resume(trained, fresh, _folder())
        torch.testing.assert_close(whole_states(*fresh), expected, rtol=0, atol=0)


class _MixedStates(torch.optim.SGD):
    """States of several dtypes and sizes in one unit, as of optimizers that quantise some."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        kinds = (torch.bfloat16, torch.float32, torch.uint8, torch.float64)
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            count = self.state[param].get("count", 0) + 1
            value = (param.detach() * 100).abs().to(kinds[number % 4])
            self.state[param].update(count=count, kept=value, odd=torch.full((2, 1), 2.0))


@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@on_ranks(2)
def test_states_of_several_dtypes(rank: int, door: str) -> None:
    plain = make_classifier()
    reference = _MixedStates(plain.parameters(), lr=0.0, momentum=0.9)
    model = _front(door)
    trained = model, _MixedStates(model.parameters(), lr=0.0, momentum=0.9)
    for one in ((plain, reference), trained):
        fit(*one, rank, range(2))
    kept = {name: reference.state[param]["kept"] for name, param in plain.named_parameters()}
    got = whole_states(*trained)
    torch.testing.assert_close({name: got[f"{name}/kept"] for name in kept}, kept)


@pytest.mark.parametrize("is_flat", [False, True])
@on_ranks(2)
def test_a_state_that_is_missing(rank: int, is_flat: bool) -> None:
    """strict=False leaves the parameter without a state, and the others as they were saved."""
    trained, fresh = _adamw("wrapper"), _adamw("wrapper")
    fit(*trained, rank, range(2))
    form = {"full_state_dict": True, "flatten_optimizer_state_dict": is_flat}
    saved: dict[str, Any] = get_optimizer_state_dict(*trained, options=StateDictOptions(**form))
    states = saved if is_flat else saved["state"]
    for key in [key for key in states if "1.0.bias" in key and "param_groups" not in key]:
        del states[key]
    with pytest.raises(FSDPValueError, match=r"parameter '1\.0\.bias'"):
        set_optimizer_state_dict(*fresh, saved, options=StateDictOptions(**form))
    assert not fresh[1].state
    set_optimizer_state_dict(*fresh, saved, options=StateDictOptions(**form, strict=False))
    expected = {k: v for k, v in whole_states(*trained).items() if not k.startswith("1.0.bias")}
    torch.testing.assert_close(whole_states(*fresh), expected, rtol=0, atol=0)
