"""Crash-safe checkpoints, verified after writing and before loading.

    from fsdp_dynamo import checkpoint

    states = {"per_rank": {"data": loader}}
    loaded = checkpoint.load("run", model, optimizer, missing_ok=True, **states)
    for step in range(loaded.step if loaded else 0, steps):
        ...
        if step % 100 == 99:
            saving = checkpoint.async_save(
                "run", model, optimizer, step=step + 1, keep_last=3, **states
            )
    saving.result()

Each rank writes and reads its own shards, through torch.distributed.checkpoint.
"""

from fsdp_dynamo.checkpoint.coordination import set_arrival_timeout
from fsdp_dynamo.checkpoint.loading import Loaded, load
from fsdp_dynamo.checkpoint.manifest import complete
from fsdp_dynamo.checkpoint.saving import async_save, save
from fsdp_dynamo.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Loaded",
    "async_save",
    "complete",
    "load",
    "save",
    "set_arrival_timeout",
]
