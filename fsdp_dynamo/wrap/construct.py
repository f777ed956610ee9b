"""Shared constructor of ``FSDP`` and ``fully_shard``: check arguments, choose units, build them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

from fsdp_dynamo.api import Arguments, MixedPrecision, PlacementFn
from fsdp_dynamo.comm.exit_callbacks import register_exit_callback, wait_for_gloo_at_exit
from fsdp_dynamo.comm.process_groups import Groups, groups_of, make_side_group
from fsdp_dynamo.core.gather_hooks import check_gather_hooks, has_gather_hooks
from fsdp_dynamo.core.optimizers import watch_optimizers
from fsdp_dynamo.core.unit import Unit, UnitConfig
from fsdp_dynamo.eager.hooks import keep_module_precision
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.health.comparison import require_same
from fsdp_dynamo.health.flight_recorder import record_flight_by_default
from fsdp_dynamo.health.notices import announce_failure, link_groups
from fsdp_dynamo.health.periodic_comparison import compare_periodically
from fsdp_dynamo.health.run import begin_run, together
from fsdp_dynamo.module_tree import (
    WRAPPED,
    WRAPPER_NAMES,
    is_unit,
    join_fqn,
    plain_fqn,
    raw_named_modules,
)
from fsdp_dynamo.wrap import arguments, build
from fsdp_dynamo.wrap.arguments import (
    dim_of,
    effective_strategy,
    override,
    warn_of_cpu_start,
)
from fsdp_dynamo.wrap.build import Ignored, managed_modules
from fsdp_dynamo.wrap.deferred_init import InitialValues, device_for
from fsdp_dynamo.wrap_policy import Targets, run_policy


@dataclass(frozen=True)
class Constructed:
    """New units, sharded; modules are otherwise unchanged.

    Attributes:
        units: by their outermost module, the root's first.
        ignored: modules and parameters that the units do not manage.
    """

    units: dict[nn.Module, Unit]
    ignored: build.Ignored


def construct(
    module: nn.Module, given: Arguments, *, may_stay_on_meta: bool = False
) -> Constructed:
    """Check all arguments, then shard the parameters of ``module``.

    Args:
        module: module of the outermost new unit.
        given: the user's arguments.
        may_stay_on_meta: whether parameters without initial values stay on the meta device.

    Raises:
        FSDPError: a subclass, before anything is changed. If deferred initialization fails halfway,
            however, some units are sharded already and the model must be built anew.
    """
    arguments.check_whole_units(module)
    arguments.check_inference(module)
    arguments.refuse_full_precision_in_eval(given.mixed_precision)
    strategy = given.sharding_strategy
    is_given = dist.is_initialized()  # without a default group, groups_of creates one and warns
    groups = groups_of(
        given.process_group,
        given.device_mesh,
        given.reduction_group,
        is_hybrid=strategy.is_hybrid,
        is_hierarchical=strategy.is_hierarchical,
    )
    if is_given:
        arguments.warn_of_one_rank(strategy, groups)
    device = device_for(module, groups.shard, given.device_id)
    offload = arguments.offloads(given.cpu_offload, device)
    warn_of_cpu_start(module, groups.shard, given.device_id)
    begin_run(groups.all, device)
    link_groups(groups.communicators)
    for group in groups.communicators:
        make_side_group(group, device)
        compare_periodically(group, device)
    wait_for_gloo_at_exit()
    register_exit_callback(announce_failure)
    record_flight_by_default()
    kept = {**given.for_units(), "sharding_strategy": effective_strategy(strategy, groups)}
    config = UnitConfig(
        groups=groups,
        offload=offload,
        # The shards of a hierarchy have another order than the ranks of a mesh.
        mesh=None if groups.hierarchy else given.device_mesh,
        **kept,
    )
    sources = groups if given.sync_module_states else None
    with together(sources.all if sources else (), device, "checks before sync_module_states"):
        ignored = build.collect_ignored(module, given.ignored_modules, given.ignored_states)
        chosen = choose_units(module, given.auto_wrap_policy, ignored, config)
        if given.device_id is not None:
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        managed = build.managed_modules(module, ignored)
        values = InitialValues(managed, given.param_init_fn, device, sources, may_stay_on_meta)
        planned = build.plan_units(module, list(chosen.configs), ignored, chosen.config_of, values)
        _place_parameters(planned, chosen, given.shard_placement_fn)
    units = build.build_units(planned, chosen.config_of, values)
    keep_full_precision(module, chosen)
    watch_optimizers([flat for unit in units.values() for flat in unit.flats])
    return Constructed(units, ignored)


def _place_parameters(
    planned: build.Planned, chosen: Chosen, placement_fn: PlacementFn | None
) -> None:
    """Set the dimension along which each parameter is sharded, and check it."""
    placements = _placements(placement_fn, planned, chosen.root.groups)
    for owner, originals in planned.owned.items():
        config = chosen.config_of(owner)
        num_shards = config.groups.shard.size() if config.is_sharded else 1
        params = {join_fqn(planned.paths[owner], one.fqn): one for one in originals}
        for fqn, original in params.items():
            original.dim = dim_of(placements.get(fqn), original.param, fqn, num_shards)
            arguments.check_wire_formats(config, fqn, original.param)
            if has_gather_hooks(original.param):
                by_rows = original.dim == 0 and config.is_sharded
                check_gather_hooks(original.param, fqn, config.groups, by_rows=by_rows)
        arguments.warn_of_padding(params, config)
    arguments.warn_of_containers(planned.owned)


def _placements(
    placement_fn: PlacementFn | None, planned: build.Planned, groups: Groups
) -> dict[str, object]:
    """Results of the user's ``shard_placement_fn`` by FQN, compared between ranks."""
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


