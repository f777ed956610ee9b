"""From a module and the user's arguments to units, for the wrapper and for ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.agreement.failure_propagation import announce_failure, link_groups
from fsdp_dynamo.agreement.flight_recorder import record_flight_by_default
from fsdp_dynamo.agreement.run import begin_run, together
from fsdp_dynamo.comm.exit_callbacks import register_exit_callback
from fsdp_dynamo.comm.process_groups import Groups, groups_of
from fsdp_dynamo.config import coerce_mixed_precision
from fsdp_dynamo.core.optimizers import watch_optimizers
from fsdp_dynamo.core.unit import Unit, UnitConfig
from fsdp_dynamo.wrap import arguments, build
from fsdp_dynamo.wrap.arguments import (
    effective_strategy,
    override,
    strategy_of,
    warn_of_cpu_start,
)
from fsdp_dynamo.wrap.initial_values import InitialValues, device_for
from fsdp_dynamo.wrap_policy import run_policy


@dataclass(frozen=True)
class Arguments:
    """The user's arguments, unchecked; ``FullyShardedDataParallel`` documents each."""

    process_group: object | None
    sharding_strategy: object | None
    cpu_offload: object | None
    auto_wrap_policy: object | None
    backward_prefetch: object | None
    mixed_precision: object | None
    ignored_modules: Iterable[object] | None
    ignored_states: Iterable[object] | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | str | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool | None
    device_mesh: DeviceMesh | None
    reduction_group: dist.ProcessGroup | None
    limit_all_gathers: bool = True


@dataclass(frozen=True)
class Constructed:
    """New units, already sharded; modules are not changed in any other respect.

    Attributes:
        units: by their outermost module, the root's first.
        ignored: what was left alone.
    """

    units: dict[nn.Module, Unit]
    ignored: build.Ignored


def construct(module: nn.Module, given: Arguments) -> Constructed:
    """Check all arguments, then shard the parameters of ``module`` and of what a policy finds.

    Args:
        module: the root of the new units.
        given: the user's arguments.

    Raises:
        FSDPError: one of its subclasses, before anything is changed.
    """
    strategy = strategy_of(given.sharding_strategy)
    groups = groups_of(
        given.process_group,
        given.device_mesh,
        given.reduction_group,
        is_hybrid=strategy.is_hybrid,
    )
    arguments.check_init_fn(given.param_init_fn)
    device_id = arguments.device_of(given.device_id)
    device = device_for(module, groups.shard, device_id)
    cpu_offload = arguments.cpu_offload_of(given.cpu_offload)
    warn_of_cpu_start(module, groups.shard, device_id)
    begin_run(groups.all, device)
    link_groups((*groups.all, groups.reduce))
    register_exit_callback(announce_failure)
    record_flight_by_default()
    config = UnitConfig(
        groups=groups,
        strategy=effective_strategy(strategy, groups),
        precision=coerce_mixed_precision(given.mixed_precision),
        backward_prefetch=arguments.prefetch_of(given.backward_prefetch),
        forward_prefetch=given.forward_prefetch,
        offload=cpu_offload.offload_params and device.type != "cpu",
        cpu_offload=cpu_offload,
        limit_all_gathers=given.limit_all_gathers,
    )
    sources = groups if given.sync_module_states else None
    with together(sources.all if sources else (), device, "checks before sync_module_states"):
        planned, ignored, config_of, values = _plan(module, given, config, sources, device)
    units = build.build_units(planned, config_of, values)
    watch_optimizers(flat for unit in units.values() for flat in unit.flats)
    return Constructed(units, ignored)


def _plan(
    module: nn.Module,
    given: Arguments,
    config: UnitConfig,
    sources: Groups | None,
    device: torch.device,
) -> tuple[build.Planned, build.Ignored, Callable[[nn.Module], UnitConfig], InitialValues]:
    """What can be built, what is ignored, each unit's configuration, where values come from."""
    ignored = build.collect_ignored(module, given.ignored_modules, given.ignored_states)
    targets: dict[nn.Module, dict[str, Any]] = {}
    if given.auto_wrap_policy is not None:
        found = run_policy(given.auto_wrap_policy, module, ignored.modules, ignored.parameters)
        free = {m for _, m in build.managed_modules(module, ignored)}
        targets = {m: kw for m, kw in found.items() if m in free}  # none in a unit that is there
    configs = {m: override(config, overrides) for m, overrides in targets.items()}
    if given.device_id is not None:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    values = InitialValues(
        build.managed_modules(module, ignored),
        given.param_init_fn,
        device,
        sources,
    )

    def config_of(owner: nn.Module) -> UnitConfig:
        return configs.get(owner, config)

    planned = build.plan_units(module, list(targets), ignored, config_of, values)
    arguments.warn_of_containers(planned.owned)
    return planned, ignored, config_of, values
