"""Public configuration types: enums and frozen dataclasses, no behaviour.

The names are those of ``torch.distributed.fsdp``. This file is a leaf: it imports
nothing of the package but the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from typing import TypeVar

import torch
from torch import nn

from fsdp_dynamo.errors import FSDPTypeError

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """What of a unit is sharded over the ranks, and when its parameters are unsharded.

    - ``FULL_SHARD``: unsharded for the forward, resharded after it, unsharded again for
      the backward. The root stays unsharded between the two.
    - ``SHARD_GRAD_OP``: unsharded from the forward to the end of the backward.
    - ``NO_SHARD``: never sharded; gradients are all-reduced.
    - ``HYBRID_SHARD``: as ``FULL_SHARD`` inside a shard group; gradients are then averaged over
      the groups, each of which holds a replica.
    - ``HYBRID_SHARD_ZERO2`` (upstream's ``_HYBRID_SHARD_ZERO2``): the same with
      ``SHARD_GRAD_OP`` inside.

    Source: FSDP (arXiv:2304.11277); ``FULL_SHARD`` is stage 3 of ZeRO (arXiv:1910.02054),
    ``SHARD_GRAD_OP`` close to stage 2, with parameters that are sharded between steps.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    HYBRID_SHARD_ZERO2 = auto()
    _HYBRID_SHARD_ZERO2 = HYBRID_SHARD_ZERO2

    @property
    def is_hybrid(self) -> bool:
        """Whether there are replicas of what is sharded."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def reshards_after_forward(self) -> bool:
        """Whether units below the root are unsharded twice a step."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


class BackwardPrefetch(Enum):
    """When the all-gather of the unit that comes next in the backward is issued.

    - ``BACKWARD_PRE``: before the current unit's backward (most overlap).
    - ``BACKWARD_POST``: after the current unit's backward (least memory).

    Source: backward prefetching of FSDP (arXiv:2304.11277).
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass(frozen=True)
class MixedPrecision:
    """Data types of a unit's parameters, reductions and buffers.

    Attributes:
        param_dtype: of the unsharded parameters and so of forward and backward; ``None``: their
            own. Shards, and so the optimizer's parameters, keep theirs in any case.
        reduce_dtype: of the gradient reduction; ``param_dtype`` if not given.
        buffer_dtype: of floating-point buffers; ``None``: their own.
        keep_low_precision_grads: leave gradients in the reduction's data type; otherwise they are
            cast to that of the shards.
        cast_forward_inputs: cast a unit's floating-point inputs to ``param_dtype``.
        cast_root_forward_inputs: the same for the root; wins over the line above there.
        _module_classes_to_ignore: modules of these classes stay in their own data type;
            their inputs are cast to it and their outputs cast back.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True)
class CPUOffload:
    """Keep sharded parameters and gradients in (pinned) host memory.

    On CPU devices this changes nothing and is accepted.

    Attributes:
        offload_params: whether to; gradients, and so the optimizer's state, go with them.
    """

    offload_params: bool = False


class StateDictType(Enum):
    """Forms of a model's state dict; names are the plain model's in each.

    - ``FULL_STATE_DICT``: whole tensors, on every rank or on the first one.
    - ``SHARDED_STATE_DICT``: this rank's part of each tensor, for ``torch.distributed.checkpoint``;
      nothing is gathered, and another number of ranks can load it.
    - ``LOCAL_STATE_DICT``: the 1-D parameters as they are, of one rank: for a file of its own
      (``torch.save``), which only the same sharding loads. The values share the parameters' memory.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass(frozen=True)
class StateDictConfig:
    """Options of every form.

    Attributes:
        offload_to_cpu: tensors of the state dict are in host memory.
    """

    offload_to_cpu: bool = False


@dataclass(frozen=True)
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict.

    Attributes:
        rank0_only: only rank 0 gets the tensors; the other ranks' state dict is empty.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict.

    Attributes:
        shares_memory: values are the parameters' own memory, so that saving takes none, and what is
            read into them is in the model. They change with the next step. (Not in upstream.)
    """

    shares_memory: bool = False


