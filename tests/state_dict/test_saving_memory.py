"""Memory that saving needs beside the model, from the profiler's record of all allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import make_transformer, wrap
from pool import on_ranks
from shardings import fit_tokens
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
from fsdp_dynamo.checkpoint import manifest

DIM = 128


@pytest.mark.parametrize("what", ["checkpoint", "torch", "full model", "full optimizer"])
@on_ranks(2)
def test_memory_of_saving(rank: int, tmp_path: Path, what: str) -> None:
    """The most that stands at one time, less parameters and states.

    Sharded: no unit is unsharded, one tensor of a rank is copied at a time. Full, on rank 0 alone:
    nowhere is more than one unit unsharded; rank 0 has what it collects besides.
    """
    torch.manual_seed(0)
    model = wrap(make_transformer(num_blocks=6, dim=DIM))
    optimizer = torch.optim.AdamW(model.parameters())
    fit_tokens(model, optimizer, rank)
    checkpoint.save(tmp_path / "first", model, optimizer, step=0)  # groups and connections
    profiler = StepProfiler(model, optimizer)
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    optim_config = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    form = FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config, optim_config)
    kept: Any
    with record_events() as log, profiler.recording() as profile, form:
        if what == "torch":
            kept = get_state_dict(model, optimizer)
            dcp.save(dict(zip(("model", "optim"), kept, strict=True)), checkpoint_id=tmp_path)
        elif what == "checkpoint":
            kept = checkpoint.save(tmp_path / "second", model, optimizer, step=0)
        elif what == "full model":
            kept = model.state_dict()
        else:
            kept = FSDP.optim_state_dict(model, optimizer)
    del kept
    standing = profile.peak_bytes["shards"] + profile.peak_bytes["optimizer"]
    extra = sum(profile.peak_bytes.values()) - standing
    layouts = [unit.flats[0].layout for unit in model._fsdp_root.units]
    units = [layout.padded_numel * 4 for layout in layouts]
    slack = 100_000
    if what in ("checkpoint", "torch"):
        largest = max(slot.numel for layout in layouts for slot in layout.slots) * 4
        assert not any(event.kind == "all_gather" for event in log)
        assert extra <= 4 * largest + manifest._CHUNK_BYTES + slack
        return
    shard = max(units) // 2 if what == "full optimizer" else 0  # states are put together first
    collected = sum(units) * (2 if what == "full optimizer" else 1) if rank == 0 else 0
    assert extra <= max(units) + shard + collected + slack
