"""Checkpoints."""

from __future__ import annotations

import pytest
import torch


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
