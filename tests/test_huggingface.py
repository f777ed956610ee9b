"""transformers models wrapped by their layer class: one step equals DDP, in all three ways."""

from __future__ import annotations

import hf_models
import pytest
import torch
from pool import RankPool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from ways import WAYS, in_way

from fsdp_dynamo import FSDP
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _two_losses(model: nn.Module, rank: int) -> list[float]:
    """Loss before and after one step: the second shows that the update was right."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for _ in range(2):
        loss = model(**hf_models.inputs(rank)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _compare(rank: int, world_size: int, name: str, way: str) -> tuple[list[float], list[float]]:
    reference, layer = hf_models.make(name)
    expected = _two_losses(DistributedDataParallel(reference), rank)
    model: nn.Module = FSDP(hf_models.make(name)[0], auto_wrap_policy=ModuleWrapPolicy({layer}))
    return expected, _two_losses(in_way(model, way), rank)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", hf_models.NAMES)
def test_step_equals_ddp(ranks: RankPool, name: str, way: str) -> None:
    for expected, got in ranks.run(_compare, 2, name, way):
        assert expected[1] < expected[0]
        assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_step_under_inductor(ranks: RankPool) -> None:
    for expected, got in ranks.run(_compare, 2, "llama", "graph-inductor"):
        assert got == pytest.approx(expected, rel=1e-5)
