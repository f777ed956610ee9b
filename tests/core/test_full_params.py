"""Whole parameters between two steps, and what is written back of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loops import (
    classification_loss,
    different,
    error_of,
    examples,
    gradients,
    make_classifier,
    shard,
    whole,
    whole_gradients,
)
from models import (
    DOORS,
    average_gradients,
    batch,
    loss_of,
    make_transformer,
    through,
    train,
    wrap,
)
from modes import MODES, in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, FSDPStateError, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.core import flat_parameter
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STRATEGIES = ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD")


def _strategy(name: str) -> dict[str, Any]:
    hybrid = {"device_mesh": init_device_mesh("cpu", (2, 2))} if name == "HYBRID_SHARD" else {}
    return {"sharding_strategy": ShardingStrategy[name], **hybrid}


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_all_combinations(rank: int, strategy: str) -> None:
    """Of the arguments."""
    plain = make_classifier()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = shard(make_classifier(), **_strategy(strategy))
    classification_loss(model, examples(0)).backward()
    classification_loss(plain, examples(0)).backward()
    grads = gradients(plain)
    objects = dict(model.named_parameters())
    for writeback, rank0_only, offload, with_grads in itertools.product((False, True), repeat=4):
        how = f"writeback={writeback} rank0_only={rank0_only} offload={offload} grads={with_grads}"
        is_whole = not rank0_only or rank == 0
        with FSDP.summon_full_params(
            model,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload,
            with_grads=with_grads,
        ):
            for name, param in model.named_parameters():
                assert isinstance(param, DTensor) is not is_whole, (how, name)
                assert param.shape == objects[name].shape, (how, name)
                if not is_whole:
                    continue
                torch.testing.assert_close(param.data, expected[name], msg=f"{how}: {name}")
                if with_grads:
                    torch.testing.assert_close(param.grad, grads[name], msg=f"{how}: {name}")
                else:
                    assert param.grad is None, (how, name)
                with torch.no_grad():
                    param.add_(1.0)
                    if with_grads:
                        param.grad.mul_(2.0)
        if writeback:
            expected = {name: value + 1.0 for name, value in expected.items()}
            if with_grads:
                grads = {name: 2.0 * value for name, value in grads.items()}
        assert all(p is objects[name] for name, p in model.named_parameters()), how
        torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0, msg=how)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            after = gradients(model)
            torch.testing.assert_close(after, grads, msg=how)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_gradients_in_low_precision(rank: int, strategy: str) -> None:
    low = MixedPrecision(torch.bfloat16, torch.bfloat16, keep_low_precision_grads=True)
    model = shard(make_classifier(), mixed_precision=low, **_strategy(strategy))
    classification_loss(model, examples(rank)).backward()
    expected = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            assert param.grad.dtype == torch.bfloat16
            assert torch.equal(param.grad, expected[name]), name
            param.grad.mul_(2.0)
    for name, param in model.named_parameters():
        assert torch.equal(param.grad.full_tensor(), 2.0 * expected[name]), name


def _fail_at(number: int) -> Callable[..., None]:
    """A gather that fails on every rank, that of a number, counted from 0."""
    gathers = itertools.count()

    def gather(*args: Any) -> None:
        if next(gathers) == number:
            raise torch.OutOfMemoryError("in a gather")
        all_gather(*args)

    return gather


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_between_steps(rank: int, mode: str) -> None:
    """Training goes on after a gather that failed, and with what was written; inside, what runs
    with gradients is refused."""
    plain, wrapped = make_transformer(num_blocks=1), wrap(make_transformer(num_blocks=1))
    model = in_mode(wrapped, mode)

    def train_alike() -> None:
        expected, _ = train(plain, 0, steps=2)
        assert train(model, 0, steps=2)[0] == pytest.approx(expected, rel=1e-5)

    train_alike()
    before = {name: (p.grad, p.shape) for name, p in wrapped.named_parameters()}
    for number in (0, 2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flat_parameter, "all_gather", _fail_at(number))
            with (
                pytest.raises(torch.OutOfMemoryError, match="in a gather"),
                FSDP.summon_full_params(wrapped, rank0_only=True, with_grads=True),
            ):
                pytest.fail("the context was entered")
        for unit in wrapped._fsdp_root.units:
            assert (unit.machine.state.name, unit.is_summoned) == ("IDLE", False), unit.fqn
        for name, param in wrapped.named_parameters():
            assert param.grad is before[name][0], name
            assert param.shape == before[name][1], name
        assert different(dict(wrapped.state_dict()), dict(plain.state_dict())) == []
    with torch.no_grad():
        plain.head.weight.mul_(3.0)
        with FSDP.summon_full_params(wrapped, rank0_only=True):
            if rank == 0:
                wrapped.head.weight.mul_(3.0)
    refused = pytest.raises(FSDPStateError, match=r"inside summon_full_params\(\)")
    with FSDP.summon_full_params(wrapped):
        with refused:
            model(batch(rank, 0))
        with torch.no_grad(), refused if mode == "graph" else nullcontext():
            torch.testing.assert_close(model(batch(rank, 0)), plain(batch(rank, 0)))
    train_alike()


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_nested_and_partial(rank: int, door: str) -> None:
    plain = make_transformer(num_blocks=1)
    wrapped = through(door, make_transformer(num_blocks=1))

    def whole_ones() -> tuple[bool, bool]:
        """Whether the block's parameters are whole, and those of the root."""
        params = wrapped.blocks[0].up.weight, wrapped.head.weight
        return not isinstance(params[0], DTensor), not isinstance(params[1], DTensor)

    with FSDP.summon_full_params(wrapped.blocks[0], writeback=False):
        assert whole_ones() == (True, False)
        wrapped.blocks[0].up.weight.detach().zero_()
    with FSDP.summon_full_params(wrapped, recurse=False):
        assert whole_ones() == (False, True)
        with FSDP.summon_full_params(wrapped, writeback=False):  # inside an outer context
            assert whole_ones() == (True, True)
            with torch.no_grad():
                wrapped.head.bias.add_(1.0)
                wrapped.blocks[0].up.bias.add_(1.0)
        assert whole_ones() == (False, True)
    assert whole_ones() == (False, False)
    with torch.no_grad():
        plain.head.bias.add_(1.0)
    states = {name: whole(value) for name, value in wrapped.state_dict().items()}
    torch.testing.assert_close(states, dict(plain.state_dict()), rtol=0, atol=0)
    with FSDP.summon_full_params(wrapped, rank0_only=True, offload_to_cpu=True, writeback=False):
        if rank == 0:  # nobody else takes part
            assert different(dict(wrapped.state_dict()), states) == []
    with pytest.raises(ZeroDivisionError), FSDP.summon_full_params(wrapped):
        raise ZeroDivisionError
    train(wrapped, rank, steps=1)
    loss = loss_of(wrapped, batch(rank, 0))
    messages = []

    def summon(*_: object) -> None:
        messages.append(error_of(FSDP.summon_full_params(wrapped).__enter__))

    hook = wrapped.blocks[0].up.register_forward_hook(summon)
    loss_of(wrapped, batch(rank, 0))
    hook.remove()
    loss.backward()
    assert len(messages) == 1
    assert "between two steps only" in messages[0]


