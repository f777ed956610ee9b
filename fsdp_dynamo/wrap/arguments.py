"""Checks of arguments and modules, before anything is changed; FSDP2's arguments."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_dynamo.api import (
    CollectivePrecision,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    check_mesh,
    converted,
)
from fsdp_dynamo.comm.process_groups import Groups, node_ranks_of, serves_cpu
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.core.flat_layout import size_per_rank
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


def check_wire_formats(config: UnitConfig, fqn: str, param: nn.Parameter) -> None:
    """Raise if a parameter cannot be sent in its unit's ``collective_precision``."""
    precision = config.collective_precision
    if precision is None:
        return
    if precision.only_where_exposed and config.groups.hierarchy is not None:
        raise UnsupportedError(
            f"argument 'collective_precision', parameter '{fqn}': expected formats that are always "
            "used, with HIERARCHICAL_SHARD, got only_where_exposed=True. Leave only_where_exposed "
            "out: wire formats apply between nodes there, where graph mode plans no all-gathers."
        )
    _refuse_flat_reductions(config, precision, fqn)
    if param.dtype not in _ENCODABLE_DTYPES:
        raise UnsupportedError(
            f"argument 'collective_precision', parameter '{fqn}': expected float32, bfloat16 or "
            f"float16 parameters, got {param.dtype}. Leave the argument out for this unit, by a "
            "policy's dict of arguments, or put the parameter into ignored_states."
        )


def _refuse_flat_reductions(config: UnitConfig, precision: CollectivePrecision, fqn: str) -> None:
    """Raise if several ranks of each node would send encoded gradients to other nodes."""
    groups = config.groups
    reduced_by = {"all_reduce": groups.replicate if config.is_sharded else groups.shard}
    if config.is_sharded and groups.hierarchy is None:
        reduced_by["reduce_scatter"] = groups.reduce
    for kind, group in reduced_by.items():
        node_ranks = 1 if group is None else node_ranks_of(group)
        if getattr(precision, kind) is not None and node_ranks > 1:
            raise UnsupportedError(
                f"argument 'collective_precision', parameter '{fqn}': expected no wire format for "
                "gradients that all ranks of several nodes reduce together, got "
                f"{kind}={getattr(precision, kind)!r}: each of a node's {node_ranks} ranks would "
                f"send to other nodes, {node_ranks} times as many bytes as a ring sends. Leave "
                f"{kind} out (all_gather may stay), or use HIERARCHICAL_SHARD, which uses wire "
                "formats between nodes only."
            )


_ENCODABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_module(module: object) -> None:
    """Raise unless ``module`` is a module that is not a unit yet."""
    if is_unit(module):
        raise FSDPStateError(
            "argument 'module': expected a module that is no unit yet, got a unit "
            f"({type(module).__name__}). Wrap or shard each module once; do so with its parent to "
            "make one more unit.",
            see="wrapped-twice",
        )
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        raise without_forward(module)
    if not isinstance(module, nn.Module):
        raise FSDPTypeError(
            f"argument 'module': expected a torch.nn.Module, got {type(module)!r}. Pass the model "
            "itself."
        )


def without_forward(module: object) -> FSDPTypeError:
    """Error for a container, whose forward is never called."""
    return FSDPTypeError(
        f"argument 'module': expected a module with a forward, got {type(module).__name__}. Wrap "
        "or shard the modules in it, one by one."
    )


def warn_of_containers(owned: Mapping[nn.Module, Sized]) -> None:
    """Warn of containers that are units with parameters: no forward would unshard them."""
    for module, parameters in owned.items():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(parameters):
            warnings.warn(
                f"a {type(module).__name__} of {len(module)} modules is a unit, but has no forward "
                "that would unshard its parameters: let the modules in it be units",
                stacklevel=4,
            )


MAX_PADDING = 0.25
"""Share of a unit's bytes that padding may take without a warning."""
FREE_PADDING_BYTES = 1 << 20
"""Padding below this size never warns."""


