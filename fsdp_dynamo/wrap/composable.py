"""fully_shard: make modules units in place, without a wrapper.

A module stays the same object and keeps its attributes, FQNs and hooks. Its class becomes a
subclass of ``FSDPModule`` and of its previous class. The unit's hooks run around the whole call and
the user's forward hooks inside, as with the wrapper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.api import (
    SHARDED_WITHOUT_COPIES,
    Arguments,
    BackwardPrefetch,
    CollectivePrecision,
    CPUOffload,
    MixedPrecision,
    PlacementFn,
    ShardingStrategy,
    UnitArguments,  # noqa: F401  # named in the docstring
    collect_arguments,
)
from fsdp_dynamo.comm.process_groups import part_of
from fsdp_dynamo.dynamo.private_api import compiled_as_one_graph, is_skipped
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.wrap.arguments import (
    check_module,
    offload_for,
    outermost_of,
    precision_for,
    ranks_after_forward,
    strategy_for,
    without_forward,
)
from fsdp_dynamo.wrap.build import CommonParent
from fsdp_dynamo.wrap.construct import construct
from fsdp_dynamo.wrap.fsdp2_methods import TorchFSDPModule, let_pipelines_end_backwards
from fsdp_dynamo.wrap.unit_module import UnitModule

ModuleT = TypeVar("ModuleT", bound=nn.Module | Sequence[nn.Module])


class FSDPModule(UnitModule, TorchFSDPModule):
    """Methods that ``fully_shard`` adds to a module.

    Also a subclass of ``torch.distributed.fsdp.FSDPModule``, so that ``isinstance`` checks of other
    libraries hold.
    """

    _fsdp_entry = "_call_impl"
    _call_impl = UnitModule._fsdp_run

    def _fsdp_inner(self) -> nn.Module:
        return self

    def _fsdp_body(self) -> Callable[..., Any]:
        body: Callable[..., Any] = super()._call_impl
        return body


def fully_shard(
    module: ModuleT,
    *,
    policy: object | None = None,
    mesh: DeviceMesh | None = None,
    process_group: object | None = None,
    strategy: ShardingStrategy | None = None,
    reshard_after_forward: bool | int | None = None,
    mixed_precision: MixedPrecision | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: object | None = None,
    offload_policy: object | None = None,
    cpu_offload: CPUOffload | None = None,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    forward_prefetch: bool | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    device_id: int | str | torch.device | None = None,
    sync_module_states: bool = False,
    reduction_group: dist.ProcessGroup | None = None,
    collective_precision: CollectivePrecision | None = None,
) -> ModuleT:
    """Make a module a unit in place; with a policy, submodules of it too.

    Without a policy call it innermost first: on every block, then on the model. The outermost
    module is the root. The order of its collectives is that of ``FullyShardedDataParallel``.
    Parameters, gradients and the values of ``state_dict()`` are torch's DTensors, placed as
    FSDP2's. Make optimizers afterwards. Parameters on the meta device stay there until
    ``to_empty()`` or loading, unless ``param_init_fn`` or ``sync_module_states`` give them values.

    Args:
        module: module to shard; a compiled module is sharded below its ``torch.compile``. The
            modules of a list become one unit, gathered before the first of them runs and resharded
            after the last; modules inside another one of the list belong to it.
        policy: ``auto_wrap_policy`` of ``Arguments``.
        mesh: ``device_mesh`` of ``Arguments``. A 2-D mesh (replicas, shards) implies a hybrid
            strategy.
        strategy: ``sharding_strategy`` of ``UnitArguments``.
        reshard_after_forward: in place of ``strategy``: ``False`` keeps parameters unsharded until
            the backward. A number of ranks, which divides the number of shards: parameters stay
            sharded over so many ranks after the forward, and the backward gathers among them
            (eager and hooks mode).
        mp_policy: ``torch.distributed.fsdp.MixedPrecisionPolicy`` in place of ``mixed_precision``.
        offload_policy: ``OffloadPolicy`` or ``CPUOffloadPolicy`` of ``torch.distributed.fsdp`` in
            place of ``cpu_offload``.
        ignored_params: parameters that stay as they are.

    For the other arguments see ``Arguments`` and see ``UnitArguments``.

    Returns:
        ``module``; the class of each module is now a subclass of ``FSDPModule`` and of its previous
        class.

    Raises:
        FSDPError: one of its subclasses, before anything is changed.

    Source: ``torch.distributed.fsdp.fully_shard``; FSDP (arXiv:2304.11277).
    """
    given = collect_arguments(
        locals(),
        sharding_strategy=strategy_for(strategy, reshard_after_forward, mesh),
        mixed_precision=precision_for(mixed_precision, mp_policy),
        cpu_offload=offload_for(cpu_offload, offload_policy),
        auto_wrap_policy=policy,
        device_mesh=mesh,
        ignored_states=[*(ignored_states or ()), *(ignored_params or ())],
    )
    num_ranks = ranks_after_forward(reshard_after_forward, mesh, process_group)
    if isinstance(module, Sequence) and not isinstance(module, nn.Module):
        _check_list(module, policy)
        _shard(module, given, num_ranks)
    else:
        _shard([module], given, num_ranks)
    return module


def _target_of(module: nn.Module) -> nn.Module:
    """Return the module to shard; below a ``torch.compile``, the compiled module."""
    target: nn.Module = module
    if isinstance(module, torch._dynamo.OptimizedModule):
        target = module._orig_mod
    check_module(target)
    if isinstance(target, (nn.ModuleList, nn.ModuleDict)):
        raise without_forward(target)
    return target


def _check_list(modules: Sequence[nn.Module], policy: object) -> None:
    if not modules:
        problem = "expected modules that become one unit, got an empty list"
    elif policy is not None:
        problem = f"expected a list without a policy, got policy={policy!r}"
    else:
        return
    raise FSDPValueError(
        f"fully_shard: {problem}. Call fully_shard once for each module that a policy is for."
    )


def _shard(modules: Sequence[nn.Module], given: Arguments, num_ranks: int | None) -> None:
    """Make one unit of one or several modules."""
    targets = outermost_of(map(_target_of, modules))
    root = targets[0] if len(targets) == 1 else CommonParent(targets)
    made = construct(root, given, may_stay_on_meta=True)
    for unit in made.units.values():
        unit.state_dict_settings = SHARDED_WITHOUT_COPIES
        if num_ranks is not None:
            unit.settings.regathers_among = part_of(unit.config.groups.shard, num_ranks)
        for owner in unit.modules:
            owner.__class__ = _class_for(type(owner))  # type: ignore[arg-type]
            assert isinstance(owner, FSDPModule)
            owner._fsdp_setup(unit, made.ignored, may_compile=True)
            # An earlier module.compile() would bypass the hooks. Run its result inside them.
            owner._fsdp_compiled_before = owner.__dict__.pop("_compiled_call_impl", None)
            let_pipelines_end_backwards(owner)
    assert isinstance(targets[0], FSDPModule)
    targets[0]._fsdp_become_root()
    for module in modules:
        if isinstance(module, torch._dynamo.OptimizedModule):
            _keep_compiled(module)


def _keep_compiled(module: torch._dynamo.OptimizedModule) -> None:
    """Run a module that was compiled before as one graph, with the unit's hooks around it."""
    target = module._orig_mod
    if isinstance(target, FSDPModule):
        body = compiled_as_one_graph(module, target._fsdp_body(), target._fsdp_unit.shapes)
        if body is not None:
            target._fsdp_compiled_before = body
            module.forward = target.__call__


