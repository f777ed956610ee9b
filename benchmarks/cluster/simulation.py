"""A simulated cluster: one process that stands for rank 0 of up to 4096 ranks.

``simulated_cluster(model)`` makes a process group of the backend ``simulated`` the default one.
Training code runs on it unchanged: its collectives do the local memory traffic, and are done when
the model (``benchmarks.cluster.model``) says, one after the other over one link
(``benchmarks.cluster.link``). What is measured is one rank's compute, host work and the overlap
with communication of the modelled duration; a log tells what was sent and what was waited for.

    with simulated_cluster(gpu_cluster(4096)) as group:
        model = fully_shard(build())
        step(model)
        print(group.log, group.exposed_s())

What the other ranks are taken to hold, so that shapes and magnitudes are those of training on equal
data:

- all-gather: each slot is this rank's shard;
- reduce-scatter: the sum (mean, maximum, minimum) of this rank's own N chunks;
- all-to-all: the input;
- all-reduce: ``x * N`` for a sum, ``x`` for a mean, maximum or minimum;
- gather: each slot is this rank's tensor; scatter from this rank: its own slot of the list;
- broadcast or scatter from another rank, receive, reduce to another rank: the tensor is left as it
  is. Objects from another rank are therefore undefined: torch reads their size from an
  uninitialised tensor.

Subgroups (``dist.new_group``, ``DeviceMesh``) share link and log with the whole cluster; ranks must
be spread evenly over nodes. ``dist.split_group`` is refused by torch itself without an accelerator,
and a subgroup of another backend (``new_group(backend="gloo")``) waits for ranks that do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.link import CollectiveRecord, fine_sleep
from benchmarks.cluster.model import (
    ClusterModel,
    LinkModel,
    ethernet_cluster,
    gpu_cluster,
    two_hosts,
)
from benchmarks.cluster.process_group import BACKEND, SimulatedCluster, SimulatedGroup

__all__ = [
    "BACKEND",
    "ClusterModel",
    "CollectiveRecord",
    "LinkModel",
    "SimulatedCluster",
    "SimulatedGroup",
    "ethernet_cluster",
    "gpu_cluster",
    "simulated_cluster",
    "two_hosts",
]


def _create_group(options: Any, cluster: SimulatedCluster | None) -> SimulatedGroup:
    """Create a group for ``init_process_group`` (with a cluster) or ``new_group`` (without)."""
    if cluster is not None:
        if options.group_rank != 0 or options.group_size != cluster.model.world_size:
            raise ValueError(
                f"a simulated cluster: expected rank 0 of {cluster.model.world_size}, "
                f"got rank {options.group_rank} of {options.group_size}"
            )
        return SimulatedGroup(cluster, cluster.model, 0)
    world = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(world, SimulatedGroup):
        raise ValueError(
            "backend 'simulated': expected pg_options=SimulatedCluster(model), got None; "
            "use simulated_cluster(model)"
        )
    model = world.model.of_ranks(options.global_ranks_in_group)
    return SimulatedGroup(world.cluster, model, options.group_rank)


if BACKEND not in dist.Backend.backend_list:
    dist.Backend.register_backend(
        BACKEND, _create_group, extended_api=True, devices=["cpu", "cuda"]
    )
    # torch 2.15 attaches its flight recorder to a group's C++ backends, of which this one has none.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add(BACKEND)


@contextmanager
def simulated_cluster(
    model: ClusterModel, device: str | torch.device = "cpu"
) -> Iterator[SimulatedGroup]:
    """Make this process rank 0 of a simulated cluster, for as long as the context lasts.

    Args:
        model: the cluster.
        device: where the tensors will be: ``"cpu"`` or a CUDA device.

    Raises:
        RuntimeError: a default process group exists already.
        ValueError: a device that is not there.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "simulated_cluster: expected no default process group, got "
            f"{dist.get_backend()!r} of {dist.get_world_size()} ranks; destroy it first"
        )
    dist.init_process_group(
        BACKEND,
        rank=0,
        world_size=model.world_size,
        store=dist.HashStore(),
        timeout=timedelta(seconds=60),
        pg_options=SimulatedCluster(model, device),
    )
    try:
        group = dist.group.WORLD
        assert isinstance(group, SimulatedGroup)
        with fine_sleep():
            yield group
    finally:
        dist.destroy_process_group()
