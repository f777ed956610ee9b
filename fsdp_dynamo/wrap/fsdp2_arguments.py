"""Arguments of ``fully_shard`` that are FSDP2's, as those of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_dynamo.config import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_dynamo.core.dtensors import local_of
from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError, UnsupportedError

PlacementFn = Callable[[nn.Parameter], object]


def strategy_for(
    strategy: ShardingStrategy | None, reshard_after_forward: object, mesh: DeviceMesh | None
) -> object | None:
    """The strategy requested by any of the arguments of ``fully_shard``."""
    if reshard_after_forward is None:
        if strategy is None and mesh is not None and mesh.ndim == 2:
            return ShardingStrategy.HYBRID_SHARD
        return strategy
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        reshard_after_forward = reshard_after_forward != 1
    if strategy is not None or not isinstance(reshard_after_forward, bool):
        raise FSDPValueError(
            expected="True, False or None, and no strategy beside it",
            got=f"{reshard_after_forward!r} with strategy {strategy}",
            where="argument 'reshard_after_forward'",
            fix="FULL_SHARD reshards after the forward, SHARD_GRAD_OP does not.",
        )
    if mesh is not None and mesh.ndim == 2:
        hybrid = (ShardingStrategy.HYBRID_SHARD_ZERO2, ShardingStrategy.HYBRID_SHARD)
        return hybrid[reshard_after_forward]
    return (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD)[reshard_after_forward]


def ranks_after_forward(
    reshard_after_forward: object, mesh: DeviceMesh | None, group: object
) -> int | None:
    """The number of ranks that hold a unit between its forward and its backward.

    ``None``: all or none, as the strategy says.

    Raises:
        FSDPValueError: it does not divide the number of shards.
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
            expected=f"True, False, None or a divisor of the number of shards, {num_shards}",
            got=str(reshard_after_forward),
            where="argument 'reshard_after_forward'",
            fix="Pass the number of ranks of a node, say, among which backwards gather.",
        )
    return None if reshard_after_forward in (1, num_shards) else reshard_after_forward


def precision_for(mixed_precision: object, mp_policy: object) -> object | None:
    """The precision requested of ``fully_shard``, by our argument or by upstream's.

    ``mp_policy`` is a ``torch.distributed.fsdp.MixedPrecisionPolicy``: no module keeps its own
    precision, and all units treat their inputs alike.
    """
    if mp_policy is None:
        return mixed_precision
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if mixed_precision is not None or not all(hasattr(mp_policy, name) for name in names):
        raise FSDPTypeError(
            expected="a MixedPrecisionPolicy, and no mixed_precision beside it",
            got=repr(mp_policy),
            where="argument 'mp_policy'",
            fix="Pass one of the two.",
        )
    param_dtype, reduce_dtype, output_dtype, casts = (getattr(mp_policy, n) for n in names)
    return MixedPrecision(
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=casts,
        cast_root_forward_inputs=casts,
        _module_classes_to_ignore=(),
        output_dtype=output_dtype,
        _param_dtype_override_fn=getattr(mp_policy, "param_dtype_override_fn", None),
    )


def keeps_dtype(param: nn.Parameter, fqn: str, precision: MixedPrecision | None) -> bool:
    """Whether a ``MixedPrecisionPolicy`` lets a parameter compute in its own dtype.

    Raises:
        FSDPValueError: its function gives a dtype that is neither that nor ``param_dtype``.
    """
    if precision is None or precision._param_dtype_override_fn is None:
        return False
    wanted = precision._param_dtype_override_fn(param)
    if wanted in (None, precision.param_dtype):
        return False
    if wanted != param.dtype:
        raise FSDPValueError(
            expected=f"None, {precision.param_dtype} or the parameter's own {param.dtype}",
            got=repr(wanted),
            where=f"param_dtype_override_fn of parameter '{fqn}'",
            fix="Let the function return one of these.",
        )
    return True


def offload_for(cpu_offload: CPUOffload | None, offload_policy: object | None) -> object | None:
    """The offload requested, by our argument or by upstream's ``OffloadPolicy``."""
    if offload_policy is None:
        return cpu_offload
    kind = type(offload_policy).__name__
    if cpu_offload is not None or kind not in ("OffloadPolicy", "CPUOffloadPolicy"):
        raise FSDPTypeError(
            expected="an OffloadPolicy or CPUOffloadPolicy, and no cpu_offload beside it",
            got=repr(offload_policy),
            where="argument 'offload_policy'",
            fix="Pass one of the two.",
        )
    offloads = kind == "CPUOffloadPolicy"
    return CPUOffload(offloads, getattr(offload_policy, "pin_memory", True))


def dim_of(placement: object, param: nn.Parameter, fqn: str, num_shards: int) -> int:
    """The dimension along which a parameter is to be sharded.

    Args:
        placement: what the user's function says of it; ``None`` and ``Shard`` may come of it.
        param: that is to be sharded.
        fqn: of it.
        num_shards: ranks that share it.

    Raises:
        UnsupportedError: another placement, or a dimension but the first that does not divide.
    """
    if placement is None or placement == Shard(0):
        return 0
    shape = local_of(param).shape
    dim = placement.dim if type(placement) is Shard else len(shape)
    dim += len(shape) if dim < 0 else 0
    if not 0 <= dim < len(shape) or (dim and shape[dim] % num_shards):
        raise UnsupportedError(
            expected=f"None, Shard(0), or Shard of a dimension of {tuple(shape)} that {num_shards} "
            "ranks divide",
            got=repr(placement),
            where=f"shard_placement_fn of parameter '{fqn}'",
            fix="Return None, or Shard of a dimension that divides; or shard over fewer ranks.",
        )
    return dim


def outermost_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules of a list that are not inside another one of it, each once."""
    given = list(dict.fromkeys(modules))
    inner = {below for module in given for below in module.modules() if below is not module}
    return [module for module in given if module not in inner]