def warn_of_padding(params: Mapping[str, OriginalParameter], config: UnitConfig) -> None:
    """Warn if padding makes a unit much larger, as parameters with few rows do."""
    if not config.is_sharded or not params:
        return
    num_shards = config.groups.shard.size()
    is_divided = config.groups.hierarchy is None
    padding = {fqn: _padding_bytes(p, num_shards, is_divided) for fqn, p in params.items()}
    total = sum(padding.values())
    whole = sum(local_of(original.param).nbytes for original in params.values())
    if total <= max(MAX_PADDING * whole, FREE_PADDING_BYTES):
        return
    fqn = max(padding, key=lambda fqn: padding[fqn])
    shape = tuple(local_of(params[fqn].param).shape)
    warnings.warn(
        f"padding makes a unit {1 + total / whole:.2f} times as large (by {total >> 20} MiB), "
        f"mostly for parameter '{fqn}': {num_shards} ranks share the {(*shape, 1)[0]} rows of "
        f"its shape {shape}. Shard it along another dimension (fully_shard's shard_placement_fn), "
        "over fewer ranks (HYBRID_SHARD, a 2-D mesh), or make it several parameters",
        stacklevel=5,
    )


def _padding_bytes(original: OriginalParameter, num_shards: int, is_divided: bool) -> int:
    """Bytes of padding in all shards of a parameter.

    If rows do not divide by ``num_shards`` they are padded, or replicated unless ``is_divided``.
    """
    param = local_of(original.param)
    size = param.shape[original.dim] if param.dim() else 1
    if not param.dim() or (not is_divided and size % num_shards):
        return (num_shards - 1) * param.nbytes
    padded = num_shards * size_per_rank(size, num_shards) * (param.numel() // max(1, size))
    return (padded - param.numel()) * param.element_size()


def check_whole_units(root: nn.Module) -> None:
    """Raise if only some modules of a multi-module unit are below ``root``."""
    below = set(root.modules())
    for unit in units_in(root):
        if not below.issuperset(unit.modules):
            raise FSDPValueError(
                f"a {type(root).__name__} that becomes a unit: expected all modules of a list that "
                f"fully_shard was given, got {sum(m in below for m in unit.modules)} of "
                f"{len(unit.modules)}. Give fully_shard modules of the same model in one list."
            )


def check_inference(module: nn.Module) -> None:
    """Raise inside ``torch.inference_mode()``, and for parameters that were made there.

    The unit writes to its tensors in place later, which inference tensors forbid.
    """
    made = next((fqn for fqn, param in module.named_parameters() if param.is_inference()), None)
    if made is not None or torch.is_inference_mode_enabled():
        where = f"a {type(module).__name__}" if made is None else f"parameter '{made}'"
        got = "a call inside it" if made is None else "an inference tensor"
        raise FSDPStateError(
            f"{where}: expected a module that is made and wrapped outside torch.inference_mode(), "
            f"got {got}. Make and wrap the model first; call it under torch.inference_mode() then."
        )


def refuse_full_precision_in_eval(precision: MixedPrecision | None) -> None:
    """Raise if FSDP1's environment variable asks for evaluation without ``mixed_precision``."""
    if precision is not None and os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL") == "1":
        raise UnsupportedError(
            "environment variable FSDP_USE_FULL_PREC_IN_EVAL: expected it to be unset, got 1. "
            "Evaluate in the precision of the training, or load the state dict into a model "
            "without mixed_precision."
        )


def effective_strategy(strategy: ShardingStrategy, groups: Groups) -> ShardingStrategy:
    """Strategy in force: NO_SHARD in a group of one rank."""
    return ShardingStrategy.NO_SHARD if groups.shard.size() == 1 else strategy


def warn_of_one_rank(strategy: ShardingStrategy, groups: Groups) -> None:
    """Warn if the strategy would shard over one rank."""
    if effective_strategy(strategy, groups) is not strategy:
        warnings.warn(
            f"the process group has one rank: NO_SHARD in place of {strategy.name}", stacklevel=4
        )


def offloads(cpu_offload: CPUOffload, device: torch.device) -> bool:
    """Whether shards and gradients are kept in host memory while another device computes."""
    wanted = cpu_offload.offload_params and device.type != "cpu"
    if wanted and not cpu_offload._pin_memory:
        raise UnsupportedError(
            "argument 'offload_policy': expected CPUOffloadPolicy(pin_memory=True), got "
            "pin_memory=False. Leave it out: copies between an accelerator and host memory that is "
            "not pinned would stop the host, so shards are pinned always."
        )
    return wanted


def warn_of_cpu_start(
    module: nn.Module, group: dist.ProcessGroup, device_id: torch.device | None
) -> None:
    """Warn if the module is on the CPU, the group cannot use it, and no ``device_id`` is given."""
    first = next(module.parameters(), None)
    if device_id is not None or first is None or first.device.type != "cpu":
        return
    if not serves_cpu(group):
        warnings.warn(
            "the module is on the CPU and the process group serves no CPU: pass device_id, or "
            "move the module before its first forward",
            stacklevel=3,
        )


_PER_UNIT = (
    "sharding_strategy",
    "mixed_precision",
    "collective_precision",
    "backward_prefetch",
    "forward_prefetch",
)


def override(config: UnitConfig, overrides: Mapping[str, Any]) -> UnitConfig:
    """Configuration of a module chosen by a policy: the root's with the policy's changes."""
    changes: dict[str, Any] = {}
    for name, value in overrides.items():
        if name not in _PER_UNIT:
            raise UnsupportedError(
                "a policy's dict of constructor arguments: expected one of "
                f"{', '.join(_PER_UNIT)}, got '{name}'. Wrap that module by hand to give it other "
                "arguments."
            )
        changes[name] = converted(name, value)
    if "sharding_strategy" in changes:
        _check_dimensions(changes["sharding_strategy"], config.sharding_strategy)
        strategy = effective_strategy(changes["sharding_strategy"], config.groups)
        changes["sharding_strategy"] = strategy
    return replace(config, **changes)


def _check_dimensions(strategy: ShardingStrategy, root: ShardingStrategy) -> None:
    """Raise if a unit's strategy needs other dimensions of ranks than its root's."""
    is_alike = (strategy.is_hybrid, strategy.is_hierarchical) == (
        root.is_hybrid,
        root.is_hierarchical,
    )
    if not is_alike and strategy is not ShardingStrategy.NO_SHARD:
        raise FSDPValueError(
            "a policy's dict of constructor arguments: expected a strategy that goes with the "
            f"root's {root.name}, got {strategy.name}. Give hybrid strategies, or "
            "HIERARCHICAL_SHARD, to all units or to none; NO_SHARD goes with all."
        )


def input_dtype_of(unit: Unit, is_root: bool) -> torch.dtype | None:
    """Dtype that a unit casts its floating-point inputs to; ``None``: not cast."""
    precision = unit.config.mixed_precision
    if precision is None or precision.param_dtype is None:
        return None
    own = precision.cast_forward_inputs and bool(unit.flats)
    wanted = own or (is_root and precision.cast_root_forward_inputs)
    return precision.param_dtype if wanted else None


# -- fsdp2 arguments -------------------------------------------------------------------------------
# Translate FSDP2's arguments of ``fully_shard`` into the wrapper's arguments.


def strategy_for(
    strategy: ShardingStrategy | None, reshard_after_forward: object, mesh: DeviceMesh | None
) -> object | None:
    """Return the strategy that ``strategy`` or ``reshard_after_forward`` requests."""
    check_mesh(mesh, "mesh")
    is_hybrid = mesh is not None and mesh.ndim == 2
    if reshard_after_forward is None:
        return ShardingStrategy.HYBRID_SHARD if strategy is None and is_hybrid else strategy
    if strategy is not None or not isinstance(reshard_after_forward, int):
        raise FSDPValueError(
            "argument 'reshard_after_forward': expected True, False or None, and no strategy "
            f"beside it, got {reshard_after_forward!r} with strategy {strategy}. FULL_SHARD "
            "reshards after the forward, SHARD_GRAD_OP does not."
        )
    # The number 1 means that each rank keeps all parameters, like False. But True == 1.
    is_kept = reshard_after_forward is not True and reshard_after_forward in (False, 1)
    if is_hybrid:
        return ShardingStrategy.HYBRID_SHARD_ZERO2 if is_kept else ShardingStrategy.HYBRID_SHARD
    return ShardingStrategy.SHARD_GRAD_OP if is_kept else ShardingStrategy.FULL_SHARD


def ranks_after_forward(
    reshard_after_forward: object, mesh: DeviceMesh | None, group: object
) -> int | None:
    """Number of ranks that share a unit between forward and backward, if the user gives one.

    Returns ``None`` where the strategy decides: all ranks, or this rank alone.
    """
    if isinstance(reshard_after_forward, bool) or not isinstance(reshard_after_forward, int):
        return None
    num_shards = dist.get_world_size() if dist.is_initialized() else 1
    if mesh is not None:
        num_shards = mesh.size(mesh.ndim - 1)
    elif isinstance(group, dist.ProcessGroup):
        num_shards = group.size()
    if reshard_after_forward < 1 or num_shards % reshard_after_forward:
        raise FSDPValueError(
            "argument 'reshard_after_forward': expected True, False, None or a divisor of the "
            f"number of shards, {num_shards}, got {reshard_after_forward}. Pass the number of "
            "ranks of a node, say, among which backwards gather."
        )
    return None if reshard_after_forward in (1, num_shards) else reshard_after_forward


def precision_for(mixed_precision: object, mp_policy: object) -> object | None:
    """Return ``mixed_precision``, or ``mp_policy`` as a ``MixedPrecision``.

    Unlike FSDP1's, a ``MixedPrecisionPolicy`` exempts no class of modules, and the root casts its
    inputs as all units do.
    """
    if mp_policy is None:
        return mixed_precision
    if mixed_precision is not None or not isinstance(mp_policy, fsdp.MixedPrecisionPolicy):
        raise FSDPTypeError(
            "argument 'mp_policy': expected a MixedPrecisionPolicy, and no mixed_precision beside "
            f"it, got {mp_policy!r}. Pass one of the two."
        )
    return MixedPrecision(
        param_dtype=mp_policy.param_dtype,
        reduce_dtype=mp_policy.reduce_dtype,
        cast_forward_inputs=mp_policy.cast_forward_inputs,
        cast_root_forward_inputs=mp_policy.cast_forward_inputs,
        _module_classes_to_ignore=(),
        output_dtype=mp_policy.output_dtype,
        # Not in torch 2.11, the oldest version supported.
        _param_dtype_override_fn=getattr(mp_policy, "param_dtype_override_fn", None),
    )


def keeps_dtype(param: nn.Parameter, fqn: str, precision: MixedPrecision | None) -> bool:
    """Whether ``param_dtype_override_fn`` lets a parameter compute in its own dtype."""
    if precision is None or precision._param_dtype_override_fn is None:
        return False
    wanted = precision._param_dtype_override_fn(param)
    if wanted in (None, precision.param_dtype):
        return False
    if wanted != param.dtype:
        raise FSDPValueError(
            f"param_dtype_override_fn of parameter '{fqn}': expected None, {precision.param_dtype} "
            f"or the parameter's own {param.dtype}, got {wanted!r}. Let the function return one of "
            "these."
        )
    return True


def offload_for(cpu_offload: CPUOffload | None, offload_policy: object | None) -> object | None:
    """Return ``cpu_offload``, or FSDP2's ``offload_policy`` as a ``CPUOffload``."""
    if offload_policy is None:
        return cpu_offload
    if cpu_offload is not None or not isinstance(offload_policy, fsdp.OffloadPolicy):
        raise FSDPTypeError(
            "argument 'offload_policy': expected an OffloadPolicy or CPUOffloadPolicy, and no "
            f"cpu_offload beside it, got {offload_policy!r}. Pass one of the two."
        )
    if isinstance(offload_policy, fsdp.CPUOffloadPolicy):
        return CPUOffload(True, offload_policy.pin_memory)
    return CPUOffload()


def dim_of(placement: object, param: nn.Parameter, fqn: str, num_shards: int) -> int:
    """Dimension along which a parameter is sharded among ``num_shards`` ranks.

    ``placement`` is the result of ``shard_placement_fn`` for the parameter.
    """
    if placement is None or placement == Shard(0):
        return 0
    shape = local_of(param).shape
    if type(placement) is not Shard:
        raise UnsupportedError(
            f"shard_placement_fn of parameter '{fqn}': expected None or Shard of a dimension, got "
            f"{placement!r}. Return one of them; parameters that stay whole are ignored_params."
        )
    dim = placement.dim + (len(shape) if placement.dim < 0 else 0)
    if not 0 <= dim < len(shape) or (dim and shape[dim] % num_shards):
        raise UnsupportedError(
            f"shard_placement_fn of parameter '{fqn}': expected None, Shard(0), or Shard of a "
            f"dimension of {tuple(shape)} that {num_shards} ranks divide, got {placement!r}. "
            "Return None, or Shard of a dimension that divides; or shard over fewer ranks."
        )
    return dim


def outermost_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules of a list that are not inside another module of the list, each once."""
    given = list(dict.fromkeys(modules))
    inner = {below for module in given for below in module.modules() if below is not module}
    return [module for module in given if module not in inner]
