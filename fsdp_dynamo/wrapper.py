"""FullyShardedDataParallel: the module wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo import build, hooks, hooks_path, state_dict
from fsdp_dynamo.agreement import tell_each_other
from fsdp_dynamo.api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    coerce_enum,
    coerce_mixed_precision,
)
from fsdp_dynamo.arguments import (
    check_module,
    clamped,
    input_dtype_of,
    override,
    refuse_unsupported,
    strategy_of,
    warn_of_cpu_start,
)
from fsdp_dynamo.copying import deep_copy
from fsdp_dynamo.dynamo_glue import (
    GRAPH_WAY,
    LEAF_WAY,
    NO_BACKEND,
    active_backend_key,
    refuse_without_orig_params,
    which_way,
    with_own_code,
)
from fsdp_dynamo.flat_parameter import join_fqn
from fsdp_dynamo.graph_entry import mark_shard
from fsdp_dynamo.groups import groups_of
from fsdp_dynamo.registry import register
from fsdp_dynamo.schedule import Root
from fsdp_dynamo.starting_values import Values, device_for
from fsdp_dynamo.traced import TracedUnit, describe, traced_forward
from fsdp_dynamo.unit import Unit, UnitConfig
from fsdp_dynamo.user_methods import UserMethods
from fsdp_dynamo.wrap_policy import run_policy


class FullyShardedDataParallel(UserMethods):
    """Shards a module's parameters, gradients and optimizer state over the ranks.

    ``model = FullyShardedDataParallel(model, auto_wrap_policy=...)`` replaces the chosen
    submodules by wrappers in place and returns the outermost one. Each wrapper is one unit.
    It runs eagerly, under ``torch.compile(model)`` (hooks path) and under
    ``torch.compile(model, fullgraph=True, backend="fsdp_dynamo")`` (graph path).

    Args:
        module: the module to wrap. Its parameters stay the same objects; each becomes a 1-D
            view of this rank's part (``NO_SHARD``: a view in its original shape).
        process_group: ranks to shard over; the default group if not given. With a hybrid
            strategy a pair (shard group, replicate group); not given, each node is a replica.
        sharding_strategy: see ``ShardingStrategy``; one rank is always ``NO_SHARD``.
        cpu_offload: accepted on CPU, where it changes nothing; refused elsewhere.
        auto_wrap_policy: which submodules become units of their own.
        backward_prefetch: see ``BackwardPrefetch``; ``None`` prefetches nothing.
        mixed_precision: see ``MixedPrecision``.
        ignored_modules: modules that stay as they are.
        ignored_states: modules or parameters that stay as they are.
        param_init_fn: initialises modules that are on the meta device; called with each module
            that holds such tensors itself, in the order of ``modules()``, when they have storage.
            By default the modules' own ``reset_parameters()``.
        device_id: the device to move the module to before it is sharded.
        sync_module_states: broadcast rank 0's parameters and buffers first.
        forward_prefetch: issue the next unit's all-gather before the current unit's forward.
            ``None`` (default): on CPU only, whose host does not run ahead of the device.
        limit_all_gathers: accepted; at most one unit is gathered ahead in any case.
        use_orig_params: ``False`` is accepted in eager and refused under compile.
        device_mesh: a mesh in place of ``process_group``: 1-D, or with a hybrid strategy 2-D
            (replicas, shards).
        reduction_group: another process group of the ranks that shard, for the gradients: its
            reduce-scatters do not queue behind all-gathers in one communicator. By default the
            two share a group.

    Raises:
        FSDPError: one of its subclasses, before anything is changed. The message says what was
            expected, what came, where, and what to do.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: object | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        reduction_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_module(module, _is_unit)
        compile_context = None
        if isinstance(module, torch._dynamo.OptimizedModule):
            compile_context, module = module.dynamo_ctx, module._orig_mod
            check_module(module, _is_unit)
        strategy = strategy_of(sharding_strategy)
        groups = groups_of(
            process_group, device_mesh, reduction_group, is_hybrid=strategy.is_hybrid
        )
        refuse_unsupported(module, cpu_offload, device_id)
        warn_of_cpu_start(module, groups.shard, device_id)
        tell_each_other(groups.all)
        config = UnitConfig(
            groups=groups,
            strategy=clamped(strategy, groups),
            precision=coerce_mixed_precision(mixed_precision),
            backward_prefetch=None
            if backward_prefetch is None
            else coerce_enum(BackwardPrefetch, backward_prefetch, "backward_prefetch"),
            forward_prefetch=forward_prefetch,
        )
        ignored = build.collect_ignored(module, ignored_modules, ignored_states, _is_unit)
        targets: dict[nn.Module, dict[str, Any]] = {}
        if auto_wrap_policy is not None:
            found = run_policy(auto_wrap_policy, module, ignored.modules)
            targets = {m: kw for m, kw in found.items() if not _is_unit(m)}
        device = device_for(module, groups.shard, device_id)
        configs = {m: override(config, overrides) for m, overrides in targets.items()}
        if device_id is not None:
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
        values = Values(
            build.managed_modules(module, ignored, _is_unit),
            param_init_fn,
            device,
            groups if sync_module_states else None,
        )
        units = build.build_units(
            module, list(targets), ignored, lambda m: configs.get(m, config), _is_unit, values
        )
        _wrap_children(module, units, ignored, use_orig_params)
        self._setup(module, units[module], ignored, use_orig_params)
        self._cast_buffers()
        self._become_root()
        if compile_context is not None:
            self._compiled_call_impl = compile_context(self._call_impl)

    def _setup(
        self, module: nn.Module, unit: Unit, ignored: build.Ignored, use_orig_params: bool
    ) -> None:
        nn.Module.__init__(self)
        self.training = module.training
        self._unit = unit
        self._ignored = ignored
        self._root = Root([("", unit)])  # until the outermost wrapper takes over
        self._input_dtype: torch.dtype | None = None
        self._buffer_dtypes: dict[str, torch.dtype] = {}
        self._has_nested = False
        self._bodies: dict[int, Callable[..., Any]] = {}
        self._leaf_id = register(self)
        self._share_shards()
        self._modules[build.WRAPPED] = module
        self._use_orig_params = use_orig_params
        build.tag_for_dynamo([self], True)  # its forward is traced up to the refusal
        managed = build.managed_modules(module, ignored, _is_unit)
        build.tag_for_dynamo((m for _, m in managed), use_orig_params)
        self.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]

    def _become_root(self) -> None:
        """Take over the units of all wrappers below; the outermost wrapper is built last."""
        wrappers = [
            (build.plain_fqn(n), m) for n, m in build.raw_named_modules(self) if _is_unit(m)
        ]
        root = Root([(fqn, wrapper._unit) for fqn, wrapper in wrappers])
        for _, wrapper in wrappers:
            unit = wrapper._unit
            wrapper._root = root
            wrapper._input_dtype = input_dtype_of(unit, is_root=wrapper is self)
            wrapper.__dict__.pop("forward", None)
            wrapper._has_nested = sum(_is_unit(m) for _, m in build.raw_named_modules(wrapper)) > 1

        forward = with_own_code(type(self).forward)
        self.__dict__["forward"] = MethodType(forward, self)

    def _share_shards(self) -> None:
        """Hand the shards to the graph path, whose inputs they are."""
        self._shards = tuple(flat.sharded for flat in self._unit.flats)
        for flat in self._unit.flats:
            mark_shard(flat)

    def _cast_buffers(self) -> None:
        precision = self._unit.config.precision
        if precision is None or precision.buffer_dtype is None:
            return
        for name, module in build.raw_named_modules(self):
            if module in self._ignored.modules:
                continue
            for buffer_name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                if buffer.dtype != precision.buffer_dtype:
                    self._buffer_dtypes[join_fqn(name, buffer_name)] = buffer.dtype
                    module._buffers[buffer_name] = buffer.to(precision.buffer_dtype)

    # -- running -----------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters unsharded."""
        if torch.compiler.is_dynamo_compiling():
            if not self._use_orig_params:
                refuse_without_orig_params()
            way, key = which_way()
            if way == GRAPH_WAY:
                return self._graph_forward(args, kwargs)
            if way == LEAF_WAY:
                return hooks_path.call_as_leaf(self._leaf_id, args, kwargs)
            return self._hooked_forward(args, kwargs, key)
        if hooks_path.is_faking():
            return hooks_path.fake_forward(self, args, kwargs)
        key = active_backend_key()
        if key != NO_BACKEND and not self._use_orig_params:
            refuse_without_orig_params()
        return self._hooked_forward(args, kwargs, key)

    def _graph_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._modules["_fsdp_wrapped_module"]
        return traced_forward(self._leaf_id, self._shards, module, args, kwargs)

    def describe_for_trace(self) -> TracedUnit:
        """What the graph path's trace needs to know of this unit, as it is now."""
        unit = self._unit
        reshards = unit.config.strategy.reshards_after_forward and not self._is_outermost()
        return describe(unit, self._input_dtype, reshards)

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="a unit's hooks run eagerly, between compiled regions"
    )
    def _hooked_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], backend_key: int
    ) -> Any:
        with hooks_path.body_of(self, backend_key) as body:
            return hooks.run_unit(self._root, self._unit, body, args, kwargs, self._input_dtype)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        inner = self._modules[build.WRAPPED]
        assert inner is not None
        return inner

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped module are reachable through the wrapper."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == build.WRAPPED or build.WRAPPED not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self._modules[build.WRAPPED], name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    # -- conversions and copies ------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert (``.to()``, ``.half()``, ...): flat parameters first-class, views refreshed."""
        unit = self._unit
        unit.reshard("forward")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat in unit.flats:
            converted = fn(flat.sharded.detach())
            flat.convert(converted)
        self._share_shards()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A model of its own in the same process groups; compiled code is not copied."""
        self._root.recover()
        new = deep_copy(self, self._unit, memo, is_outermost=self._is_outermost())
        for flat in new._unit.flats:
            flat.point_originals_to_shard()
        build.mark_managed(new._unit.fqn, new._unit.originals())
        new._bodies = {}
        new._leaf_id = register(new)
        new._share_shards()
        if self._is_outermost():
            new.__dict__["forward"] = MethodType(with_own_code(type(new).forward), new)
        return new

    # -- names -----------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in ``nn.Module``, with plain FQNs; the wrapper and its module share one."""
        self._root.recover()
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield build.plain_fqn(name), module

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``, or only the outermost ones."""
        modules = [m for _, m in build.raw_named_modules(module)]
        found = [m for m in modules if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m._is_outermost()] if root_only else found

    def _is_outermost(self) -> bool:
        return self._root.units[0] is self._unit


def _is_unit(module: object) -> bool:
    return isinstance(module, FullyShardedDataParallel)


def _wrap_children(
    root: nn.Module, units: dict[nn.Module, Unit], ignored: build.Ignored, use_orig_params: bool
) -> None:
    """Put a wrapper in the place of every unit's module below ``root``, innermost first."""
    wrappers: dict[nn.Module, FullyShardedDataParallel] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            if child is None or _is_unit(child):
                continue
            if child not in wrappers:
                visit(child)
                if child in units:
                    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
                    wrapper._setup(child, units[child], ignored, use_orig_params)
                    wrappers[child] = wrapper
            if child in wrappers:
                module._modules[name] = wrappers[child]

    visit(root)


def _save_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    module._root.recover()
    state_dict.save_unit(module._unit, destination, prefix, module._is_outermost())
    state_dict.restore_buffer_dtypes(destination, prefix, module._buffer_dtypes)


def _load_hook(
    module: nn.Module,
    source: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: object,
) -> None:
    assert isinstance(module, FullyShardedDataParallel)
    module._unit.reshard("forward")
    assign = bool(local_metadata.get("assign_to_params_buffers", False))
    state_dict.load_unit(module._unit, source, prefix, assign)
