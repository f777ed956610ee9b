"""Copies of what is saved, with tensors of the host in the place of a device's."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import torch
from pool import on_ranks
from staged_copies import as_if_on_a_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_dynamo.checkpoint import saving


def _shards(flat: torch.Tensor) -> dict[str, Any]:
    """Parts of two matrices in one memory."""
    mesh = init_device_mesh("cpu", (1,))
    parts = {"a": flat[:4].view(2, 2), "b": flat[4:].view(1, 2)}
    return {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}


@on_ranks(1)
def test_a_copy_is_what_was_there(rank: int) -> None:
    flat, step, options = torch.arange(6.0), torch.tensor(3.0), {"betas": [0.9, 0.95]}
    state = {"model": _shards(flat), "optim": [{"step": step}, options]}
    with as_if_on_a_device():
        copy = saving.in_host_memory(state)
    flat.zero_(), step.zero_(), options["betas"].clear()
    assert copy["model"]["a"].to_local().tolist() == [[0, 1], [2, 3]]
    assert copy["model"]["b"].to_local().tolist() == [[4, 5]]
    assert copy["model"]["a"].placements == (Shard(0),)
    assert copy["optim"] == [{"step": torch.tensor(3.0)}, {"betas": [0.9, 0.95]}]


@on_ranks(1)
def test_memory_is_kept_for_the_next_copy(rank: int) -> None:
    flat = torch.arange(6.0)
    with as_if_on_a_device():
        first = saving.in_host_memory(_shards(flat))
        flat.add_(1)
        second = saving.in_host_memory(_shards(flat))
    pointers = [{k: v.to_local().data_ptr() for k, v in one.items()} for one in (first, second)]
    assert pointers[0] == pointers[1]
    assert second["b"].to_local().tolist() == [[5, 6]]


@on_ranks(1)
def test_memory_goes_with_what_was_copied(rank: int) -> None:
    flat = torch.arange(6.0)
    with as_if_on_a_device():
        copy = saving.in_host_memory(_shards(flat))
        kept = weakref.ref(copy["a"].to_local().untyped_storage())
        del copy
        gc.collect()
        assert kept() is not None
        del flat
        gc.collect()
        assert kept() is None


def test_tensors_of_the_host_are_copied_each_time() -> None:
    state: dict[str, Any] = {"a": torch.arange(6.0)}
    with mock.patch.object(saving, "_stager", side_effect=AssertionError):
        first, second = saving.in_host_memory(state), saving.in_host_memory(state)
    assert first["a"].data_ptr() != second["a"].data_ptr()
