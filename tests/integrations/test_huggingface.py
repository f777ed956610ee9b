"""transformers models wrapped by their layer class: saved, and loaded by transformers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
from loops import whole
from pool import on_ranks
from torch import nn

from fsdp_dynamo import FSDP, FullStateDictConfig, StateDictType, fully_shard
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy


def _two_losses(model: nn.Module, rank: int) -> list[float]:
    """Loss before and after one step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses: list[float] = []
    for _ in range(2):
        loss = model(**hf_models.inputs(rank)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "how"),
    [("llama", "wrapper"), ("t5", "own state dict"), ("gpt2", "composable")],
)
@on_ranks(2)
def test_saved_and_loaded_by_transformers(rank: int, tmp_path: Path, name: str, how: str) -> None:
    """Train, save_pretrained, from_pretrained: a plain model, and a wrapped one again."""
    plain, layer = hf_models.make(name)
    policy = ModuleWrapPolicy({layer})
    model: Any = (
        fully_shard(plain, policy=policy)
        if how == "composable"
        else FSDP(plain, auto_wrap_policy=policy)
    )
    _two_losses(model, rank)
    if how == "own state dict":  # every rank calls it, one writes
        model.save_pretrained(tmp_path, is_main_process=rank == 0)
    else:
        form = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, form):
            state = model.state_dict()
        if rank == 0:
            model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    expected = {key: whole(value) for key, value in model.state_dict().items()}
    loaded = type(plain).from_pretrained(tmp_path)
    found = loaded.state_dict()
    again = FSDP(type(plain).from_pretrained(tmp_path), auto_wrap_policy=policy)
    inner = FSDP(hf_models.make(name)[0], auto_wrap_policy=policy)
    inner.module.load_state_dict(found)
    for state in (found, again.state_dict(), inner.state_dict()):
        torch.testing.assert_close(dict(state), expected, rtol=0, atol=0)
    assert _two_losses(again, rank) == _two_losses(model, rank)
