"""New process groups of some ranks of another one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
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
    with _unbound_default_group() as device:
        made: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout, backend, use_local_synchronization=True
        )
    made.bound_device_id = device  # barriers run there
    return made


@contextmanager
def _unbound_default_group() -> Iterator[torch.device | None]:
    """Hide the device of ``init_process_group(device_id=...)``; yields it.

    Where it is set, torch splits the default group's communicator to make that of a new group. A
    split needs every rank of the job, and only the ranks of the new group come here.
    """
    default = dist.group.WORLD
    assert default is not None
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield device
    finally:
        default.bound_device_id = device


__all__ = ["group_timeout_s", "new_group"]