@on_ranks(2)
def test_units_without_parameters_or_shards(rank: int) -> None:
    """apply() with a unit that holds no parameters; gradients wait outside of the context."""
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    policy = ModuleWrapPolicy({nn.Linear, nn.ReLU})
    model = FSDP(inner, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.NO_SHARD)
    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    output = model(torch.ones(1, 2))
    output.sum().backward()
    with FSDP.summon_full_params(model):
        assert all(p.grad is None for p in model.parameters())
        model.zero_grad()
    assert output.sum().item() == 4.0
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_a_gradient_of_a_whole_parameter_is_refused(rank: int, door: str) -> None:
    """At the backward, inside the context or after it; what was there before is as it was."""
    plain = make_transformer(num_blocks=1)
    model = through(door, copy.deepcopy(plain))
    loss_of(plain, batch(rank, 0)).backward()
    average_gradients(plain)
    loss_of(model, batch(rank, 0)).backward()
    with FSDP.summon_full_params(model):
        copy.deepcopy(model)
        weight = model.head.weight
        loss = weight.pow(2).sum()
        assert torch.equal(torch.autograd.grad(loss, weight)[0], 2 * weight)
        with pytest.raises(FSDPStateError, match=r"parameter 'head\.weight'"):
            weight.pow(2).sum().backward()
        loss = weight.sum()
    with pytest.raises(FSDPStateError, match=r"parameter 'head\.weight'"):
        loss.backward()
    got, expected = whole_gradients(model), gradients(plain)
    assert different(got, expected) == []
    del loss, weight
    # torch adds no replicated gradient to a sharded one, of one row
    rows = {name: p for name, p in model.named_parameters() if len(p) > 1}
    sum(param.pow(2).sum() for param in rows.values()).backward()
    got = whole_gradients(model)
    expected = {n: p.grad + (2 * p if n in rows else 0) for n, p in plain.named_parameters()}
    assert different(got, expected) == []


@on_ranks(2)
def test_a_gradient_of_what_was_whole_is_refused_where_parts_have_its_shape(rank: int) -> None:
    model = FSDP(make_transformer(num_blocks=1), sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.summon_full_params(model):
        loss = model.head(torch.full((1, model.head.in_features), 1.0 + rank)).sum()
    with pytest.raises(FSDPStateError, match=r"parameter 'head\."):
        loss.backward()


@on_ranks(2)
def test_a_backward_over_what_unshard_has_shown_raises(rank: int) -> None:
    """What autograd has saved of it is gone by then, and nothing would reduce its gradient."""
    model = nn.Linear(4, 4)
    fully_shard(model)
    model.unshard()
    penalty = model.weight.square().sum()
    loss = model(torch.ones(2, 4)).sum() + penalty
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.unshard()
    weight = model.weight
    loss = (model(torch.ones(2, 4)) @ weight).sum()  # the same object, used after the forward
    with pytest.raises(FSDPStateError, match="parameter 'weight'"):
        loss.backward()
    assert weight.grad is None
    model.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 2.0))


@pytest.mark.parametrize("door", DOORS)
@on_ranks(2)
def test_whole_parameters_in_inference_mode(rank: int, door: str) -> None:
    plain, model = make_transformer(num_blocks=1), through(door, make_transformer(num_blocks=1))
    tokens = torch.arange(6).view(1, 6)
    with torch.inference_mode():
        expected = plain(tokens)
        with FSDP.summon_full_params(model, writeback=False):
            torch.testing.assert_close(model(tokens), expected)
        if door == "fully_shard":
            model.unshard()
        torch.testing.assert_close(model(tokens), expected)
