"""Groups of some ranks, made by these ranks alone."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch.distributed import distributed_c10d

from fsdp_dynamo.comm.process_groups import new_group


class _Library(dist.ProcessGroupGloo):
    """A stand-in for NCCL: notes of which group the communicator of a new one is split.

    A split blocks until every rank of that group takes part.
    """

    sources: ClassVar[list[Any]]

    class Options:
        split_from: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, options._timeout)
        self.sources.append(options.split_from)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@on_ranks(3)
def test_ranks_outside_of_a_new_group_do_not_take_part(rank: int, backend: str) -> None:
    pair, default, device = dist.new_group([0, 1]), dist.group.WORLD, torch.device("cuda:0")
    assert default is not None
    if rank == 2:
        return
    _Library.sources = []
    with (
        mock.patch.object(distributed_c10d, "ProcessGroupNCCL", _Library, create=True),
        mock.patch.object(distributed_c10d, "is_nccl_available", return_value=True),
    ):
        default.bound_device_id = device  # as init_process_group(device_id=...) leaves it
        made = new_group([pair], [0, 1], "a test", backend)
        assert default.bound_device_id == made.bound_device_id == device
        default.bound_device_id = None
    assert _Library.sources == ([None] if backend == "nccl" else [])
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)
    assert total.item() == 2
