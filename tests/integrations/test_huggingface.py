"""transformers models wrapped by their layer class: saved, and loaded by transformers again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
from pool import RankPool
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


def _pretrained(rank: int, world_size: int, name: str, how: str, folder: str) -> dict[str, bool]:
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
        model.save_pretrained(folder, is_main_process=rank == 0)
    else:
        form = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, form):
            state = model.state_dict()
        if rank == 0:
            model.save_pretrained(folder, state_dict=state)
    dist.barrier()
    expected = model.state_dict()
    loaded = type(plain).from_pretrained(folder)
    found = loaded.state_dict()
    if how == "composable":
        expected = {key: value.full_tensor() for key, value in expected.items()}
    again = FSDP(type(plain).from_pretrained(folder), auto_wrap_policy=policy)
    inner = FSDP(hf_models.make(name)[0], auto_wrap_policy=policy)
    inner.module.load_state_dict(found)
    return {
        "plain": found.keys() == expected.keys()
        and all(torch.equal(value, expected[key]) for key, value in found.items()),
        "wrapped": all(map(torch.equal, again.state_dict().values(), expected.values())),
        "into the inner one": all(map(torch.equal, inner.state_dict().values(), found.values())),
        "trains on": _two_losses(again, rank) == _two_losses(model, rank),
    }


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "wrapper"),
        ("t5", "wrapper"),
        ("gpt2", "own state dict"),
        ("bert", "composable"),
        ("t5", "own state dict"),
    ],
)
def test_saved_and_loaded_by_transformers(
    ranks: RankPool, tmp_path: Path, name: str, how: str
) -> None:
    for found in ranks.run(_pretrained, 2, name, how, str(tmp_path)):
        assert [what for what, holds in found.items() if not holds] == []
