"""From a module and the user's arguments to units, for the wrapper and for ``fully_shard``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo.agreement.comparison import require_same
from fsdp_dynamo.agreement.failure_propagation import announce_failure, link_groups
from fsdp_dynamo.agreement.flight_recorder import record_flight_by_default
from fsdp_dynamo.agreement.run import begin_run, together
from fsdp_dynamo.comm.exit_callbacks import let_gloo_settle_at_exit, register_exit_callback
from fsdp_dynamo.comm.process_groups import Groups, groups_of
from fsdp_dynamo.config import (
    ShardingStrategy,
    StateDictSettings,
    coerce_collective_precision,
    coerce_mixed_precision,
)
from fsdp_dynamo.core.gather_hooks import check_gather_hooks, has_gather_hooks
from fsdp_dynamo.core.optimizers import watch_optimizers
from fsdp_dynamo.core.unit import Unit, UnitConfig
from fsdp_dynamo.module_tree import join_fqn
from fsdp_dynamo.wrap import arguments, build
from fsdp_dynamo.wrap.arguments import (
    effective_strategy,
    strategy_of,
    warn_of_cpu_start,
)
from fsdp_dynamo.wrap.fsdp2_arguments import PlacementFn, dim_of
from fsdp_dynamo.wrap.initial_values import InitialValues, device_for
from fsdp_dynamo.wrap.kept_units import check_budget, keep_within
from fsdp_dynamo.wrap.unit_choice import Chosen, choose_units, keep_full_precision

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Upstream's environment variable: ``1``: modules that evaluate leave ``MixedPrecision`` out."""


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
    shard_placement_fn: PlacementFn | None = None
    state_dict_settings: StateDictSettings = field(default_factory=StateDictSettings)
    may_lack_values: bool = False
    collective_precision: object | None = None
    unsharded_budget_bytes: int | None = None


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
        FSDPError: one of its subclasses, before anything is changed; but where an initialisation
            fails after units have their values, these are sharded: build the model anew.
    """
    arguments.check_whole_units(module)
    arguments.check_inference(module)
    strategy = strategy_of(given.sharding_strategy)
    check_budget(given.unsharded_budget_bytes, strategy)
    is_given = dist.is_initialized()  # otherwise, making a group warns
    groups = groups_of(
        given.process_group,
        given.device_mesh,
        given.reduction_group,
        is_hybrid=strategy.is_hybrid,
        is_hierarchical=strategy.is_hierarchical,
    )
    if is_given:
        arguments.warn_of_one_rank(strategy, groups)
    arguments.check_init_fn(given.param_init_fn)
    device_id = arguments.device_of(given.device_id)
    device = device_for(module, groups.shard, device_id)
    cpu_offload = arguments.cpu_offload_of(given.cpu_offload)
    warn_of_cpu_start(module, groups.shard, device_id)
    begin_run(groups.all, device)
    link_groups(groups.every)
    let_gloo_settle_at_exit()
    register_exit_callback(announce_failure)
    record_flight_by_default()
    mesh = None if groups.hierarchy else given.device_mesh  # whose order of shards is another one
    config = UnitConfig(
        groups=groups,
        strategy=effective_strategy(strategy, groups),
        precision=coerce_mixed_precision(given.mixed_precision),
        backward_prefetch=arguments.prefetch_of(given.backward_prefetch),
        forward_prefetch=given.forward_prefetch,
        offload=arguments.offloads(cpu_offload, device),
        cpu_offload=cpu_offload,
        limit_all_gathers=given.limit_all_gathers,
        full_precision_in_eval=os.environ.get(FULL_PRECISION_IN_EVAL) == "1",
        state_dict_settings=given.state_dict_settings,
        mesh=mesh,
        collective_precision=coerce_collective_precision(given.collective_precision),
    )
    sources = groups if given.sync_module_states else None
    with together(sources.all if sources else (), device, "checks before sync_module_states"):
        plan = _plan(module, given, config, sources, device)
    units = build.build_units(plan.planned, plan.config_of, plan.values)
    keep_full_precision(module, plan.chosen, config)
    keep_within(module, units, given.unsharded_budget_bytes)
    flats = [flat for unit in units.values() for flat in unit.flats]
    watch_optimizers(flats)
    return Constructed(units, plan.ignored)


@dataclass(frozen=True)
class _Plan:
    """What can be built, what is ignored, which modules are units, where values come from."""

    planned: build.Planned
    ignored: build.Ignored
    chosen: Chosen
    config: UnitConfig
    values: InitialValues

    def config_of(self, owner: nn.Module) -> UnitConfig:
        """The configuration of a unit."""
        return self.chosen.configs.get(owner, self.config)


def _placements(
    placement_fn: PlacementFn | None, planned: build.Planned, groups: Groups
) -> dict[str, object]:
    """What the user's function says of each parameter, by FQN: the same on all ranks."""
    if placement_fn is None:
        return {}
    placements = {
        join_fqn(planned.paths[owner], original.fqn): placement_fn(original.param)
        for owner, found in planned.owned.items()
        for original in found
    }
    answers = ", ".join(f"{placement!r} of '{fqn}'" for fqn, placement in placements.items())
    for group in groups.all:
        require_same(group, "placements of shard_placement_fn", answers)
    return placements


def _plan(
    module: nn.Module,
    given: Arguments,
    config: UnitConfig,
    sources: Groups | None,
    device: torch.device,
) -> _Plan:
    ignored = build.collect_ignored(module, given.ignored_modules, given.ignored_states)
    chosen = choose_units(module, given.auto_wrap_policy, ignored, config)
    if given.device_id is not None:
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    values = InitialValues(
        build.managed_modules(module, ignored),
        given.param_init_fn,
        device,
        sources,
        given.may_lack_values,
    )
    configs = chosen.configs
    planned = build.plan_units(
        module, list(configs), ignored, lambda owner: configs.get(owner, config), values
    )
    every = [(owner, original) for owner, found in planned.owned.items() for original in found]
    placements = _placements(given.shard_placement_fn, planned, config.groups)
    for owner, original in every:
        fqn = join_fqn(planned.paths[owner], original.fqn)
        own = configs.get(owner, config)
        num_shards = own.groups.shard.size() if own.strategy is not ShardingStrategy.NO_SHARD else 1
        original.dim = dim_of(placements.get(fqn), original.param, fqn, num_shards)
        arguments.check_travels(own, fqn, original.param)
        if has_gather_hooks(original.param):
            by_rows = original.dim == 0 and own.strategy is not ShardingStrategy.NO_SHARD
            check_gather_hooks(original.param, fqn, own.groups, by_rows=by_rows)
    arguments.warn_of_containers(planned.owned)
    for owner, found in planned.owned.items():
        params = {join_fqn(planned.paths[owner], one.fqn): one for one in found}
        given_config = configs.get(owner, config)
        arguments.warn_of_padding(params, given_config, given_config.groups.shard.size())
    return _Plan(planned, ignored, chosen, config, values)
