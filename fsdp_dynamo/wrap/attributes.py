"""A wrapper's attributes by upstream's names: its settings, its ranks, its tensors, its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
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
)
from fsdp_dynamo.core.unit import UnitState
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.wrap.arguments import prefetch_of
from fsdp_dynamo.wrap.unit_module import UnitModule


def _fixed(get: Callable[[Any], Any]) -> property:
    """An attribute that only a new wrapper can have another value of."""

    def refuse(self: WrapperAttributes, value: object) -> NoReturn:
        raise FSDPStateError(
            f"{unit_name(self._fsdp_own_unit.fqn)}: expected '{get.__name__}' to stay as it is "
            f"once the model is wrapped, got {value!r}. Wrap a new model with other arguments."
        )

    return property(get, refuse)


class WrapperAttributes(UnitModule):
    """Attributes of every wrapper, the nested ones too.

    Source: the names are those of ``torch.distributed.fsdp.FullyShardedDataParallel``.
    """

    # -- settings --------------------------------------------------------------------------------

    @_fixed
    def sharding_strategy(self) -> ShardingStrategy:
        """The strategy in force: ``NO_SHARD`` in a group of one rank."""
        return self._fsdp_own_unit.config.strategy

    @_fixed
    def cpu_offload(self) -> CPUOffload:
        """As given; ``CPUOffload()`` if not given."""
        return self._fsdp_own_unit.config.cpu_offload

    @_fixed
    def mixed_precision(self) -> MixedPrecision:
        """As given, or as a policy gave it to this unit; ``MixedPrecision()`` if not given."""
        return self._fsdp_own_unit.config.precision or MixedPrecision()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """Time of prefetching in the backward (``BackwardPrefetch``); may be set between steps.

        Raises:
            FSDPTypeError: set to something else.
        """
        return self._fsdp_own_unit.config.backward_prefetch

    @backward_prefetch.setter
    def backward_prefetch(self, wanted: BackwardPrefetch | None) -> None:
        self._fsdp_change(backward_prefetch=prefetch_of(wanted))

    @property
    def forward_prefetch(self) -> bool | None:
        """Whether the forward prefetches, as the argument says; may be set between steps."""
        return self._fsdp_own_unit.config.forward_prefetch

    @forward_prefetch.setter
    def forward_prefetch(self, wanted: bool | None) -> None:
        self._fsdp_change(forward_prefetch=wanted)

    @property
    def limit_all_gathers(self) -> bool:
        """As given or set; at most one unit is gathered ahead in any case."""
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
        """The ranks that shard this unit; with a hybrid strategy, those of one replica."""
        return self._fsdp_own_unit.config.groups.shard

    @_fixed
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        return self._fsdp_own_unit.config.groups.shard.rank()

    @_fixed
    def world_size(self) -> int:
        """Number of ranks in ``process_group``."""
        return self._fsdp_own_unit.config.groups.shard.size()

    @_fixed
    def compute_device(self) -> torch.device:
        """Where forward and backward run; shards may be elsewhere (``cpu_offload``)."""
        units = (self._fsdp_own_unit, *self._fsdp_own_root.units)
        devices = (flat.device for unit in units for flat in unit.flats)
        return next(devices, torch.device("cpu"))

    # -- tensors ---------------------------------------------------------------------------------

    @_fixed
    def params(self) -> list[torch.Tensor]:
        """This rank's shard of each flat parameter of the unit, ``(padded_numel / N,)``.

        There is one for each dtype, each kind of ``requires_grad`` and each precision. None of them
        is an ``nn.Parameter`` or in ``parameters()``.
        """
        return [flat.sharded for flat in self._fsdp_unit.flats]

    @_fixed
    def flat_param(self) -> torch.Tensor | None:
        """The only one of ``params``; ``None`` for a unit without parameters.

        Raises:
            UnsupportedError: there are several.
        """
        shards = self.params
        if len(shards) > 1:
            raise UnsupportedError(
                f"{unit_name(self._fsdp_own_unit.fqn)}: expected parameters of one dtype, all "
                f"trained or all frozen, got {len(shards)} flat parameters. Use params, the list "
                "of them."
            )
        return shards[0] if shards else None

    # -- state -----------------------------------------------------------------------------------

    def check_is_root(self) -> bool:
        """Whether this is the outermost wrapper."""
        return self._fsdp_is_outermost()

    @_fixed
    def training_state(self) -> TrainingState:
        """Current activity of this unit."""
        unit = self._fsdp_own_unit
        if unit.machine.state is UnitState.SUMMON_FULL_PARAMS or unit.is_summoned:
            return TrainingState.SUMMON_FULL_PARAMS
        if unit.machine.state is UnitState.IDLE:
            return TrainingState.IDLE
        return TrainingState.FORWARD_BACKWARD


# -- annotations -----------------------------------------------------------------------------------
# Modules that are marked for wrapping where they are built: ``wrap`` and ``enable_wrap``.


@dataclass(frozen=True)
class _Wrapping:
    """Arguments of the open ``enable_wrap``."""

    wrapper_cls: Callable[..., nn.Module]
    arguments: dict[str, Any]


_open: ContextVar[_Wrapping | None] = ContextVar("_open", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Let ``wrap`` wrap modules while open; elsewhere it returns them as they are.

    Args:
        wrapper_cls: for example ``FullyShardedDataParallel``.
        wrapper_kwargs: its arguments, for all modules.

    Raises:
        UnsupportedError: opened within another one.
    """
    if _open.get() is not None:
        raise UnsupportedError(
            "enable_wrap(): expected one enable_wrap() at a time, got a second one inside the "
            "first. Give wrap() the arguments that differ."
        )
    token = _open.set(_Wrapping(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _open.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module if an ``enable_wrap`` is open.

    Args:
        module: what to wrap.
        wrap_overrides: arguments in place of those of ``enable_wrap``.

    Returns:
        The wrapper; without an open ``enable_wrap``, ``module`` itself.
    """
    wrapping = _open.get()
    if wrapping is None:
        return module
    return wrapping.wrapper_cls(module, **{**wrapping.arguments, **wrap_overrides})
