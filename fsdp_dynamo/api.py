"""Public configuration types: enums and dataclasses.

Names are those of ``torch.distributed.fsdp``. Of this package the file imports only the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError
from graph_passes.wire_format import WIRE_FORMATS, WireFormat, WireFormatName


class ShardingStrategy(Enum):
    """Which tensors of a unit are sharded over the ranks, and when parameters are unsharded.

    - ``FULL_SHARD``: unsharded for the forward, resharded after it, unsharded again for the
      backward. The root stays unsharded between the two.
    - ``SHARD_GRAD_OP``: unsharded from the forward to the end of the backward.
    - ``NO_SHARD``: never sharded; gradients are all-reduced.
    - ``HYBRID_SHARD``: ``FULL_SHARD`` inside a shard group. Each shard group holds a replica, and
      gradients are averaged over the replicas.
    - ``HYBRID_SHARD_ZERO2``: ``SHARD_GRAD_OP`` inside a shard group (torch's
      ``_HYBRID_SHARD_ZERO2``).
    - ``HIERARCHICAL_SHARD``: ``FULL_SHARD`` over all ranks of several nodes. Once per optimizer
      step, parameters are gathered between nodes into secondary shards, which the ranks of each
      node share; unsharding then stays inside the node. Gradients are reduced inside the node
      first. (Not in torch.)

    Source: FSDP (arXiv:2304.11277). ``FULL_SHARD`` is stage 3 of ZeRO (arXiv:1910.02054);
    ``SHARD_GRAD_OP`` is close to stage 2, but shards parameters between steps.
    ``HIERARCHICAL_SHARD`` has the secondary partition of ZeRO++ (arXiv:2306.10209).
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    HYBRID_SHARD_ZERO2 = auto()
    _HYBRID_SHARD_ZERO2 = HYBRID_SHARD_ZERO2
    HIERARCHICAL_SHARD = auto()

    @property
    def is_hybrid(self) -> bool:
        """Whether the strategy has replicas of shards."""
        return self in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.HYBRID_SHARD_ZERO2)

    @property
    def is_hierarchical(self) -> bool:
        """Whether the sharding ranks form two levels: inside nodes and between them."""
        return self is ShardingStrategy.HIERARCHICAL_SHARD

    @property
    def reshards_after_forward(self) -> bool:
        """Whether units below the root are unsharded twice per step."""
        return self in (
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.HYBRID_SHARD,
            ShardingStrategy.HIERARCHICAL_SHARD,
        )