# -- unit choice -----------------------------------------------------------------------------------
# Modules below the root become units if a policy chooses them, or if they keep full precision.
#
# Under mixed precision some classes (``_module_classes_to_ignore``: batch norms) compute in their
# own dtype. With a policy such modules are units of their own, as in FSDP1. Without a policy they
# stay in their unit, but have a flat parameter of their own (``wrap/build.py``).


@dataclass
class Chosen:
    """Configurations of the units.

    Attributes:
        root: the root's.
        configs: those of the units below it, by module.
        kept: modules that mixed precision leaves alone.
    """

    root: UnitConfig
    configs: dict[nn.Module, UnitConfig] = field(default_factory=dict)
    kept: set[nn.Module] = field(default_factory=set)

    def config_of(self, owner: nn.Module) -> UnitConfig:
        """Configuration of the unit whose outermost module is ``owner``."""
        return self.configs.get(owner, self.root)


def choose_units(
    root: nn.Module, policy: object | None, ignored: Ignored, config: UnitConfig
) -> Chosen:
    """Choose the units below ``root``; changes nothing."""
    if policy is None:
        return Chosen(config)
    found = run_policy(policy, root, ignored.modules, ignored.parameters)
    _refuse_wrapped(root, found)
    free = {module for _, module in managed_modules(root, ignored)}
    configs = {m: override(config, changes) for m, changes in found.items() if m in free}
    kept = list(_full_precision_modules(root, ignored, config.mixed_precision))
    if kept:
        names = ", ".join(sorted({type(module).__name__ for module in kept}))
        warnings.warn(
            f"mixed precision and auto_wrap_policy: modules of class {names} become units of their "
            "own in full precision",
            stacklevel=5,
        )
    for module in kept:
        configs[module] = replace(configs.get(module, config), mixed_precision=None)
    return Chosen(config, configs, set(kept))


def _refuse_wrapped(root: nn.Module, found: Targets) -> None:
    """Raise if a policy chose a unit, or a module inside a unit."""
    for fqn, module in raw_named_modules(root):
        if module in found and (is_unit(module) or WRAPPED in fqn.split(".")):
            raise FSDPValueError(
                f"argument 'auto_wrap_policy', module '{plain_fqn(fqn)}': expected a policy that "
                f"chooses modules in no unit, got a {type(module).__name__} that is wrapped "
                "already. Wrap by policy alone, or leave what you wrap by hand out of the policy.",
                see="wrapped-twice",
            )


def _full_precision_modules(
    root: nn.Module, ignored: Ignored, precision: MixedPrecision | None
) -> Iterator[nn.Module]:
    """Modules that mixed precision leaves alone.

    Modules inside checkpoint wrappers and compiled modules are left out: these run as a whole.
    """
    if precision is None:
        return
    classes = tuple(precision._module_classes_to_ignore)

    def enters(module: nn.Module) -> bool:
        return module not in ignored.modules and not is_unit(module)

    for fqn, module in raw_named_modules(root, enters):
        is_inside = not WRAPPER_NAMES.isdisjoint(fqn.split("."))
        if isinstance(module, classes) and module is not root and not is_inside:
            yield module


def keep_full_precision(root: nn.Module, chosen: Chosen) -> None:
    """Make units in full precision cast between their dtype and that of the unit around them."""
    missing = set(chosen.kept)

    def visit(module: nn.Module, around: MixedPrecision | None) -> None:
        for child in module.children():
            if child in missing and around is not None:
                missing.remove(child)
                keep_module_precision(child, _own_dtype(child))
            if not is_unit(child):
                inside = chosen.configs.get(child)
                visit(child, around if inside is None else inside.mixed_precision)

    visit(root, chosen.root.mixed_precision)


def _own_dtype(module: nn.Module) -> torch.dtype:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return dtypes[0] if dtypes else torch.float32
