"""Arguments of the wrapper: checked before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sized
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.comm.process_groups import Groups, node_ranks_of
from fsdp_dynamo.config import (
    BackwardPrefetch,
    CollectivePrecision,
    CPUOffload,
    ShardingStrategy,
    coerce_collective_precision,
    coerce_enum,
    coerce_mixed_precision,
)
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.layout.flat_layout import size_per_rank
from fsdp_dynamo.core.original_parameter import OriginalParameter
from fsdp_dynamo.core.unit import Unit, UnitConfig
from fsdp_dynamo.core.unit_modules import units_in
from fsdp_dynamo.errors import (
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    UnsupportedError,
)
from fsdp_dynamo.module_tree import is_unit


def check_travels(config: UnitConfig, fqn: str, param: nn.Parameter) -> None:
    """Raise for a parameter that cannot travel in the formats of its unit."""
    precision = config.collective_precision
    if precision is None:
        return
    if precision.only_where_exposed and config.groups.hierarchy is not None:
        raise UnsupportedError(
            expected="formats that are always used, with HIERARCHICAL_SHARD",
            got="only_where_exposed=True",
            where=f"argument 'collective_precision', parameter '{fqn}'",
            fix="Leave only_where_exposed out: formats are those between nodes there, and gathers "
            "between nodes are in no plan.",
        )
    _refuse_flat_reductions(config, precision, fqn)
    if param.dtype not in _TRAVEL:
        raise UnsupportedError(
            expected="float32, bfloat16 or float16 parameters",
            got=str(param.dtype),
            where=f"argument 'collective_precision', parameter '{fqn}'",
            fix="Leave the argument out for this unit, by a policy's dict of arguments, or put the "
            "parameter into ignored_states.",
        )


def _refuse_flat_reductions(config: UnitConfig, precision: CollectivePrecision, fqn: str) -> None:
    """Raise if gradients would be reduced in a format by several ranks on each of several nodes."""
    groups, is_whole = config.groups, config.strategy is ShardingStrategy.NO_SHARD
    reduced_by = {"all_reduce": groups.shard if is_whole else groups.replicate}
    if not is_whole and groups.hierarchy is None:
        reduced_by["reduce_scatter"] = groups.reduce
    for kind, group in reduced_by.items():
        node_ranks = 1 if group is None else node_ranks_of(group)
        if getattr(precision, kind) is not None and node_ranks > 1:
            raise UnsupportedError(
                expected="gradients as they are, reduced over several nodes by all of their ranks",
                got=f"{kind}={getattr(precision, kind)!r}: each node would send its messages to "
                f"other nodes from {node_ranks} ranks, {node_ranks} times as many bytes as a ring "
                "sends",
                where=f"argument 'collective_precision', parameter '{fqn}'",
                fix=f"Leave {kind} out (all_gather may stay), or use HIERARCHICAL_SHARD, whose "
                "formats are those between nodes.",
            )


_TRAVEL = (torch.float32, torch.bfloat16, torch.float16)


def check_module(module: object) -> None:
    """Raise unless ``module`` is a module that is not wrapped yet."""
    if is_unit(module):
        raise FSDPStateError(
            expected="a module that is no unit yet",
            got=f"a unit ({type(module).__name__})",
            where="argument 'module'",
            fix="Wrap or shard each module once; do so with its parent to make one more unit.",
            see="wrapped-twice",
        )
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        raise without_forward(module)
    if not isinstance(module, nn.Module):
        raise FSDPTypeError(
            expected="a torch.nn.Module",
            got=repr(type(module)),
            where="argument 'module'",
            fix="Pass the model itself.",
        )


def without_forward(module: object) -> FSDPTypeError:
    """The error for a container, which is never called."""
    return FSDPTypeError(
        expected="a module with a forward",
        got=type(module).__name__,
        where="argument 'module'",
        fix="Wrap or shard the modules in it, one by one.",
    )


def warn_of_containers(owned: Mapping[nn.Module, Sized]) -> None:
    """Warn of units without a forward that have parameters: nothing would unshard these."""
    for module, parameters in owned.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(parameters):
            warnings.warn(
                f"a {type(module).__name__} of {len(module)} modules is a unit, but has no forward "
                "that would unshard its parameters: let the modules in it be units",
                stacklevel=4,
            )


MAX_PADDING = 0.25
"""Part of a unit's parameters that padding may take without a warning."""
FREE_PADDING_BYTES = 1 << 20
"""Padding that is not worth one."""


