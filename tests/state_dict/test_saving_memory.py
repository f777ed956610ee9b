"""Memory that saving needs beside the model, from the profiler's record of all allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import Block, batch, loss_of, make_transformer
from pool import RankPool
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.measure.step_profile import StepProfiler
from fsdp_dynamo import (
    FSDP,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
    checkpoint,
    record_events,
)
from fsdp_dynamo.checkpoint.manifest import CHUNK_BYTES
from fsdp_dynamo.wrap_policy import ModuleWrapPolicy

DIM = 128
FULL = StateDictType.FULL_STATE_DICT


def _extra_bytes(rank: int, world_size: int, what: str, folder: str) -> dict[str, int]:
    """The most that stood at one time, less parameters and states; and sizes to compare with."""
    torch.manual_seed(0)
    model = FSDP(
        make_transformer(num_blocks=6, dim=DIM), auto_wrap_policy=ModuleWrapPolicy({Block})
    )
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(f"{folder}/first", model, optimizer, step=0)  # groups and connections
    profiler = StepProfiler(model, optimizer)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    form = FSDP.state_dict_type(model, FULL, config, optim_config)
    kept: Any
    with record_events() as log, profiler.recording() as profile, form:
        if what == "torch":
            kept = get_state_dict(model, optimizer)
            dcp.save(dict(zip(("model", "optim"), kept, strict=True)), checkpoint_id=folder)
        elif what == "checkpoint":
            kept = checkpoint.save(f"{folder}/second", model, optimizer, step=0)
        elif what == "full model":
            kept = model.state_dict()
        else:
            kept = FSDP.optim_state_dict(model, optimizer)
    del kept
    standing = profile.peak_bytes["shards"] + profile.peak_bytes["optimizer"]
    layouts = [unit.flats[0].layout for unit in model._fsdp_root.units]
    units = [layout.padded_numel * 4 for layout in layouts]
    return {
        "extra": sum(profile.peak_bytes.values()) - standing,
        "gathers": sum(event.kind == "all_gather" for event in log),
        "unit": max(units),
        "whole": sum(units),
        "largest": max(slot.numel for layout in layouts for slot in layout.slots) * 4,
    }


@pytest.mark.parametrize("what", ["checkpoint", "torch", "full model", "full optimizer"])
def test_memory_of_saving(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """Sharded: no unit is unsharded, one tensor of a rank is copied at a time. Full, on rank 0
    alone: nowhere is more than one unit unsharded; rank 0 has what it collects besides."""
    first, other = ranks.run(_extra_bytes, 2, what, str(tmp_path))
    slack = 100_000
    if what in ("checkpoint", "torch"):
        for found in (first, other):
            assert found["gathers"] == 0
            assert found["extra"] <= 4 * found["largest"] + CHUNK_BYTES + slack
        return
    shard = first["unit"] // 2 if what == "full optimizer" else 0  # states are put together first
    collected = first["whole"] * (2 if what == "full optimizer" else 1)
    assert other["extra"] <= other["unit"] + shard + slack
    assert first["extra"] <= first["unit"] + shard + collected + slack
