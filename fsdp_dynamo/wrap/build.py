"""Assign the parameters of a module tree to units, check them, and build the units."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed._composable.contract import (  # no public way to ask
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
    _get_registry,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fsdp_dynamo.api import MixedPrecision
from fsdp_dynamo.core.dtensors import check_parallel, refuse_tensor_hooks
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.gather_hooks import HookedFlatParameter, has_gather_hooks
from fsdp_dynamo.core.original_parameter import (
    REPLACED,
    OriginalParameter,
    mark_managed,
    owner_of,
)
from fsdp_dynamo.core.unit import Unit, UnitConfig
from fsdp_dynamo.eager.hooks import keep_module_precision
from fsdp_dynamo.errors import FSDPValueError, UnsupportedError
from fsdp_dynamo.module_tree import (
    WRAPPER_NAMES,
    UnitPaths,
    is_unit,
    join_fqn,
    plain_fqn,
    raw_named_modules,
)
from fsdp_dynamo.wrap.arguments import keeps_dtype
from fsdp_dynamo.wrap.deferred_init import InitialValues

_SPLIT_BYTES = 1 << 20
_TORCHS_UNITS = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)


@dataclass
class Ignored:
    """Modules and parameters that units do not manage."""

    modules: set[nn.Module] = field(default_factory=set)
    parameters: set[nn.Parameter] = field(default_factory=set)


@dataclass
class _Occurrence:
    """One place of a parameter in the tree.

    Attributes:
        chain: owners of units above it, outermost first.
    """

    module: nn.Module
    name: str
    fqn: str
    chain: tuple[nn.Module, ...]


def collect_ignored(
    root: nn.Module,
    ignored_modules: Iterable[object] | None,
    ignored_states: Iterable[object] | None,
) -> Ignored:
    """Collect what the two arguments ignore, subtrees of modules included.

    Also ignored: what nested units ignore, and modules that torch's own ``replicate`` manages.
    """
    result = Ignored()
    for item in [*(ignored_modules or ()), *(ignored_states or ())]:
        if isinstance(item, nn.Parameter):
            result.parameters.add(item)
        elif is_unit(item) or not isinstance(item, nn.Module):
            raise FSDPValueError(
                "argument 'ignored_modules' or 'ignored_states': expected modules that are no "
                f"units (or parameters in ignored_states), got {type(item)!r}. Ignore the module "
                "before it is wrapped, or do not wrap it."
            )
        else:
            if item is root:
                warnings.warn(
                    "ignored_modules names the wrapped module itself: nothing will be sharded",
                    stacklevel=3,
                )
            result.modules.update(item.modules())
    for module in root.modules():
        if module is not root and _is_replicated_by_torch(module):
            result.modules.update(module.modules())
    for module in result.modules:
        result.parameters.update(p for p in module._parameters.values() if p is not None)
    for module in root.modules():
        nested: Ignored | None = module.__dict__.get("_fsdp_ignored")
        if nested is not None:
            result.modules |= nested.modules
            result.parameters |= nested.parameters
    return result


def _is_replicated_by_torch(module: nn.Module) -> bool:
    """Whether torch's own composable ``replicate`` averages the gradients of this subtree."""
    return "replicate" in (_get_registry(module) or ())


def set_composable_state(module: nn.Module, api: Any, state: object) -> None:
    """Register a state of torch's composable function ``api`` on a module, as the function would.

    Other functions look for it: torch's ``replicate`` skips modules that ``fully_shard`` manages.
    """
    module.__dict__.setdefault(STATE_KEY, {})[api.__wrapped__] = state
    module.__dict__.setdefault(REGISTRY_KEY, {})[api.__name__] = RegistryItem()