def warn_of_padding(
    params: Mapping[str, OriginalParameter], config: UnitConfig, num_shards: int
) -> None:
    """Warn where many parameters of a unit have fewer rows than there are ranks.

    Args:
        params: of the unit, by FQN.
        config: of the unit.
        num_shards: ranks that share them.
    """
    if config.strategy is ShardingStrategy.NO_SHARD or not params:
        return
    is_divided = config.groups.hierarchy is None
    padding = {fqn: _padding_bytes(p, num_shards, is_divided) for fqn, p in params.items()}
    total = sum(padding.values())
    whole = sum(local_of(original.param).nbytes for original in params.values())
    if total <= max(MAX_PADDING * whole, FREE_PADDING_BYTES):
        return
    fqn = max(padding, key=lambda fqn: padding[fqn])
    shape = tuple(local_of(params[fqn].param).shape)
    warnings.warn(
        f"padding makes a unit {1 + total / whole:.2f} times as large (by {total >> 20} MiB), most "
        f"of all of parameter '{fqn}': {num_shards} ranks share the {(*shape, 1)[0]} rows of its "
        f"shape {shape}. Shard it along another dimension (fully_shard's shard_placement_fn), over "
        "fewer ranks (HYBRID_SHARD, a 2-D mesh), or make it several parameters",
        stacklevel=5,
    )


