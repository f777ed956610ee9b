"""Users' hooks of parameters: they see reduced gradients, and an optimizer may run in them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from loops import error_of
from models import batch, loss_of, make_transformer, train, wrap
from modes import in_mode
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp_dynamo import FSDP, explain
from fsdp_dynamo.core.dtensors import run_post_accumulate_hooks


@pytest.mark.parametrize(
    ("mode", "when"),
    [("eager", "before"), ("eager", "after"), ("hooks", "before"), ("graph", "after")],
)
@on_ranks(2)
def test_optimizers_in_backward(rank: int, mode: str, when: str) -> None:
    """One for each parameter, in hooks registered before wrapping or after it, steps as one for all
    does. Under no_sync() hooks rest; they see an accumulated gradient once."""
    expected, _ = train(wrap(make_transformer(num_blocks=1)), rank, steps=2)
    model = make_transformer(num_blocks=1)
    wrapped = wrap(model) if when == "after" else None
    optimizers: dict[nn.Parameter, torch.optim.Optimizer] = {}
    calls: Counter[nn.Parameter] = Counter()

    def step(param: nn.Parameter) -> None:
        calls[param] += 1
        assert param.grad is not None
        assert param.grad.shape == param.shape
        if param not in optimizers:  # not before it is sharded
            optimizers[param] = torch.optim.SGD([param], lr=0.1)
        optimizers[param].step()
        param.grad = None

    for param in (wrapped or model).parameters():
        param.register_post_accumulate_grad_hook(step)
    wrapped = wrapped or wrap(model)
    compiled = in_mode(wrapped, mode)
    for index in range(2):
        loss = loss_of(compiled, batch(rank, index))
        loss.backward()
        assert loss.item() == pytest.approx(expected[index], rel=1e-5)
    assert [calls[param] for param in model.parameters()] == [2] * len(calls)
    with wrapped.no_sync():
        loss_of(compiled, batch(rank, 0)).backward()
    assert set(calls.values()) == {2}
    loss_of(compiled, batch(rank, 1)).backward()
    assert [calls[param] for param in model.parameters()] == [3] * len(calls)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_torchs_optimizers_step_in_backward(rank: int, mode: str) -> None:
    expected, _ = train(wrap(make_transformer(num_blocks=1)), rank, steps=3)
    wrapped = wrap(make_transformer(num_blocks=1))
    _apply_optimizer_in_backward(torch.optim.SGD, wrapped.parameters(), {"lr": 0.1})
    call = in_mode(wrapped, mode)
    for step in range(3):
        loss = loss_of(call, batch(rank, step))
        loss.backward()
        assert loss.item() == pytest.approx(expected[step], rel=1e-5)


@on_ranks(2)
def test_hooks_rest_while_a_step_is_explained(rank: int) -> None:
    model = FSDP(nn.Linear(4, 4))
    calls: list[nn.Parameter] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(calls.append)
    explain(model, torch.ones(2, 4))
    assert calls == []
    model(torch.ones(2, 4)).sum().backward()
    assert len(calls) == 2


@on_ranks(2)
def test_hooks_of_dtensors_go_to_their_local_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    seen: list[nn.Parameter] = []
    handles = [p.register_post_accumulate_grad_hook(seen.append) for p in model.parameters()]
    wrapped = FSDP(model, device_mesh=mesh["dp"])
    for _ in range(2):  # of which the second has no hooks
        wrapped(torch.ones(2, 4)).sum().backward()
        assert all(a is b for a, b in zip(seen, wrapped.parameters(), strict=True))
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("mode", ["eager", "graph"])
@on_ranks(2)
def test_hooks_of_tensors_are_refused(rank: int, mode: str) -> None:
    before = nn.Linear(4, 4)
    before.bias.register_hook(lambda grad: grad)
    after = FSDP(nn.Linear(4, 4))
    after.module.bias.register_hook(lambda grad: grad)
    run = in_mode(after, mode)
    wrong = lambda: FSDP(before), lambda: run(torch.ones(2, 4)).sum().backward()
    for message in map(error_of, wrong):
        assert "FSDPStateError: " in message
        assert "parameter 'bias'" in message
        assert "register_post_accumulate_grad_hook()" in message


def test_the_order_of_registration() -> None:
    param, seen = nn.Parameter(torch.ones(1)), list[Any]()
    first = param.register_post_accumulate_grad_hook(lambda p: seen.append(("first", p is param)))
    param.register_post_accumulate_grad_hook(lambda p: seen.append(("second", p is param)))
    run_post_accumulate_hooks(param)
    first.remove()
    run_post_accumulate_hooks(param)
    assert seen == [("first", True), ("second", True), ("second", True)]