class CommonParent(nn.Module):
    """Temporary parent of the modules that become one unit; not part of the user's model."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for position, module in enumerate(modules):
            self.add_module(str(position), module)


@dataclass(frozen=True)
class Planned:
    """Units to build, fully checked; nothing has been changed yet.

    Attributes:
        owned: parameters of each unit by its outermost module, the root's first.
        paths: FQN of each unit's module.
        late: ids of parameters that come after a nested unit in the walk over the tree.
    """

    owned: dict[nn.Module, list[OriginalParameter]]
    paths: dict[nn.Module, str]
    late: set[int]


def plan_units(
    root: nn.Module,
    targets: Sequence[nn.Module],
    ignored: Ignored,
    config_of: Callable[[nn.Module], UnitConfig],
    values: InitialValues,
) -> Planned:
    """Assign every parameter below ``root`` to a unit, and check it; changes nothing.

    A parameter that several modules hold belongs to the innermost unit that contains them all, so
    that it is unsharded before the first of them runs. ``targets`` are the modules below ``root``
    that become units.
    """
    owners = set(targets)
    places: dict[nn.Parameter, list[_Occurrence]] = {}
    paths: dict[nn.Module, str] = {root: ""}
    walk = _Walk(owners, ignored, paths)
    for occurrence, param in walk.below(root, "", (root,)):
        places.setdefault(param, []).append(occurrence)
    owned: dict[nn.Module, list[OriginalParameter]] = {m: [] for m in (root, *targets)}
    late: set[int] = set()
    for param, occurrences in places.items():
        owner = _innermost_common([o.chain for o in occurrences])
        prefix = paths[owner]
        sites = [(o.module, o.name, o.fqn[len(prefix) + 1 if prefix else 0 :]) for o in occurrences]
        original = OriginalParameter(param, sites[0][2], sites)
        owned[owner].append(original)
        if occurrences[0].fqn in walk.late:
            late.add(id(original))
    for owner, originals in owned.items():
        _check_devices(paths[owner], originals)
        for original in originals:
            fqn = join_fqn(paths[owner], original.fqn)
            _check_parameter(original.param, fqn)
            config = config_of(owner)
            check_parallel(original.param, fqn, config.groups.all, config.mesh)
            _check_embeddings(original, fqn)
            original.keeps_dtype = keeps_dtype(
                original.param, fqn, config_of(owner).mixed_precision
            )
    values.check([original for originals in owned.values() for original in originals])
    return Planned(owned, paths, late)


def build_units(
    planned: Planned, config_of: Callable[[nn.Module], UnitConfig], values: InitialValues
) -> dict[nn.Module, Unit]:
    """Build and shard all units; returns them by their outermost module."""
    owned = planned.owned
    for originals in owned.values():
        for original in originals:
            original.unwrap_dtensor()
            if has_gather_hooks(original.param):
                original.unwrap_subclass()
    built = {
        owner: _build_unit(owner, owned[owner], config_of(owner), planned.late, values.device)
        for owner in values.in_order_of_completion(owned)
    }
    for unit in built.values():
        for flat in unit.flats:
            flat.make_buffer()
    for owner, originals in owned.items():
        for original in originals:
            mark_managed(original.param, join_fqn(planned.paths[owner], original.fqn))
        _keep_own_precision(originals, config_of(owner).mixed_precision)
    return {owner: built[owner] for owner in owned}


class _Walk:
    """Depth-first walk over all places of parameters, without units that exist already.

    Attributes:
        late: FQNs of parameters that come after a nested unit of their owner.
    """

    def __init__(
        self,
        owners: set[nn.Module],
        ignored: Ignored,
        paths: dict[nn.Module, str],
    ) -> None:
        self._owners = owners
        self._ignored = ignored
        self._paths = paths
        self._seen: set[tuple[nn.Module, str]] = set()
        self._have_nested: set[nn.Module] = set()
        self.late: set[str] = set()

    def below(
        self, module: nn.Module, path: str, chain: tuple[nn.Module, ...]
    ) -> Iterator[tuple[_Occurrence, nn.Parameter]]:
        if isinstance(module, _TORCHS_UNITS) and not is_unit(module):
            raise FSDPValueError(
                f"module '{path}': expected modules that torch's own FSDP does not shard, got a "
                f"unit of torch's ({type(module).__name__}). Shard the whole model with one of the "
                "two, or pass the module in ignored_modules."
            )
        if module in self._owners:
            self._have_nested.add(chain[-1])
            chain = (*chain, module)
            self._paths.setdefault(module, path)
        for name, param in module._parameters.items():
            if param is not None and param not in self._ignored.parameters:
                fqn = join_fqn(path, name)
                if chain[-1] in self._have_nested:
                    self.late.add(fqn)
                yield _Occurrence(module, name, fqn, chain), param
        for name, child in module._modules.items():
            if child is None or child in self._ignored.modules:
                continue
            if is_unit(child):
                self._have_nested.add(chain[-1])
                continue
            child_path = path if name in WRAPPER_NAMES else join_fqn(path, name)
            if (child, child_path) in self._seen:
                continue
            self._seen.add((child, child_path))
            yield from self.below(child, child_path, chain)


def _innermost_common(chains: Sequence[tuple[nn.Module, ...]]) -> nn.Module:
    common = chains[0]
    for chain in chains[1:]:
        length = 0
        while length < min(len(common), len(chain)) and common[length] is chain[length]:
            length += 1
        common = common[:length]
    return common[-1]


def _check_parameter(param: nn.Parameter, fqn: str) -> None:
    owner = owner_of(param) or getattr(param, REPLACED, None)
    if owner is not None:
        raise FSDPValueError(
            f"parameter '{fqn}': expected a parameter that no unit holds yet, got one that is "
            f"tied to '{owner}' of a unit that was wrapped before. Make one unit of both modules: "
            "one auto_wrap_policy (the unit above both then owns the parameter), or "
            "fully_shard([one, other]). Or wrap only the module that holds both.",
            see="tied-to-a-unit-wrapped-before",
        )
    _check_is_plain(param, fqn)
    refuse_tensor_hooks(param, UnitPaths(("",)), fqn)


def _check_is_plain(param: nn.Parameter, fqn: str) -> None:
    """Raise for a tensor that is more than its elements: sharding would drop the rest."""
    kind = type(param)
    derived = issubclass(kind, nn.Parameter) and kind is not nn.Parameter
    if not (derived or is_traceable_wrapper_subclass(param)) or isinstance(param, DTensor):
        return
    if has_gather_hooks(param):
        return
    raise FSDPValueError(
        f"parameter '{fqn}': expected a plain tensor, which can be flattened and sharded, got a "
        f"{kind.__module__}.{kind.__qualname__} (quantised, perhaps). Freeze it, and leave it "
        "whole on every rank: ignored_states=[p for p in model.parameters() if isinstance(p, "
        f"{kind.__name__})]."
    )


def _check_embeddings(original: OriginalParameter, fqn: str) -> None:
    """Raise for an embedding that changes its weight in the forward, or has sparse gradients."""
    for module, _, _ in original.sites:
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        if module.max_norm is not None:
            expected, got = "max_norm=None", f"max_norm={module.max_norm}"
            fix = (
                "Leave max_norm out: it changes the unsharded weight, which is freed. Rescale rows "
                "between steps, in summon_full_params(), or look up rows and rescale these."
            )
        elif module.sparse and original.param.requires_grad:
            expected, got = "sparse=False", "sparse=True"
            fix = "Leave sparse out: gradients are reduced as dense tensors."
        else:
            continue
        raise UnsupportedError(
            f"parameter '{fqn}': expected an embedding with {expected}, got {got}. {fix}"
        )


def _check_devices(unit_fqn: str, originals: Sequence[OriginalParameter]) -> None:
    devices: dict[torch.device, str] = {}
    for original in originals:
        if not original.param.is_meta:
            devices.setdefault(original.param.device, original.fqn)
    if len(devices) > 1:
        listed = ", ".join(f"'{join_fqn(unit_fqn, f)}' on {d}" for d, f in devices.items())
        raise FSDPValueError(
            f"unit '{unit_fqn}': expected all parameters of a unit on one device, got {listed}. "
            "Move the module to one device first, or pass device_id."
        )


def _build_unit(
    module: nn.Module,
    originals: Sequence[OriginalParameter],
    config: UnitConfig,
    late: set[int],
    device: torch.device,
) -> Unit:
    precision = config.mixed_precision
    kept = _modules_in_own_precision(originals, precision)
    late = late if _is_worth_splitting(originals, late) else set()
    overridden = None if precision is None else replace(precision, param_dtype=None)
    groups: dict[tuple[torch.dtype, bool, int, bool, bool], list[OriginalParameter]] = {}
    for original in originals:
        param = original.param
        chosen = 1 if original.keeps_dtype else 0
        if original.sites[0][0] in kept:
            chosen = 2
        has_hooks = original.tensor_class is not None
        key = (param.dtype, param.requires_grad, chosen, id(original) in late, has_hooks)
        groups.setdefault(key, []).append(original)
    flats = [
        (HookedFlatParameter if has_hooks else FlatParameter)(
            members,
            config.groups,
            sharded_strategy=config.is_sharded,
            precision=(precision, overridden, None)[chosen],
            offload=config.offload,
            mesh=config.mesh,
            device=device,
            collective_precision=config.collective_precision,
        )
        for (_, _, chosen, _, has_hooks), members in groups.items()
    ]
    modules = [*module.children()] if isinstance(module, CommonParent) else [module]
    return Unit(modules, flats, config)


def _is_worth_splitting(originals: Sequence[OriginalParameter], late: set[int]) -> bool:
    """Whether parameters before and after nested units get flat parameters of their own.

    With a split, only the embedding's all-gather precedes the forward, and the head's gradient is
    reduced during the backward of the blocks. Small parameters are not worth a second launch.
    """
    numbers = [0, 0]
    for original in originals:
        param = original.param
        numbers[id(original) in late] += param.numel() * param.element_size()
    return min(numbers) >= _SPLIT_BYTES


def _modules_in_own_precision(
    originals: Sequence[OriginalParameter], precision: MixedPrecision | None
) -> dict[nn.Module, torch.dtype]:
    """Modules that mixed precision leaves alone, and the dtype that each computes in."""
    if precision is None or precision.param_dtype is None:
        return {}
    kept: dict[nn.Module, torch.dtype] = {}
    for original in originals:
        holder = original.sites[0][0]
        if isinstance(holder, tuple(precision._module_classes_to_ignore)):
            kept.setdefault(holder, original.param.dtype)
    return kept


def _keep_own_precision(
    originals: Sequence[OriginalParameter], precision: MixedPrecision | None
) -> None:
    """Make modules that mixed precision leaves alone cast their inputs and outputs."""
    for module, dtype in _modules_in_own_precision(originals, precision).items():
        keep_module_precision(module, dtype)


def cast_buffers(
    modules: Iterable[tuple[str, nn.Module]], precision: MixedPrecision | None
) -> dict[str, torch.dtype]:
    """Cast floating-point buffers to ``buffer_dtype``, except in modules with their own precision.

    Returns the previous dtypes of the buffers that were cast, by FQN.
    """
    dtypes: dict[str, torch.dtype] = {}
    if precision is None or precision.buffer_dtype is None:
        return dtypes
    for name, module in modules:
        if isinstance(module, tuple(precision._module_classes_to_ignore)):
            continue
        for buffer_name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if buffer.dtype != precision.buffer_dtype:
                dtypes[join_fqn(name, buffer_name)] = buffer.dtype
                module._buffers[buffer_name] = buffer.to(precision.buffer_dtype)
    return dtypes


def tag_for_dynamo(modules: Iterable[nn.Module], use_orig_params: bool) -> None:
    """Mark modules as managed, so that Dynamo never turns their parameters into constants.

    ``torch._dynamo.variables.builder`` reads these two attributes. Parameters of all modules are
    graph inputs anyway, except when Inductor prepares a graph for freezing.
    """
    for module in modules:
        module._is_fsdp_managed_module = True  # type: ignore[assignment]
        module._fsdp_use_orig_params = use_orig_params  # type: ignore[assignment]


def managed_modules_of(unit: Unit, ignored: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """Managed modules below all modules of a unit, with their names in the unit."""
    if len(unit.modules) == 1:
        yield from managed_modules(unit.modules[0], ignored)
        return
    for position, outer in enumerate(unit.modules):
        for name, module in managed_modules(outer, ignored):
            yield join_fqn(str(position), name), module


def managed_modules(
    root: nn.Module, ignored: Ignored, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """``root`` and the modules below it that are neither ignored nor in a nested unit.

    Modules have plain FQNs and come in the order of ``modules()``; once each, or once per place.
    """

    def enters(module: nn.Module) -> bool:
        return module not in ignored.modules and not is_unit(module)

    for name, module in raw_named_modules(root, enters, remove_duplicate):
        yield plain_fqn(name), module
