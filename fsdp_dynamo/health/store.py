"""Store that the ranks of a group share, with separate keys for each run."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from fsdp_dynamo.comm.group_state import state_of
from fsdp_dynamo.comm.watchdog import watched

PREFIX = "fsdp_dynamo/health"

_SHARED_STORES = frozenset({"TCPStore", "FileStore"})


class _RunIds(dict[tuple[int, ...], str]):
    """Identifiers of the run, by the ranks that have agreed on them."""


class _Rounds(Counter[tuple[str, tuple[int, ...]]]):
    """Number of exchanges in a job's store, by purpose and ranks."""


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


def shared_store(group: dist.ProcessGroup) -> Any:
    """Return the store of a group's ranks; ``None`` for one rank, or without a shared store."""
    store = None if group.size() == 1 else default_store()
    if store is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    run_id = state_of(dist.group.WORLD, _RunIds).get(ranks, "")
    return PrefixStore(f"{PREFIX}/{_name(ranks)}/{run_id}", store)


@lru_cache
def _name(ranks: tuple[int, ...]) -> str:
    """Name of a group in keys, equally long for any number of ranks."""
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]


def next_round(purpose: str, ranks: Sequence[int]) -> int:
    """Number of these ranks' next exchange for a purpose; equal on all of them."""
    counter = state_of(dist.group.WORLD, _Rounds)
    counter[purpose, tuple(ranks)] += 1
    return counter[purpose, tuple(ranks)]


def agree_on_run_id(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Give the ranks of a group an identifier of their run; return whether it is new.

    A launcher may keep one store when it restarts the ranks, and keys of an earlier run must not be
    read. All ranks of the group must call it together, before any exchange.

    Args:
        device: used if the group does not serve the CPU.
    """
    if shared_store(group) is None:
        return False
    ranks = tuple(dist.get_process_group_ranks(group))
    known = state_of(dist.group.WORLD, _RunIds)
    if ranks in known:
        return False
    run_id = [secrets.token_hex(4)]
    by = exchange_device(group, device)
    with watched(group, "broadcast", "the begin of a run"):
        dist.broadcast_object_list(run_id, src=ranks[0], group=group, device=by)
    known[ranks] = run_id[0]
    return True


def exchange_device(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Device on which a group exchanges values that are not tensors of the model.

    Returns:
        The CPU if the group serves it, else ``device`` if it serves that, else its first device.
    """
    served = [kind.type for kind in group._device_types]
    if device is not None and device.type in served and "cpu" not in served:
        return device
    return torch.device("cpu" if "cpu" in served else served[0])
