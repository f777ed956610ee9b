"""Attributes of the wrapper under FSDP1's names, and ``wrap`` / ``enable_wrap``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    TrainingState,
    converted,
)
from fsdp_dynamo.core.unit import UnitState
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.wrap.unit_module import UnitModule


def _fixed(get: Callable[[Any], Any]) -> property:
    """Read-only property whose setter says that a new wrapper is needed."""

    def refuse(self: WrapperAttributes, value: object) -> NoReturn:
        raise FSDPStateError(
            f"{unit_name(self._fsdp_own_unit.fqn)}: expected '{get.__name__}' to stay as it is "
            f"once the model is wrapped, got {value!r}. Wrap a new model with other arguments."
        )

    return property(get, refuse)


class WrapperAttributes(UnitModule):
    """Attributes of every wrapper, nested wrappers included.

    Source: the names are those of ``torch.distributed.fsdp.FullyShardedDataParallel``.
    """

    # -- settings --------------------------------------------------------------------------------

    @_fixed
    def sharding_strategy(self) -> ShardingStrategy:
        """Strategy in force; ``NO_SHARD`` in a group of one rank."""
        return self._fsdp_own_unit.config.sharding_strategy

    @_fixed
    def cpu_offload(self) -> CPUOffload:
        """Argument ``cpu_offload``; ``CPUOffload()`` by default."""
        return self._fsdp_own_unit.config.cpu_offload

    @_fixed
    def mixed_precision(self) -> MixedPrecision:
        """Precision of this unit, perhaps from a policy; ``MixedPrecision()`` by default."""
        return self._fsdp_own_unit.config.mixed_precision or MixedPrecision()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When the backward prefetches; may be changed between steps.

        Raises:
            FSDPTypeError: the new value is not a ``BackwardPrefetch``.
        """
        return self._fsdp_own_unit.config.backward_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, wanted: BackwardPrefetch | None) -> None:
        self._fsdp_change(backward_prefetch=converted("backward_prefetch", wanted))

    @property
    def forward_prefetch(self) -> bool | None:
        """Argument ``forward_prefetch``; may be changed between steps."""
        return self._fsdp_own_unit.config.forward_prefetch

    @forward_prefetch.setter
    def forward_prefetch(self, wanted: bool | None) -> None:
        self._fsdp_change(forward_prefetch=wanted)

    @property
    def limit_all_gathers(self) -> bool:
        """Argument ``limit_all_gathers``, which has no effect: at most one unit is prefetched."""
        return self._fsdp_own_unit.config.limit_all_gathers

    @limit_all_gathers.setter
    def limit_all_gathers(self, wanted: bool) -> None:
        self._fsdp_change(limit_all_gathers=wanted)

    def _fsdp_change(self, **settings: Any) -> None:
        unit = self._fsdp_own_unit
        unit.config = replace(unit.config, **settings)

    # -- ranks -----------------------------------------------------------------------------------

    @_fixed
    def process_group(self) -> dist.ProcessGroup:
        """Ranks that shard this unit; with a hybrid strategy, the ranks of one replica."""
        return self._fsdp_own_unit.config.groups.shard

    @_fixed
    def rank(self) -> int:
        """Rank of this process in ``process_group``."""
        return self._fsdp_own_unit.config.groups.shard.rank()

    @_fixed
    def world_size(self) -> int:
        """Number of ranks in ``process_group``."""
        return self._fsdp_own_unit.config.groups.shard.size()

    @_fixed
    def compute_device(self) -> torch.device:
        """Device of forward and backward; ``cpu_offload`` keeps shards elsewhere."""
        units = (self._fsdp_own_unit, *self._fsdp_own_root.units)
        devices = (flat.device for unit in units for flat in unit.flats)
        return next(devices, torch.device("cpu"))

    # -- tensors ---------------------------------------------------------------------------------

    @_fixed
    def params(self) -> list[torch.Tensor]:
        """Shards of the unit's flat parameters on this rank, each ``(padded_numel / N,)``.

        A unit has one flat parameter per combination of dtype, ``requires_grad`` and precision. The
        shards are plain tensors; ``parameters()`` does not return them.
        """
        return [flat.sharded for flat in self._fsdp_unit.flats]

    # -- state -----------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        return self._fsdp_is_outermost()

    @_fixed
    def training_state(self) -> TrainingState:
        """Activity of this unit now."""
        unit = self._fsdp_own_unit
        if unit.machine.state is UnitState.SUMMON_FULL_PARAMS or unit.is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.machine.state is UnitState.IDLE:
            return TrainingState.IDLE
        return TrainingState.FORWARD_BACKWARD


# -- annotations -----------------------------------------------------------------------------------
# ``wrap(module)`` in a constructor marks a submodule; ``enable_wrap`` says how to wrap it.


_open: ContextVar[Callable[..., nn.Module] | None] = ContextVar("_open", default=None)
"""Wrapper class of the open ``enable_wrap`` with its arguments."""


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make ``wrap`` wrap modules inside this context; outside it returns modules unchanged.

    Args:
        wrapper_cls: wrapper class, for example ``FullyShardedDataParallel``.
        wrapper_kwargs: its arguments.

    Raises:
        UnsupportedError: another ``enable_wrap`` is open.
    """
    if _open.get() is not None:
        raise UnsupportedError(
            "enable_wrap(): expected one enable_wrap() at a time, got a second one inside the "
            "first. Give wrap() the arguments that differ."
        )
    token = _open.set(partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _open.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module if an ``enable_wrap`` context is open.

    Args:
        module: module to wrap.
        wrap_overrides: arguments that replace those of ``enable_wrap``.

    Returns:
        The wrapper; outside ``enable_wrap``, ``module`` itself.
    """
    wrapper = _open.get()
    return module if wrapper is None else wrapper(module, **wrap_overrides)