def _padding_bytes(original: OriginalParameter, num_shards: int, is_divided: bool) -> int:
    """Bytes of shards beyond the parameter's own.

    ``is_divided``: whether rows that do not divide by ``num_shards`` are divided nevertheless.
    """
    param = local_of(original.param)
    size = param.shape[original.dim] if param.dim() else 1
    if not param.dim() or (not is_divided and size % num_shards):
        return (num_shards - 1) * param.nbytes
    padded = num_shards * size_per_rank(size, num_shards) * (param.numel() // max(1, size))
    return (padded - param.numel()) * param.element_size()


def check_whole_units(root: nn.Module) -> None:
    """Raise if a unit of several modules has only some of them below a root."""
    below = set(root.modules())
    for unit in units_in(root):
        if not below.issuperset(unit.modules):
            raise FSDPValueError(
                expected="all modules of a list that fully_shard was given",
                got=f"{sum(m in below for m in unit.modules)} of {len(unit.modules)}",
                where=f"a {type(root).__name__} that becomes a unit",
                fix="Give fully_shard modules of the same model in one list.",
            )


def check_inference(module: nn.Module) -> None:
    """Raise inside ``torch.inference_mode()``, or for parameters that were made there: what the
    unit writes in place later cannot be an inference tensor."""
    made = next((fqn for fqn, param in module.named_parameters() if param.is_inference()), None)
    if made is not None or torch.is_inference_mode_enabled():
        raise FSDPStateError(
            expected="a module that is made and wrapped outside torch.inference_mode()",
            got="a call inside it" if made is None else "an inference tensor",
            where=f"a {type(module).__name__}" if made is None else f"parameter '{made}'",
            fix="Make and wrap the model first; call it under torch.inference_mode() then.",
        )


def check_init_fn(param_init_fn: object) -> None:
    """Raise for an initialisation that cannot be called."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise FSDPValueError(
            expected="a function of a module, or None",
            got=repr(param_init_fn),
            where="argument 'param_init_fn'",
            fix="Pass a function that writes a module's own parameters and buffers.",
        )


def device_of(device_id: object) -> torch.device | None:
    """The device that ``device_id`` names: an accelerator's number, a device, or its name."""
    if isinstance(device_id, int) and not isinstance(device_id, bool):
        return torch.device("cuda", device_id)
    if isinstance(device_id, str):
        return torch.device(device_id)
    if device_id is None or isinstance(device_id, torch.device):
        return device_id
    raise FSDPTypeError(
        expected="a number, a torch.device or its name",
        got=repr(device_id),
        where="argument 'device_id'",
        fix="Pass torch.device('cuda', index).",
    )


def strategy_of(strategy: object | None) -> ShardingStrategy:
    """The requested strategy; FULL_SHARD by default."""
    if strategy is None:
        return ShardingStrategy.FULL_SHARD
    return coerce_enum(ShardingStrategy, strategy, "sharding_strategy")


def effective_strategy(strategy: ShardingStrategy, groups: Groups) -> ShardingStrategy:
    """The strategy in force: NO_SHARD in a group of one rank."""
    return ShardingStrategy.NO_SHARD if groups.shard.size() == 1 else strategy


def warn_of_one_rank(strategy: ShardingStrategy, groups: Groups) -> None:
    """Warn where a strategy shards over one rank."""
    if effective_strategy(strategy, groups) is not strategy:
        warnings.warn(
            f"the process group has one rank: NO_SHARD in place of {strategy.name}", stacklevel=4
        )


def _strategy_of_target(value: object, config: UnitConfig) -> ShardingStrategy:
    """A strategy that a policy gives one module; replicas are a matter of the whole model."""
    strategy = strategy_of(value)
    if _ranks_of(strategy) != _ranks_of(config.strategy) and (
        strategy is not ShardingStrategy.NO_SHARD
    ):
        raise FSDPValueError(
            expected=f"a strategy that goes with the root's {config.strategy.name}",
            got=strategy.name,
            where="a policy's dict of constructor arguments",
            fix="Give hybrid strategies, or HIERARCHICAL_SHARD, to all units or to none; NO_SHARD "
            "goes with all.",
        )
    return effective_strategy(strategy, config.groups)


def _ranks_of(strategy: ShardingStrategy) -> tuple[bool, bool]:
    """Which dimensions of ranks a strategy needs."""
    return strategy.is_hybrid, strategy.is_hierarchical


def cpu_offload_of(cpu_offload: object | None) -> CPUOffload:
    """``cpu_offload`` as our ``CPUOffload``; accepts upstream's dataclass of that name."""
    if cpu_offload is None:
        return CPUOffload()
    wanted = getattr(cpu_offload, "offload_params", None)
    if not isinstance(wanted, bool):
        raise FSDPTypeError(
            expected="a CPUOffload or None",
            got=repr(cpu_offload),
            where="argument 'cpu_offload'",
            fix="Pass fsdp_dynamo.CPUOffload(offload_params=True).",
        )
    return CPUOffload(wanted, getattr(cpu_offload, "_pin_memory", True))


def offloads(cpu_offload: CPUOffload, device: torch.device) -> bool:
    """Whether shards and gradients are kept in host memory while another device computes."""
    wanted = cpu_offload.offload_params and device.type != "cpu"
    if wanted and not cpu_offload._pin_memory:
        raise UnsupportedError(
            expected="CPUOffloadPolicy(pin_memory=True)",
            got="pin_memory=False",
            where="argument 'offload_policy'",
            fix="Leave it out: copies between an accelerator and host memory that is not pinned "
            "would stop the host, so shards are pinned always.",
        )
    return wanted


def prefetch_of(backward_prefetch: object | None) -> BackwardPrefetch | None:
    """``backward_prefetch`` as our enum; accepts upstream's."""
    if backward_prefetch is None:
        return None
    return coerce_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch")


def warn_of_cpu_start(
    module: nn.Module, group: dist.ProcessGroup, device_id: torch.device | None
) -> None:
    """Warn where a module is on the CPU, the group is not, and nothing says to move it."""
    first = next(module.parameters(), None)
    if device_id is not None or first is None or first.device.type != "cpu":
        return
    if not any(device.type == "cpu" for device in group._device_types):
        warnings.warn(
            "the module is on the CPU and the process group serves no CPU: pass device_id, or "
            "move the module before its first forward",
            stacklevel=3,
        )


def override(config: UnitConfig, overrides: dict[str, Any]) -> UnitConfig:
    """A target's configuration: the root's, with what a policy's dict changes."""
    known: dict[str, Callable[[Any], dict[str, Any]]] = {
        "sharding_strategy": lambda v: {"strategy": _strategy_of_target(v, config)},
        "mixed_precision": lambda v: {"precision": coerce_mixed_precision(v)},
        "collective_precision": lambda v: {"collective_precision": coerce_collective_precision(v)},
        "backward_prefetch": lambda v: {"backward_prefetch": prefetch_of(v)},
        "forward_prefetch": lambda v: {"forward_prefetch": v},
    }
    values = dict(vars(config))
    for name, value in overrides.items():
        if name not in known:
            raise UnsupportedError(
                expected=f"one of {', '.join(known)}",
                got=f"'{name}'",
                where="a policy's dict of constructor arguments",
                fix="Wrap that module by hand to give it other arguments.",
            )
        values.update(known[name](value))
    return UnitConfig(**values)


def input_dtype_of(unit: Unit, is_root: bool) -> torch.dtype | None:
    """The dtype that a unit casts its floating-point inputs to; ``None``: not cast."""
    precision = unit.config.precision
    if precision is None or precision.param_dtype is None:
        return None
    own = precision.cast_forward_inputs and bool(unit.flats)
    wanted = own or (is_root and precision.cast_root_forward_inputs)
    return precision.param_dtype if wanted else None


def note_use_dtensor(given: bool | None) -> None:
    """Warn of an argument that chose between two kinds of parameters, of which one is left."""
    if given is not None:
        warnings.warn(
            f"use_dtensor={given} has no effect: parameters are DTensors, as FSDP2's. It is "
            "deprecated: leave it out.",
            FutureWarning,
            stacklevel=3,
        )