def replicate(module: ModuleT, **arguments: Any) -> ModuleT:
    """Make a module a unit whose parameters stay whole and whose gradients are averaged.

    Call it before ``fully_shard``. Below a module of ``fully_shard`` it is a nested unit.

    Args:
        module: module to replicate.
        arguments: arguments of ``fully_shard`` except ``strategy`` and ``reshard_after_forward``.

    Returns:
        The same module.

    Raises:
        FSDPError: see ``fully_shard``.
    """
    return fully_shard(module, strategy=ShardingStrategy.NO_SHARD, **arguments)


@cache
def _class_for(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the unit subclass of a module's class.

    There is one per class, since Dynamo's guards compare classes.
    """

    def new(_: type, *args: Any, **kwargs: Any) -> nn.Module:
        return cls(*args, **kwargs)  # ``type(module)(...)``, as nn.Sequential slices itself

    members = {"__new__": new, "__doc__": cls.__doc__, "__module__": cls.__module__}
    if is_skipped(cls.forward):
        members["forward"] = _compiled_forward(cls)
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def _compiled_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Wrap the forward of a class of torch.nn in a frame that Dynamo compiles.

    Dynamo skips torch.nn's own frames. It would compile its frame around the whole call instead,
    which all models of a process share, along with its recompile limit.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    # Dynamo remembers which sizes are dynamic by the name of the code object.
    forward.__code__ = forward.__code__.replace(co_name=f"{cls.__name__}_forward")
    return wraps(cls.forward)(forward)