@dataclass(frozen=True)
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict."""


@dataclass(frozen=True)
class OptimStateDictConfig(StateDictConfig):
    """Options of an optimizer's state dict in every form. (Upstream's copies to the host unless it
    is told not to; here both kinds of state dict do what they are told.)"""


@dataclass(frozen=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's full state dict.

    Attributes:
        rank0_only: only rank 0 gets the tensors; the other ranks' state dict is empty.
    """

    rank0_only: bool = False


@dataclass(frozen=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's sharded state dict.

    Attributes:
        shares_memory: values are the optimizer's own memory, and it takes the memory of those that
            it is given. They change with its next step. (Not in upstream.)
    """

    shares_memory: bool = False


@dataclass(frozen=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's local state dict."""


@dataclass(frozen=True)
class StateDictSettings:
    """Which form of state dict a module writes, and how.

    Attributes:
        state_dict_type: the form, of the model's and of its optimizer's.
        state_dict_config: options of the model's, of the class that goes with the form.
        optim_state_dict_config: options of the optimizer's, likewise.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = FullStateDictConfig()
    optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()

    @property
    def copies_model(self) -> bool:
        """Whether values have memory of their own (but for buffers and what no unit holds)."""
        config = self.state_dict_config
        if config.offload_to_cpu or isinstance(config, FullStateDictConfig):
            return True
        return isinstance(config, ShardedStateDictConfig) and not config.shares_memory

    @property
    def copies_optim(self) -> bool:
        """Whether states have memory of their own."""
        config = self.optim_state_dict_config
        shares = isinstance(config, ShardedOptimStateDictConfig) and config.shares_memory
        return config.offload_to_cpu or not shares


EnumT = TypeVar("EnumT", bound=Enum)


def coerce_enum(enum_type: type[EnumT], value: object, argument: str) -> EnumT:
    """``value`` as a member of ``enum_type``; members of upstream's enum of that name do too."""
    if isinstance(value, enum_type):
        return value
    if isinstance(value, Enum) and type(value).__name__ == enum_type.__name__:
        return enum_type[value.name]
    raise FSDPTypeError(
        expected=f"a {enum_type.__name__}",
        got=repr(value),
        where=f"argument '{argument}'",
        fix=f"Pass one of {', '.join(m.name for m in enum_type)}.",
    )


def coerce_mixed_precision(value: object) -> MixedPrecision | None:
    """``value`` as our ``MixedPrecision``; upstream's dataclass of that name does too."""
    if value is None or isinstance(value, MixedPrecision):
        return value
    if type(value).__name__ == "MixedPrecision":
        return MixedPrecision(**vars(value))
    raise FSDPTypeError(
        expected="a MixedPrecision or None",
        got=repr(value),
        where="argument 'mixed_precision'",
        fix="Pass fsdp_dynamo.MixedPrecision(param_dtype=...).",
    )


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(
    state_dict_type: object, config: object | None, optim_config: object | None
) -> StateDictSettings:
    """Checked settings; upstream's enum and dataclasses of the same names do too."""
    chosen = coerce_enum(StateDictType, state_dict_type, "state_dict_type")
    model, optim = _CONFIGS[chosen]
    return StateDictSettings(
        chosen,
        _coerce_config(model, config, "state_dict_config"),
        _coerce_config(optim, optim_config, "optim_state_dict_config"),
    )


ConfigT = TypeVar("ConfigT", bound=StateDictConfig)


def _coerce_config(kind: type[ConfigT], config: object | None, argument: str) -> ConfigT:
    if config is None:
        return kind()
    if isinstance(config, kind):
        return config
    if type(config).__name__ == kind.__name__:
        known = {f.name for f in fields(kind)}
        return kind(**{name: value for name, value in vars(config).items() if name in known})
    raise FSDPTypeError(
        expected=f"a {kind.__name__}",
        got=repr(config),
        where=f"argument '{argument}'",
        fix="It goes with the state_dict_type; or leave it out.",
    )
