"""Whole parameters between two steps, and what is written back of them."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from loops import different, whole_gradients
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
from modes import in_mode
from pool import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_dynamo import FSDP, FSDPStateError, ShardingStrategy, fully_shard
from fsdp_dynamo.comm.collectives import all_gather
from fsdp_dynamo.core import flat_parameter
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

STRATEGIES = ("FULL_SHARD", "NO_SHARD", "HYBRID_SHARD")


def _strategy(name: str) -> dict[str, Any]:
    hybrid = {"device_mesh": init_device_mesh("cpu", (2, 2))} if name == "HYBRID_SHARD" else {}
    return {"sharding_strategy": ShardingStrategy[name], **hybrid}


def _all_combinations(rank: int, world_size: int, strategy: str) -> list[str]:
    """Every combination of the arguments; returns what was wrong."""
    wrong: list[str] = []
    plain = make_transformer(num_blocks=1)
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = wrap(make_transformer(num_blocks=1), **_strategy(strategy))
    loss_of(model, batch(0, 0)).backward()
    loss_of(plain, batch(0, 0)).backward()
    grads = {name: p.grad.clone() for name, p in plain.named_parameters() if p.grad is not None}
    objects = dict(model.named_parameters())
    for writeback, rank0_only, offload, with_grads in itertools.product((False, True), repeat=4):
        how = f"writeback={writeback} rank0_only={rank0_only} offload={offload} grads={with_grads}"
        whole = not rank0_only or rank == 0
        with FSDP.summon_full_params(
            model,
            writeback=writeback,
            rank0_only=rank0_only,
            offload_to_cpu=offload,
            with_grads=with_grads,
        ):
            for name, param in model.named_parameters():
                if whole and not torch.equal(param, expected[name]):
                    wrong.append(f"{how}: value of {name}")
                if whole and with_grads and not torch.allclose(param.grad, grads[name], 1e-5, 1e-7):
                    wrong.append(f"{how}: gradient of {name}")
                if whole and not with_grads and param.grad is not None:
                    wrong.append(f"{how}: a gradient of {name}")
                if isinstance(param, DTensor) is whole or param.shape != objects[name].shape:
                    wrong.append(f"{how}: {name} on rank {rank}")
                if whole:
                    with torch.no_grad():
                        param.add_(1.0)
                        if with_grads:
                            param.grad.mul_(2.0)
        if writeback:
            expected = {name: value + 1.0 for name, value in expected.items()}
            if with_grads:
                grads = {name: 2.0 * value for name, value in grads.items()}
        if any(p is not objects[name] for name, p in model.named_parameters()):
            wrong.append(f"{how}: objects afterwards")
        after = model.state_dict()
        wrong += [f"{how}: {n}" for n in expected if not torch.equal(after[n], expected[n])]
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            for name, param in model.named_parameters():
                if not torch.allclose(param.grad, grads[name], 1e-5, 1e-7):
                    wrong.append(f"{how}: gradient of {name} afterwards")
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_combinations(ranks: RankPool, strategy: str) -> None:
    for wrong in ranks.run(_all_combinations, 4 if strategy == "HYBRID_SHARD" else 2, strategy):
        assert wrong == []


def _between_steps(rank: int, world_size: int, mode: str) -> tuple[Any, Any, list[str]]:
    """Training goes on with what was written; inside, what runs with gradients is refused."""
    expected = make_transformer(num_blocks=2)
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    before = train(expected, 0, steps=2), train(model, 0, steps=2)
    messages = []
    with torch.no_grad():
        expected.head.weight.mul_(3.0)
        with FSDP.summon_full_params(wrapped, rank0_only=True):
            if rank == 0:
                wrapped.head.weight.mul_(3.0)
    with FSDP.summon_full_params(wrapped):
        for grad_mode in (torch.enable_grad, torch.no_grad):
            try:
                with grad_mode():
                    got = model(batch(rank, 0))
                with torch.no_grad():
                    if not torch.allclose(got, expected(batch(rank, 0)), 1e-5, 1e-6):
                        messages.append("another output")
            except FSDPStateError as error:
                messages.append(str(error))
    after = train(expected, 0, steps=2), train(model, 0, steps=2)
    return (before[0], after[0]), (before[1], after[1]), messages


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
def test_between_steps(ranks: RankPool, mode: str) -> None:
    for expected, got, messages in ranks.run(_between_steps, 2, mode):
        for (losses, _), (got_losses, _) in zip(expected, got, strict=True):
            assert got_losses == pytest.approx(losses, rel=1e-5)
        assert len(messages) == (2 if mode == "graph" else 1)
        assert all("inside summon_full_params()" in message for message in messages)


def _nested_and_partial(rank: int, world_size: int) -> tuple[list[Any], bool, list[str]]:
    wrapped = wrap(make_transformer(num_blocks=2))
    plain = make_transformer(num_blocks=2)

    def blocks_are_whole() -> bool:
        return not any(isinstance(p, DTensor) for p in wrapped.module.blocks.parameters())

    seen: list[Any] = []
    with FSDP.summon_full_params(wrapped, recurse=False):
        seen.append(blocks_are_whole())
        with FSDP.summon_full_params(wrapped, writeback=False):
            seen.append(blocks_are_whole())
            with torch.no_grad():
                wrapped.head.bias.add_(1.0)
                wrapped.blocks[0].up.bias.add_(1.0)
        seen.append(blocks_are_whole())
    states = wrapped.state_dict()
    seen.append(bool(torch.equal(states["head.bias"], plain.head.bias + 1.0)))
    seen.append(bool(torch.equal(states["blocks.0.up.bias"], plain.blocks[0].up.bias)))
    alone = True
    with FSDP.summon_full_params(wrapped, rank0_only=True, offload_to_cpu=True, writeback=False):
        if rank == 0:  # nobody else takes part
            inside = wrapped.state_dict()
            alone = all(torch.equal(inside[name], states[name]) for name in states)
    messages = []
    try:
        with FSDP.summon_full_params(wrapped):
            raise ZeroDivisionError
    except ZeroDivisionError:
        train(wrapped, rank, steps=1)
    loss = loss_of(wrapped, batch(rank, 0))
    hook = wrapped.blocks[0].up.register_forward_hook(lambda *_: _summon(wrapped, messages))
    loss_of(wrapped, batch(rank, 0))
    hook.remove()
    loss.backward()
    return seen, alone, messages


def _summon(model: FSDP, messages: list[str]) -> None:
    try:
        with FSDP.summon_full_params(model):
            pass
    except FSDPStateError as error:
        messages.append(str(error))


def test_nested_and_partial(ranks: RankPool) -> None:
    for seen, alone, messages in ranks.run(_nested_and_partial, 2):
        assert seen == [False, True, False, True, True]  # writeback=False inside an outer context
        assert alone
        assert len(messages) == 1
        assert "between two steps only" in messages[0]


def _failing_gather(rank: int, world_size: int, mode: str, at: int) -> list[str]:
    """A gather that fails on every rank, the ``at``-th of the context; what was wrong after it."""
    wrong: list[str] = []
    expected = make_transformer(num_blocks=2)
    wrapped = wrap(make_transformer(num_blocks=2))
    model = in_mode(wrapped, mode)
    train(expected, 0, steps=1)
    train(model, 0, steps=1)
    before = {name: (p.grad, p.shape) for name, p in wrapped.named_parameters()}
    gathers = itertools.count()

    def fail(*args: Any) -> None:
        if next(gathers) == at:
            raise torch.OutOfMemoryError("in a gather")
        all_gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_parameter, "all_gather", fail)
        with (
            pytest.raises(torch.OutOfMemoryError, match="in a gather"),
            FSDP.summon_full_params(wrapped, rank0_only=True, with_grads=True),
        ):
            wrong.append("the context was entered")
    units = wrapped._fsdp_root.units
    wrong += [
        f"'{u.fqn}' is {u.machine.state.name}" for u in units if u.machine.state.name != "IDLE"
    ]
    wrong += [f"'{u.fqn}' is summoned" for u in units if u.is_summoned]
    for name, param in wrapped.named_parameters():
        if param.grad is not before[name][0] or param.shape != before[name][1]:
            wrong.append(f"'{name}' is not sharded again")
    values = wrapped.state_dict()
    for name, param in expected.named_parameters():
        if not torch.allclose(values[name], param, rtol=1e-5, atol=1e-6):
            wrong.append(f"values of {name}")
    if train(model, 0, steps=2)[0] != pytest.approx(train(expected, 0, steps=2)[0], rel=1e-5):
        wrong.append("losses")
    return wrong


@pytest.mark.parametrize("mode", ["eager", "hooks", "graph"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_gather_that_fails(ranks: RankPool, mode: str, at: int) -> None:
    for wrong in ranks.run(_failing_gather, 2, mode, at):
        assert wrong == []


def _without_parameters(rank: int, world_size: int) -> tuple[float, list[bool]]:
    """apply() with a unit that holds no parameters; gradients wait outside of the context."""
    inner = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    policy = ModuleWrapPolicy({nn.Linear, nn.ReLU})
    model = FSDP(inner, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.NO_SHARD)
    model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    output = model(torch.ones(1, 2))
    output.sum().backward()
    with FSDP.summon_full_params(model):
        seen = [p.grad is None for p in model.parameters()]
        model.zero_grad()
    return output.sum().item(), [*seen, *(p.grad is not None for p in model.parameters())]


def test_units_without_parameters_or_shards(ranks: RankPool) -> None:
    assert ranks.run(_without_parameters, 2) == [(4.0, [True, True])] * 2


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
    got, expected = whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}
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