class BackwardPrefetch(Enum):
    """When the backward issues the all-gather of its next unit.

    - ``BACKWARD_PRE``: before the current unit's backward (most overlap).
    - ``BACKWARD_POST``: after the current unit's backward (least memory).

    Source: backward prefetching of FSDP (arXiv:2304.11277).
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class TrainingState(Enum):
    """Activity of a wrapper (``training_state``).

    - ``IDLE``: neither forward nor backward runs.
    - ``FORWARD_BACKWARD``: its forward or its backward runs.
    - ``SUMMON_FULL_PARAMS``: its parameters are unsharded on the user's request.
    """

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


@dataclass
class MixedPrecision:
    """Dtypes of a unit's parameters, reductions and buffers.

    Attributes:
        param_dtype: dtype of unsharded parameters, and so of forward and backward; ``None``:
            unchanged. Shards, and so the optimizer's parameters, always keep their dtype.
        reduce_dtype: dtype of the gradient reduction; ``None``: ``param_dtype``. Under
            ``no_sync()``, gradients accumulate in a dtype that holds both.
        buffer_dtype: dtype of floating-point buffers; ``None``: unchanged.
        keep_low_precision_grads: keep gradients in the dtype of the reduction instead of casting
            them to that of the shards.
        cast_forward_inputs: cast floating-point inputs of units that have parameters to
            ``param_dtype``.
        cast_root_forward_inputs: cast the root's floating-point inputs to ``param_dtype``, in any
            case.
        _module_classes_to_ignore: modules of these classes keep their dtype; their inputs are cast
            to it and their outputs cast back.
        output_dtype: cast floating-point outputs of units to this dtype; ``None``: unchanged.
            (FSDP2's.)
        _param_dtype_override_fn: called with each parameter; returns ``None``, or the parameter's
            own dtype to compute in that. (FSDP2's.)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (nn.modules.batchnorm._BatchNorm,)
    output_dtype: torch.dtype | None = None
    _param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None


@dataclass(frozen=True)
class CollectivePrecision:
    """Wire formats of a unit's collectives; shards, and so the optimizer, stay exact.

    All ranks gather bitwise equal parameters. Each rank encodes each part of a gradient once, for
    the rank that sums it, in fp32.

    Attributes:
        all_gather: format of parameters: ``"bfloat16"``, ``"float8"`` (e4m3), ``"int8"``; ``None``:
            uncompressed.
        reduce_scatter: format of gradients: one of these, or ``"int4"``.
        block_numel: elements that share a scale, in all formats but ``bfloat16``. A NaN or an
            infinity makes all of its block NaN.
        stochastic_rounding: round gradients in ``int8`` and ``int4`` up or down at random, so that
            their mean is right.
        all_reduce: format of gradients that replicas average (hybrid strategies, ``NO_SHARD``): one
            of ``reduce_scatter``'s. Each replica sums a part in fp32, and encodes the sum in this
            format too.
        only_where_exposed: let graph mode's planner use these formats only for collectives that it
            cannot hide, and only where the step becomes shorter. (Eager and hooks mode have no
            planner and refuse it.)

    Source: ZeRO++ (arXiv:2306.10209), QSDP (arXiv:2302.02390).
    """

    all_gather: WireFormatName | None = None
    reduce_scatter: WireFormatName | None = None
    block_numel: int = 64
    stochastic_rounding: bool = True
    all_reduce: WireFormatName | None = None
    only_where_exposed: bool = False

    def wire_of(
        self, kind: Literal["all_gather", "reduce_scatter", "all_reduce"], dtype: torch.dtype
    ) -> WireFormat | None:
        """Wire format for a collective of tensors of ``dtype``; ``None``: uncompressed."""
        name: WireFormatName | None = getattr(self, kind)
        if name is None or (name == "bfloat16" and dtype.itemsize <= 2):
            return None
        is_stochastic = self.stochastic_rounding and kind != "all_gather"
        is_stochastic &= name in ("int8", "int4")
        return WireFormat(name, self.block_numel, is_stochastic, self.only_where_exposed)


@dataclass
class CPUOffload:
    """Keep shards and gradients in pinned host memory; no effect on CPU devices.

    Attributes:
        offload_params: offload parameters, and with them gradients and the optimizer's state.
        _pin_memory: whether host memory may be pinned. (FSDP2's.)
    """

    offload_params: bool = False
    _pin_memory: bool = True


class StateDictType(Enum):
    """Form of a model's state dict; all forms have the plain model's names.

    - ``FULL_STATE_DICT``: unsharded tensors, on every rank or on rank 0 only.
    - ``SHARDED_STATE_DICT``: DTensors, for ``torch.distributed.checkpoint``. Nothing is gathered,
      and another number of ranks can load it.
    - ``LOCAL_STATE_DICT``: this rank's shards, for one file per rank (``torch.save``), which only
      the same sharding can load. Values share the parameters' memory.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


@dataclass
class StateDictConfig:
    """Options of all forms.

    Attributes:
        offload_to_cpu: copy tensors to host memory.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options of a full state dict.

    Attributes:
        rank0_only: only rank 0 gets tensors; other ranks get an empty state dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options of a sharded state dict.

    Attributes:
        shares_memory: values are the parameters' own memory. Saving needs no copy, loading into
            them changes the model, and the next step changes them. (Not in torch.)
    """

    shares_memory: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options of a local state dict."""


@dataclass
class OptimStateDictConfig(StateDictConfig):
    """Options of an optimizer's state dict in all forms.

    FSDP1 offloads by default; here the default is that of the model.
    """


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's full state dict.

    Attributes:
        rank0_only: only rank 0 gets tensors; other ranks get an empty state dict.
    """

    rank0_only: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's sharded state dict.

    Attributes:
        shares_memory: values are the optimizer's own memory, and loading adopts the memory of the
            given values. The optimizer's next step changes them. (Not in torch.)
    """

    shares_memory: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of an optimizer's local state dict."""


@dataclass
class StateDictSettings:
    """Form and options of a module's state dicts.

    Attributes:
        state_dict_type: form for the model and its optimizer.
        state_dict_config: options for the model, of the form's class.
        optim_state_dict_config: options for the optimizer, of the form's class.
    """

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = field(default_factory=FullStateDictConfig)
    optim_state_dict_config: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)

    @property
    def copies_model(self) -> bool:
        """Whether values of units' parameters have memory of their own."""
        config = self.state_dict_config
        if config.offload_to_cpu or isinstance(config, FullStateDictConfig):
            return True
        return isinstance(config, ShardedStateDictConfig) and not config.shares_memory

    @property
    def copies_optim(self) -> bool:
        """Whether optimizer states have memory of their own."""
        config = self.optim_state_dict_config
        shares = isinstance(config, ShardedOptimStateDictConfig) and config.shares_memory
        return config.offload_to_cpu or not shares


SHARDED_WITHOUT_COPIES = StateDictSettings(
    StateDictType.SHARDED_STATE_DICT,
    ShardedStateDictConfig(shares_memory=True),
    ShardedOptimStateDictConfig(shares_memory=True),
)
"""State dicts contain DTensors that share the parameters' memory, as FSDP2's do."""


EnumT = TypeVar("EnumT", bound=Enum)


def _is_torchs(value: object, cls: type) -> bool:
    """Whether ``value`` is an instance of torch's class of the same name."""
    return isinstance(value, getattr(fsdp, cls.__name__))


def coerce_enum(enum_type: type[EnumT], value: object, argument: str) -> EnumT:
    """Return ``value`` as a member of ``enum_type``; torch's enum of the same name is accepted."""
    if isinstance(value, enum_type):
        return value
    if _is_torchs(value, enum_type):
        return enum_type[value.name]  # type: ignore[attr-defined]
    raise FSDPTypeError(
        f"argument '{argument}': expected a {enum_type.__name__}, got {value!r}. Pass one of "
        f"{', '.join(m.name for m in enum_type)}."
    )


def coerce_mixed_precision(value: object) -> MixedPrecision | None:
    """Return a copy of ``value``; torch's dataclass of the same name is accepted."""
    if value is None:
        return None
    if isinstance(value, MixedPrecision):
        return replace(value)
    if _is_torchs(value, MixedPrecision):
        return MixedPrecision(**vars(value))
    raise FSDPTypeError(
        f"argument 'mixed_precision': expected a MixedPrecision or None, got {value!r}. Pass "
        "fsdp_dynamo.MixedPrecision(param_dtype=...)."
    )


def coerce_collective_precision(value: object) -> CollectivePrecision | None:
    """Return ``value`` if its fields are valid.

    Raises:
        FSDPTypeError: another class.
        FSDPValueError: unknown format or invalid block size.
    """
    if value is None:
        return None
    where = "argument 'collective_precision'"
    if not isinstance(value, CollectivePrecision):
        raise FSDPTypeError(
            f"{where}: expected a CollectivePrecision or None, got {value!r}. Pass "
            'fsdp_dynamo.CollectivePrecision(all_gather="int8").'
        )
    gathers = [name for name in WIRE_FORMATS if name != "int4"]  # parameters would be too coarse
    kinds = {"all_gather": gathers, "reduce_scatter": WIRE_FORMATS, "all_reduce": WIRE_FORMATS}
    for kind, names in kinds.items():
        name = getattr(value, kind)
        if name is not None and name not in names:
            raise FSDPValueError(
                f"{where}: expected {kind}: None or one of {', '.join(names)}, got {name!r}. Leave "
                "a direction out to let it travel as it is."
            )
    block = value.block_numel
    if not isinstance(block, int) or isinstance(block, bool) or block < 8 or block % 8:
        raise FSDPValueError(
            f"{where}: expected blocks of a positive multiple of 8 elements, got "
            f"block_numel={block!r}. Leave it at 64, or take 256 for more error and 5 % fewer "
            "bytes."
        )
    if value.only_where_exposed and not any(getattr(value, kind) for kind in kinds):
        raise FSDPValueError(
            f"{where}: expected a format for one of {', '.join(kinds)} with "
            "only_where_exposed=True, got none. Say which format exposed collectives get, such as "
            'all_gather="int8".'
        )
    return value


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def settings_of(
    state_dict_type: object, config: object | None, optim_config: object | None
) -> StateDictSettings:
    """Return checked settings; torch's enum and dataclasses of the same names are accepted."""
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
        return replace(config)
    if _is_torchs(config, kind):
        known = {f.name for f in fields(kind)}
        return kind(**{name: value for name, value in vars(config).items() if name in known})
    raise FSDPTypeError(
        f"argument '{argument}': expected a {kind.__name__}, got {config!r}. Pass the class that "
        "goes with the state_dict_type, or leave it out."
    )


# -- constructor arguments -------------------------------------------------------------------------

PlacementFn = Callable[[nn.Parameter], object]
"""Returns ``None`` or torch's ``Shard`` for a parameter."""


@dataclass(frozen=True, kw_only=True)
class UnitArguments:
    """Arguments of ``FSDP`` and ``fully_shard`` that units keep.

    Attributes:
        sharding_strategy: see ``ShardingStrategy``; one rank is always ``NO_SHARD``.
        mixed_precision: see ``MixedPrecision``.
        collective_precision: wire formats with fewer bits for shards of parameters and gradients.
        backward_prefetch: see ``BackwardPrefetch``; ``None`` prefetches nothing.
        forward_prefetch: issue the next unit's all-gather before the current unit's forward.
            ``None``: as ``True``, in the order of the previous forward.
        cpu_offload: keep shards, gradients and so the optimizer's state in host memory; each
            unshard copies this rank's shard to the device. No effect on CPU.
        limit_all_gathers: no effect: at most one unit is prefetched in any case (in graph mode:
            ``max_in_flight`` of ``GraphOptions``). (``FSDP``'s.)
    """

    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    mixed_precision: MixedPrecision | None = None
    collective_precision: CollectivePrecision | None = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool | None = None
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    limit_all_gathers: bool = True


@dataclass(frozen=True, kw_only=True)
class Arguments(UnitArguments):
    """Arguments of ``FSDP`` and ``fully_shard``, converted to our types and checked.

    For the arguments that units keep see ``UnitArguments``.

    Attributes:
        process_group: ranks to shard over; by default, all. A hybrid strategy takes a pair (shard
            group, replicate group); by default, each node is a replica.
        device_mesh: mesh in place of ``process_group``: 1-D, or 2-D (replicas, shards) with a
            hybrid strategy.
        reduction_group: another group of the ranks that shard, for gradients, so that
            reduce-scatters do not queue behind all-gathers in one communicator.
        auto_wrap_policy: chooses submodules that become units of their own.
        ignored_modules: modules that stay as they are.
        ignored_states: modules or parameters that stay as they are.
        param_init_fn: initializes modules on the meta device; by default, their
            ``reset_parameters()``. Called with each module that holds meta tensors itself, in the
            order of ``modules()``, once these have storage. If it writes none of them, it is called
            again with meta tensors.
        device_id: device to which the module is moved before it is sharded.
        sync_module_states: broadcast rank 0's parameters and buffers first.
        shard_placement_fn: called with each parameter before anything is changed; returns ``None``
            or ``Shard``. Ranks must divide dimensions other than the first. (``fully_shard``'s.)

    Raises:
        FSDPTypeError: an argument has the wrong type.
        FSDPValueError: ``param_init_fn`` or a wire format is invalid.
    """

    process_group: object | None = None
    device_mesh: DeviceMesh | None = None
    reduction_group: dist.ProcessGroup | None = None
    auto_wrap_policy: object | None = None
    ignored_modules: Iterable[object] | None = None
    ignored_states: Iterable[object] | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: torch.device | None = None
    sync_module_states: bool = False
    shard_placement_fn: PlacementFn | None = None

    def __post_init__(self) -> None:
        for name in _CONVERTERS:
            object.__setattr__(self, name, converted(name, getattr(self, name)))
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise FSDPValueError(
                "argument 'param_init_fn': expected a function of a module, or None, got "
                f"{self.param_init_fn!r}. Pass a function that writes a module's own parameters "
                "and buffers."
            )

    def for_units(self) -> dict[str, Any]:
        """The arguments that units keep, by name."""
        return {f.name: getattr(self, f.name) for f in fields(UnitArguments)}


def collect_arguments(passed: Mapping[str, Any], **renamed: Any) -> Arguments:
    """Collect a constructor's arguments.

    Args:
        passed: the constructor's ``locals()``; names that are not fields are left out.
        renamed: arguments that have another name or type there.
    """
    names = {f.name for f in fields(Arguments)}
    return Arguments(**{n: v for n, v in {**passed, **renamed}.items() if n in names})


def _coerce_strategy(value: object | None) -> ShardingStrategy:
    if value is None:
        return ShardingStrategy.FULL_SHARD
    return coerce_enum(ShardingStrategy, value, "sharding_strategy")


def _coerce_prefetch(value: object | None) -> BackwardPrefetch | None:
    return None if value is None else coerce_enum(BackwardPrefetch, value, "backward_prefetch")


def _coerce_offload(value: object | None) -> CPUOffload:
    if value is None:
        return CPUOffload()
    if isinstance(value, (CPUOffload, fsdp.CPUOffload)) and isinstance(value.offload_params, bool):
        return CPUOffload(value.offload_params, getattr(value, "_pin_memory", True))
    raise FSDPTypeError(
        f"argument 'cpu_offload': expected a CPUOffload or None, got {value!r}. Pass "
        "fsdp_dynamo.CPUOffload(offload_params=True)."
    )


def _coerce_device(value: object | None) -> torch.device | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return torch.device("cuda", value)
    if isinstance(value, str):
        return torch.device(value)
    if value is None or isinstance(value, torch.device):
        return value
    raise FSDPTypeError(
        f"argument 'device_id': expected a number, a torch.device or its name, got {value!r}. "
        "Pass torch.device('cuda', index)."
    )


def check_mesh(mesh: object, argument: str = "device_mesh") -> object:
    """Return a mesh or ``None``; raise ``FSDPTypeError`` for anything else."""
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    raise FSDPTypeError(
        f"argument '{argument}': expected a DeviceMesh, got {mesh!r}. Make one by "
        "init_device_mesh(), or pass a process group as process_group."
    )


_CONVERTERS: Mapping[str, Callable[[Any], object]] = {
    "sharding_strategy": _coerce_strategy,
    "mixed_precision": coerce_mixed_precision,
    "collective_precision": coerce_collective_precision,
    "backward_prefetch": _coerce_prefetch,
    "cpu_offload": _coerce_offload,
    "device_id": _coerce_device,
    "device_mesh": check_mesh,
}


def converted(name: str, value: object) -> object:
    """Return the value of an argument in our types; torch's types of the same names are accepted.

    Raises:
        FSDPTypeError: another type.
        FSDPValueError: a value that is not valid.
    """
    return _CONVERTERS[name](value) if name in _CONVERTERS else value


__all__ = [
    "Arguments",
    "BackwardPrefetch",
    "CPUOffload",
    "CollectivePrecision",
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
    "TrainingState",
    "UnitArguments",
]
