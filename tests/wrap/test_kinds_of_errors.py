"""Wrong calls raise what FSDP1 raises on CPU, or a subclass: ``except`` clauses go on working."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as upstream
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_dynamo
from fsdp_dynamo import FSDPError

Library = Any
INPUT = torch.ones(2, 4)


def _wrap(library: Library, module: nn.Module, **arguments: Any) -> Any:
    cpu = torch.device("cpu")
    return library.FullyShardedDataParallel(
        module, device_id=cpu, use_orig_params=True, **arguments
    )


def _layers(library: Library) -> Any:
    """Its policy of one unit a layer."""
    policies = upstream.wrap if library is upstream else fsdp_dynamo.wrap_policy
    return policies.ModuleWrapPolicy({nn.Linear})


class _During(nn.Linear):
    """Opens a context in its forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.opens: Callable[[], Any] = contextlib.nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.opens():
            return super().forward(x)


def _in_forward(library: Library, opens: Callable[[Any], Any]) -> None:
    inner = _During()
    model = _wrap(library, nn.Sequential(inner))
    inner.opens = lambda: opens(model)
    model(INPUT)


def _nested(library: Library, call: Callable[[Any], Any]) -> None:
    model = _wrap(library, nn.Sequential(nn.Linear(4, 4)), auto_wrap_policy=_layers(library))
    model(INPUT).sum().backward()
    call(model[0])


def _hook(*_: Any) -> None:
    """A communication hook."""


def _hook_twice(library: Library) -> None:
    model = _wrap(library, nn.Linear(4, 4))
    model.register_comm_hook(None, _hook)
    model.register_comm_hook(None, _hook)


def _over_wrapped(library: Library) -> None:
    model = nn.Sequential(nn.Linear(4, 4), _wrap(library, nn.Linear(4, 4)))
    _wrap(library, model, auto_wrap_policy=_layers(library))


def _hybrid(library: Library, **arguments: Any) -> None:
    strategy = library.ShardingStrategy.HYBRID_SHARD
    _wrap(library, nn.Linear(4, 4), sharding_strategy=strategy, **arguments)


CASES: dict[str, Callable[[Library], object]] = {
    "no_sync in a forward": lambda one: _in_forward(one, lambda m: m.no_sync()),
    "summon in a forward": lambda one: _in_forward(one, lambda m: m.summon_full_params(m)),
    "no_sync of a nested unit": lambda one: _nested(one, lambda m: m.no_sync().__enter__()),
    "clipping by a nested unit": lambda one: _nested(one, lambda m: m.clip_grad_norm_(1.0)),
    "hook of a nested unit": lambda one: _nested(one, lambda m: m.register_comm_hook(None, _hook)),
    "second hook": _hook_twice,
    "policy over wrapped": _over_wrapped,
    "group and mesh": lambda one: _wrap(
        one,
        nn.Linear(4, 4),
        process_group=dist.group.WORLD,
        device_mesh=init_device_mesh("cpu", (2,)),
    ),
    "hybrid, one group": lambda one: _hybrid(one, process_group=dist.group.WORLD),
    "hybrid, 1-D mesh": lambda one: _hybrid(one, device_mesh=init_device_mesh("cpu", (2,))),
    "no policy": lambda one: _wrap(one, nn.Linear(4, 4), auto_wrap_policy=3),
}


def _error(case: Callable[[Library], object], library: Library) -> Exception | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # upstream prints before it raises
            case(library)
    except Exception as error:  # noqa: BLE001  # which, is the question
        return error.with_traceback(None)
    return None


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_errors_are_of_upstreams_kinds(rank: int, name: str) -> None:
    theirs, ours = (_error(CASES[name], library) for library in (upstream, fsdp_dynamo))
    assert theirs is not None
    assert isinstance(ours, FSDPError)
    assert isinstance(ours, type(theirs))
