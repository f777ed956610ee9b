"""Checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict


@pytest.mark.private(
    "torch.distributed.checkpoint.state_dict._init_optim_state",
    need="the states that an optimizer makes in its first step, without that step",
    instead="a step of our own, with zero gradients and a learning rate of 0",
)
def test_states_are_made_without_a_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, weight_decay=0.5)
    before = model.weight.detach().clone()
    state_dict._init_optim_state(optimizer)
    assert all(set(optimizer.state[one]) >= {"exp_avg", "step"} for one in model.parameters())
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.25
    states = {one: dict(optimizer.state[one]) for one in model.parameters()}
    state_dict._init_optim_state(optimizer)
    assert all(
        optimizer.state[one][name] is value for one in states for name, value in states[one].items()
    )


@pytest.mark.private(
    "torch.distributed.checkpoint._state_dict_stager.StateDictStager",
    need="copies of a device's tensors in pinned memory that is kept; DefaultStager of torch 2.11 "
    "drops it after each copy, and fails at the second one",
    instead="copies without pinned memory, which take several times as long",
)
def test_a_stager_keeps_its_memory() -> None:
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    stager = StateDictStager(pin_memory=False)
    tensor = torch.arange(4.0)
    first = stager.stage({0: tensor}, non_blocking=True)[0]
    tensor.add_(1)
    second = stager.stage({0: tensor}, non_blocking=True)[0]
    assert second.data_ptr() == first.data_ptr() != tensor.data_ptr()
    assert second.tolist() == [1, 2, 3, 4]
