"""Distributed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
_KINDS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather,
    "reduce_scatter": partial(_reduce_scatter, op=dist.ReduceOp.SUM),
    "all_reduce": lambda output, sent, **named: dist.all_reduce(
        output.copy_(sent), dist.ReduceOp.SUM, **named
    ),
}


@pytest.mark.private(
    "torch.distributed.distributed_c10d._coalescing_manager",
    need="several collectives as one call of the backend; its coalesced calls have no public name",
    instead="one call for each collective: options that join launches do nothing then",
)
@pytest.mark.parametrize("kind", _KINDS)
def test_several_collectives_are_one_launch(group: dist.ProcessGroup, kind: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    launches: list[str] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                launches.append(func.name())
            return func(*args, **(kwargs or {}))

    inputs = [torch.full((size,), float(size)) for size in (2, 3)]
    outputs = [torch.zeros_like(one) for one in inputs]
    coalesced = dist.distributed_c10d._coalescing_manager(group, async_ops=True)
    with Noting(), coalesced as work:
        for output, sent in zip(outputs, inputs, strict=True):
            _KINDS[kind](output, sent, group=group, async_op=True)
        assert not launches
    work.wait()
    assert len(launches) == 1
    assert all(map(torch.equal, outputs, inputs))


@pytest.mark.private(
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "._local_tensor",
    need="a parameter that is a DTensor over a view of the shard, whose memory is another one "
    "after a conversion, without a check of what other ranks have",
    instead="DTensor.from_local(), a new parameter at each conversion",
)
def test_a_dtensor_is_a_local_tensor_and_a_description(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh.from_group(group, "cpu")
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([1, 2]), (2, 1), torch.float32))
    local, moved = torch.ones(1, 2), torch.full((1, 2), 3.0)
    made: Any = DTensor.__new__(DTensor, local, spec, requires_grad=False)
    param: Any = nn.Parameter(made)
    assert isinstance(param, DTensor)
    assert param.to_local().data_ptr() == local.data_ptr()
    param._local_tensor = moved
    assert torch.equal((param * 2).full_tensor(), torch.full((1, 2), 6.0))


@pytest.mark.private(
    "torch.distributed.tensor.debug._clear_sharding_prop_cache",
    need="steps of several peers' optimizers in one process (benchmarks/host_overhead.py): torch's "
    "cache has the specs of the first one, with which the others' are compared field by field",
    instead="a process for each peer, whose ratios would drift with the machine",
)
def test_what_is_known_of_operators_is_forgotten(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, debug

    value = DTensor.from_local(torch.ones(2), DeviceMesh.from_group(group, "cpu"), (Shard(0),))

    def misses() -> int:
        """Lookups that failed, of an addition."""
        before = debug._get_fast_path_sharding_prop_cache_stats()[1]
        _ = value + value
        return debug._get_fast_path_sharding_prop_cache_stats()[1] - before

    misses()
    assert misses() == 0
    debug._clear_sharding_prop_cache()
    assert misses() == 1


@pytest.mark.private(
    "Module._ddp_params_and_buffers_to_ignore",
    need="an error by name where DistributedDataParallel wraps a unit: it asks for this first, and "
    "then waits for ranks whose parameters have another size",
    instead="nothing: its own error, or a timeout",
)
@pytest.mark.usefixtures("group")
def test_ddp_asks_what_to_ignore_before_it_communicates() -> None:
    class Refusing(nn.Linear):
        @property
        def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
            raise LookupError

    with pytest.raises(LookupError):
        nn.parallel.DistributedDataParallel(Refusing(1, 1))
