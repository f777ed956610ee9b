"""Users' hooks of parameters: they see reduced gradients, and an optimizer may run in them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from models import batch, loss_of, make_transformer, train, wrap
from modes import MODES, in_mode
from pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_dynamo import FSDP, FSDPStateError, explain

STEPS = 3


def _optimizers_in_backward(
    rank: int, world_size: int, mode: str, when: str
) -> tuple[list[float], list[float], list[int]]:
    """Losses with one optimizer, with one for each parameter that runs in its hook, and calls."""
    expected, _ = train(in_mode(wrap(make_transformer(num_blocks=2)), mode), rank, steps=STEPS)
    model = make_transformer(num_blocks=2)
    wrapped = wrap(model) if when == "after" else None
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
    calls: Counter[nn.Parameter] = Counter()

    def step(param: nn.Parameter) -> None:
        calls[param] += 1
        if param not in optimizers:  # not before it is sharded
            optimizers[param] = torch.optim.SGD([param], lr=0.1)
        optimizers[param].step()
        param.grad = None

    for param in (wrapped or model).parameters():
        param.register_post_accumulate_grad_hook(step)
    compiled = in_mode(wrapped or wrap(model), mode)
    losses = []
    for index in range(STEPS):
        loss = loss_of(compiled, batch(rank, index))
        loss.backward()
        losses.append(loss.item())
    return expected, losses, [calls[param] for param in model.parameters()]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_optimizers_in_backward(ranks: RankPool, mode: str, when: str) -> None:
    for expected, losses, calls in ranks.run(_optimizers_in_backward, 2, mode, when):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert set(calls) == {STEPS}


def _under_no_sync(rank: int, world_size: int, mode: str) -> tuple[list[bool], int]:
    model = wrap(make_transformer(num_blocks=1))
    compiled = in_mode(model, mode)
    is_shard: list[bool] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(
            lambda param: is_shard.append(param.grad.shape == param.shape)
        )
    with model.no_sync():
        loss_of(compiled, batch(rank, 0)).backward()
    assert is_shard == []
    loss_of(compiled, batch(rank, 1)).backward()
    return is_shard, len([*model.parameters()])


@pytest.mark.parametrize("mode", MODES)
def test_accumulated_gradients_are_seen_once(ranks: RankPool, mode: str) -> None:
    for is_shard, count in ranks.run(_under_no_sync, 2, mode):
        assert is_shard == [True] * count


def _not_in_a_rehearsal(rank: int, world_size: int) -> tuple[int, int]:
    model = wrap(make_transformer(num_blocks=1))
    calls: list[nn.Parameter] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(calls.append)
    explain(model, batch(rank, 0))
    rehearsed = len(calls)
    loss_of(model, batch(rank, 0)).backward()
    return rehearsed, len(calls) - len([*model.parameters()])


def test_hooks_rest_while_a_step_is_explained(ranks: RankPool) -> None:
    assert ranks.run(_not_in_a_rehearsal, 2) == [(0, 0)] * 2


def _on_a_dtensor(rank: int, world_size: int) -> list[tuple[bool, int]]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    seen: list[nn.Parameter] = []
    handles = [p.register_post_accumulate_grad_hook(seen.append) for p in model.parameters()]
    wrapped = FSDP(model, device_mesh=mesh["dp"])
    found = []
    for _ in range(2):
        wrapped(torch.ones(2, 4)).sum().backward()
        now = [*wrapped.parameters()]
        found.append((all(a is b for a, b in zip(seen, now, strict=False)), len(seen)))
        for handle in handles:
            handle.remove()
    return found


def test_hooks_of_dtensors_go_to_their_local_parameters(ranks: RankPool) -> None:
    assert ranks.run(_on_a_dtensor, 2) == [[(True, 2), (True, 2)]] * 2


def _tensor_hook(rank: int, world_size: int, mode: str) -> list[str]:
    messages = []
    before = nn.Linear(4, 4)
    before.bias.register_hook(lambda grad: grad)
    after = FSDP(nn.Linear(4, 4))
    after.module.bias.register_hook(lambda grad: grad)

    def run_after() -> None:
        in_mode(after, mode)(torch.ones(2, 4)).sum().backward()

    for action in (lambda: FSDP(before), run_after):
        try:
            action()
        except FSDPStateError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_tensors_are_refused(ranks: RankPool, mode: str) -> None:
    for messages in ranks.run(_tensor_hook, 2, mode):
        assert len(messages) == 2
        for message in messages:
            assert "parameter 'bias'" in message
            assert "register_post_accumulate_grad_hook()" in message


def test_the_order_of_registration() -> None:
    from fsdp_dynamo.core.dtensors import run_post_accumulate_hooks

    param, seen = nn.Parameter(torch.ones(1)), list[Any]()
    first = param.register_post_accumulate_grad_hook(lambda p: seen.append(("first", p is param)))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(("second", p is param)))
    run_post_accumulate_hooks(param)
    first.remove()
    run_post_accumulate_hooks(param)
    assert seen == [("first", True), ("second", True), ("second", True)]


def _torchs_optimizers_in_backward(
    rank: int, world_size: int, mode: str
) -> tuple[list[float], list[float]]:
    """Losses with one optimizer, and with those that torch runs inside backward."""
    expected, _ = train(in_mode(wrap(make_transformer(num_blocks=1)), mode), rank, steps=STEPS)
    wrapped = wrap(make_transformer(num_blocks=1))
    _apply_optimizer_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1})
    call = in_mode(wrapped, mode)
    losses = []
    for step in range(STEPS):
        loss = loss_of(call, batch(rank, step))
        loss.backward()
        losses.append(loss.item())
    return expected, losses


@pytest.mark.parametrize("mode", MODES)
def test_torchs_optimizers_step_in_backward(ranks: RankPool, mode: str) -> None:
    for expected, losses in ranks.run(_torchs_optimizers_in_backward, 2, mode):
        assert losses == pytest.approx(expected, rel=1e-5)
