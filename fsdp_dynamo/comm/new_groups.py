"""New process groups of some ranks of another one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from fsdp_dynamo.comm.watchdog import watched


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """The timeout that a group was created with, which no public API returns."""
    backend = group._get_backend(group._device_types[0])
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def new_group(
    of: Sequence[dist.ProcessGroup], ranks: Sequence[int], use: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of this rank and others, who meet in groups that they are in already.

    (``dist.new_group()`` waits for a rank that is gone until its timeout.)

    Args:
        of: groups of which every rank calls it, and that connect the ranks of the new one. It gets
            the timeout of the first.
        ranks: global ones of the new group, this rank among them.
        use: what the group is for, as users know it.
        backend: of the new group; ``None``: the default group's.

    Raises:
        RankFailedError: a rank is gone, or has not come within the timeout.
    """
    for group in of:
        with watched(group, "barrier", use):
            dist.barrier(group)
    timeout = timedelta(seconds=group_timeout_s(of[0]))
    made: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout, backend, use_local_synchronization=True
    )
    return made


__all__ = ["group_timeout_s", "new_group"]
