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
