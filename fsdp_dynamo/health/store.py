"""Store that all ranks of a job share, with separate keys for each run."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fsdp_dynamo.comm.group_state import state_of

PREFIX = "fsdp_dynamo/health"

_SHARED_STORES = frozenset({"TCPStore", "FileStore"})


class Run:
    """Number of a job's run: a launcher may keep one store when it restarts the ranks."""

    number = 0


def default_store() -> Any:
    """Return the store that all ranks share, or ``None``.

    Simulated and fake groups have ranks that do not exist, and no shared store.
    """
    if not dist.is_initialized():
        return None
    default = store = dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return default if type(store).__name__ in _SHARED_STORES else None


def run_store() -> Any:
    """Return the store with keys of this run alone, or ``None``."""
    store = default_store()
    if store is None:
        return None
    return PrefixStore(f"{PREFIX}/{state_of(dist.group.WORLD, Run).number}", store)


def shared_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a group's ranks; ``None`` for one rank, or without a shared store."""
    store = None if group.size() == 1 else run_store()
    if store is None:
        return None
    return PrefixStore(digest_of(tuple(dist.get_process_group_ranks(group))), store)


@lru_cache
def digest_of(ranks: tuple[int, ...]) -> str:
    """Name of a group in keys, equally long for any number of ranks."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
