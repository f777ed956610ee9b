"""Base class of every module that is a unit: state, forward in each mode, copies, state dicts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from fsdp_dynamo import events, module_tree
from fsdp_dynamo.comm import wire_kernels
from fsdp_dynamo.core.accumulation import REDUCES
from fsdp_dynamo.core.module_parameters import LateParameterCheck
from fsdp_dynamo.core.optimizers import watch_optimizers
from fsdp_dynamo.core.original_parameter import OriginalParameter, mark_managed
from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.core.unit_modules import register
from fsdp_dynamo.dynamo.private_api import (
    GRAPH_MODE,
    LEAF_MODE,
    NO_BACKEND,
    active_backend_key,
    changes_python_state,
    guarded,
    is_first_call,
    is_graph_mode_active,
    never_compiled_itself,
    refuse_tracers,
    refuse_without_orig_params,
    traced_mode,
    tracer_error,
    with_own_code,
)
from fsdp_dynamo.dynamo.untraced import untraced
from fsdp_dynamo.eager import hooks
from fsdp_dynamo.eager.schedule import Root
from fsdp_dynamo.errors import FSDPStateError, UnsupportedError, unit_name
from fsdp_dynamo.graph_mode.gradient_routing import mark_shard, unreduced_input_of
from fsdp_dynamo.graph_mode.trace import Inputs, check_originals, traced_forward
from fsdp_dynamo.graph_mode.traced_unit import stand_in_for
from fsdp_dynamo.hooks_mode import leaves
from fsdp_dynamo.module_tree import UnitPaths
from fsdp_dynamo.pytree import is_plain
from fsdp_dynamo.state_dict import model
from fsdp_dynamo.wrap import build
from fsdp_dynamo.wrap.arguments import input_dtype_of
from fsdp_dynamo.wrap.user_methods import UserMethods

for _each in (events.begin_forward, events.end_forward):
    never_compiled_itself(_each)  # Dynamo would compile the callees of _fsdp_enter


class UnitModule(UserMethods):
    """Base class of the wrapper and of modules of ``fully_shard``.

    All attributes begin with ``_fsdp_``, since a module of ``fully_shard`` is the user's own.
    """

    _fsdp_entry: str
    """Name of the method that ``_fsdp_run`` implements: ``forward`` or ``_call_impl``."""

    def _fsdp_body(self) -> Callable[..., Any]:
        """Return the callable that runs between the unit's hooks."""
        raise NotImplementedError

    # -- becoming a unit -------------------------------------------------------------------------

    def _fsdp_setup(self, unit: Unit, ignored: build.Ignored, may_compile: bool) -> None:
        """Attach a unit to this module; ``_fsdp_become_root`` of the outermost one must follow."""
        self._fsdp_own_unit = unit
        self._fsdp_ignored = ignored
        self._fsdp_may_compile = may_compile
        self._fsdp_own_root = Root([(UnitPaths(("",) * len(unit.modules)), unit)])
        self._fsdp_graph_settings = unit.settings.in_graphs()
        self._fsdp_input_dtype = None
        self._fsdp_has_nested = False
        self._fsdp_runs_method = False  # True while a registered method runs
        self._fsdp_compiled_bodies: dict[int, Callable[..., Any]] = {}
        self._fsdp_compiled_before: Callable[..., Any] | None = None
        self._fsdp_loading: tuple[str, list[str]] | None = None  # key prefix, error messages
        self._fsdp_hook_tables: list[Mapping[int, Callable[..., Any]]] | None = None
        self._fsdp_last_key = NO_BACKEND
        self._fsdp_output_spec: Any = None
        self._fsdp_name = register(self)
        self._fsdp_gathered: dict[str, list[torch.Tensor]] | None = None
        self._fsdp_share_shards()
        managed = list(build.managed_modules(self._fsdp_inner(), ignored))
        self._fsdp_buffer_dtypes = build.cast_buffers(managed, unit.config.mixed_precision)
        build.tag_for_dynamo((m for _, m in managed), may_compile)
        self.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
        inner = self._fsdp_inner()
        inner.register_load_state_dict_post_hook(_loaded_hook)  # type: ignore[no-untyped-call]
        if inner is not self:
            inner.register_state_dict_post_hook(_inner_save_hook)  # type: ignore[no-untyped-call]
            inner.register_load_state_dict_pre_hook(_inner_load_hook)  # type: ignore[no-untyped-call]
        self._fsdp_link_inner()

    def _fsdp_link_inner(self) -> None:
        """Let the wrapped module find its wrapper, for state dicts of the wrapped module itself."""
        inner = self._fsdp_inner()
        if inner is not self:
            inner.__dict__[module_tree.WRAPPER] = weakref.ref(self)

    def _fsdp_become_root(self) -> None:
        """Make this module the root of all units below, whose roots until now are replaced."""
        own = self._fsdp_unit
        tree = self if len(own.modules) == 1 else build.CommonParent(own.modules)
        named: list[tuple[str, UnitModule]] = list(module_tree.unit_modules(tree))
        fqns = {module._fsdp_inner(): fqn for fqn, module in named}
        units = dict.fromkeys(module._fsdp_unit for _, module in named)
        root = Root([(UnitPaths(tuple([fqns[m] for m in unit.modules])), unit) for unit in units])
        gathered: dict[str, list[torch.Tensor]] | None = (
            {} if any(len(unit.modules) > 1 for unit in units) else None
        )
        for _, module in named:
            module._fsdp_own_root = root
            module._fsdp_gathered = gathered
            dtype = input_dtype_of(module._fsdp_unit, is_root=module._fsdp_unit is own)
            module._fsdp_input_dtype = dtype
            module.__dict__.pop(module._fsdp_entry, None)
            module.__dict__.pop("_fsdp_codes", None)
            module._fsdp_has_nested = len(list(module_tree.unit_modules(module))) > 1
            unit, ignored = module._fsdp_unit, module._fsdp_ignored
            if len(unit.modules) > 1:
                walk = partial(build.managed_modules_of, unit, ignored)
            else:  # includes parameters that a user attaches to the wrapper itself
                walk = partial(build.managed_modules, module, ignored)
            unit.late_parameters = LateParameterCheck(walk, ignored.parameters)
        wire_kernels.begin_noise()
        for _, module in named:
            if module._fsdp_unit is own:
                module._fsdp_give_own_code()

    def _fsdp_give_own_code(self) -> None:
        self._fsdp_codes = {REDUCES: with_own_code(getattr(type(self), self._fsdp_entry))}
        self.__dict__[self._fsdp_entry] = MethodType(UnitModule._fsdp_enter, self)

    def _fsdp_share_shards(self) -> None:
        """Collect this unit's inputs of compiled graphs: its shards and their stand-ins."""
        flats = self._fsdp_own_unit.flats
        self._fsdp_unreduced = tuple(unreduced_input_of(flat) for flat in flats)
        self._fsdp_graph_inputs = tuple(
            [(flat.sharded, stand_in_for(self, flat), None, None) for flat in flats]
        )
        self._fsdp_unit_key = str(id(self._fsdp_own_unit))
        splits = [original.parallel for original in self._fsdp_own_unit.originals()]
        self._fsdp_splits = tuple([(i, s) for i, s in enumerate(splits) if s is not None])
        for flat in flats:
            mark_shard(flat)

    # -- running ---------------------------------------------------------------------------------

    @never_compiled_itself
    def _fsdp_enter(self, *args: Any, **kwargs: Any) -> Any:
        """Run the outermost unit through the code object that belongs to the accumulation state.

        Dynamo limits graphs per code object. One code object for all states would need a graph for
        each combination of state, shapes and grad mode, and soon reach the limit.
        """
        run = getattr(type(self), self._fsdp_entry)
        if torch.compiler.is_dynamo_compiling():
            return run(self, *args, **kwargs)
        root = self._fsdp_own_root
        codes, state = self._fsdp_codes, root.accumulation.state_in_graphs()
        if state not in codes and is_graph_mode_active():
            codes[state] = with_own_code(run)
        around = events.begin_forward(root.accumulation.model)
        try:
            return codes.get(state, codes[REDUCES])(self, *args, **kwargs)
        finally:
            events.end_forward(around)

    def _fsdp_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's module with its parameters unsharded."""
        if torch.compiler.is_dynamo_compiling():
            if not self._fsdp_may_compile:
                refuse_without_orig_params()
            mode, key = traced_mode()
            if mode == GRAPH_MODE:
                check_originals(self._fsdp_name)
                return traced_forward(
                    self._fsdp_name,
                    self,
                    self._fsdp_inputs(),
                    self._fsdp_graph_settings,
                    self._fsdp_splits,
                    args,
                    kwargs,
                    self._fsdp_gathered,
                )
            if (
                mode == LEAF_MODE
                and is_plain((args, kwargs))  # the only containers that a graph can pass on
                and leaves.may_be_leaf(
                    self._fsdp_name, changes_python_state(), self._fsdp_own_root.trained
                )
            ):
                inner = self._fsdp_inner()
                flags = leaves.flags_of(self._fsdp_name)
                guarded(*[getattr(inner, flag) for flag in flags])
                return leaves.call_as_leaf(self._fsdp_name, args, kwargs)
            return self._fsdp_run_hooked(args, kwargs, key)
        if leaves.is_faking():
            return leaves.fake_forward(self, args, kwargs)
        key = active_backend_key()
        if key != NO_BACKEND and not self._fsdp_may_compile:
            refuse_without_orig_params()
        return self._fsdp_run_hooked(args, kwargs, key)

    def _fsdp_inputs(self) -> Inputs:
        """This unit's inputs of a compiled graph, by the state of accumulation (traced)."""
        accumulation = self._fsdp_own_root.accumulation
        inputs: Inputs = self._fsdp_graph_inputs
        if not torch.is_grad_enabled():
            return inputs
        if not accumulation.sync and not self._fsdp_own_unit.settings.reduces:
            return [(*t[:3], c) for t, c in zip(inputs, self._fsdp_unreduced)]  # noqa: B905  # traced
        # A unit that runs twice in a graph must add its sum of gradients once.
        if accumulation.has_sums and is_first_call(self._fsdp_unit_key):
            sums = [flat.grad_sum.total for flat in self._fsdp_own_unit.flats]
            return [(*t[:2], s, None) for t, s in zip(inputs, sums)]  # noqa: B905  # traced
        return inputs

    @untraced("a unit's hooks run eagerly, between compiled regions")
    def _fsdp_run_hooked(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], backend_key: int
    ) -> Any:
        root, unit = self._fsdp_own_root, self._fsdp_own_unit
        root.recover()
        # Already unsharded by a registered method that calls forward, or by summon_full_params().
        if self._fsdp_runs_method or (unit.has_whole_originals and not torch.is_grad_enabled()):
            return self._fsdp_body()(*args, **kwargs)
        with leaves.body_of(self, backend_key, recomputes=root.in_backward) as body:
            return hooks.run_unit(
                root, unit, self._fsdp_inner(), body, args, kwargs, self._fsdp_input_dtype
            )

    # -- conversions and copies ------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert shards and gradient sums (``.to()``, ``.half()``, ...); refresh the views."""
        unit = self._fsdp_unit
        unit.write_back()
        unit.reshard("forward")
        unit.drop_secondary()
        sums = [flat.grad_sum.take() for flat in unit.flats]
        attributes = [(o.param, dict(o.param.__dict__)) for o in unit.originals()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for param, kept in attributes:  # nn.Module swaps the DTensor, attributes included
            param.__dict__.update(kept)
        unit.write_back_uninitialized()
        for flat, total in zip(unit.flats, sums, strict=True):
            numbered = enumerate(flat.originals)
            left_alone = [i for i, one in numbered if not self._fsdp_reaches(one, recurse)]
            flat.convert(fn(flat.sharded.detach()), left_alone)
            if total is not None:
                flat.grad_sum.put(fn(total).to(flat.sum_dtype))
        self._fsdp_root.accumulation.refresh()
        for module in [self] if len(unit.modules) == 1 else unit.modules:
            assert isinstance(module, UnitModule)
            module._fsdp_share_shards()
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Raise when ``DistributedDataParallel``, which reads this first, wraps the module."""
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected one wrapper that reduces the gradients, "
            "got DistributedDataParallel around a unit, whose parts differ between ranks. Leave it "
            "out: the unit reduces its own. For replicas of shards use "
            "ShardingStrategy.HYBRID_SHARD, or fully_shard with a mesh of two dimensions."
        )

    def __dir__(self) -> list[str]:
        """Names without the property above, which raises when inspected."""
        names: list[str] = super().__dir__()  # type: ignore[no-untyped-call]
        return [name for name in names if name != "_ddp_params_and_buffers_to_ignore"]

    def _fsdp_reaches(self, original: OriginalParameter, recurse: bool) -> bool:
        """Whether ``_apply`` of this module converts a parameter of its unit.

        False for the unit's other modules and, without ``recurse``, for submodules.
        """
        if not recurse:
            return any(module is self for module, *_ in original.sites)
        unit = self._fsdp_own_unit
        return any(unit.below(self, fqn) is not None for *_, fqn in original.sites)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected a model's values to be saved, not the "
            "model, got pickle (torch.save(model), or a process started with the model) or "
            "copy.copy. Save model.state_dict(), and load it into a model that is built and "
            "wrapped anew; copy.deepcopy(model) makes a copy."
        )

    def __prepare_scriptable__(self) -> Any:
        """Raise when ``torch.jit.script``, which calls this first, compiles the module."""
        raise tracer_error("torch.jit.script")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model within the same process groups; compiled code is not copied."""
        for unit in self._fsdp_root.units:
            unit.write_back()
            for original in unit.originals():
                original.copy(memo)
        with finished_copies(memo, UnitModule._fsdp_finish_copy):
            return deep_copy(self, self._fsdp_unit, memo, is_outermost=self._fsdp_is_outermost())

    def _fsdp_finish_copy(self) -> None:
        """Rebuild what a copy cannot share with the original."""
        unit = self._fsdp_own_unit
        for flat in unit.flats:
            flat.point_originals_to_shard()
            if not unit.is_unsharded:  # deepcopy() gives an empty storage the size of its tensor
                flat.free()
        watch_optimizers(unit.flats)
        for original in unit.originals():
            mark_managed(original.param, unit.paths.fqn_of(original.fqn))
        self._fsdp_link_inner()
        self._fsdp_compiled_bodies = {}
        self._fsdp_compiled_before = None
        self._fsdp_hook_tables = None
        self._fsdp_name = register(self)
        self._fsdp_share_shards()
        if self._fsdp_is_outermost():
            self._fsdp_give_own_code()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """``nn.Module.state_dict``, which also works under ``torch.inference_mode()``."""
        is_grad_enabled = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
            return super().state_dict(*args, **kwargs)

    # -- names -----------------------------------------------------------------------------------

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """``nn.Module.named_modules`` with plain FQNs; a wrapper and its module share one.

        ``memo``, ``prefix`` and ``remove_duplicate`` are those of ``nn.Module``.
        """
        self._fsdp_own_root.recover()
        if not prefix:  # torch.fx calls this before it traces a forward without the unit's hooks
            refuse_tracers()
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield module_tree.plain_fqn(name), module


def _save_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    assert isinstance(module, UnitModule)
    unit, dtypes = module._fsdp_unit, module._fsdp_buffer_dtypes
    inner, is_outermost = module._fsdp_inner(), module._fsdp_is_outermost()
    model.save_unit(unit, inner, destination, prefix, is_outermost, dtypes)
    if module._fsdp_is_outermost():
        model.finish_save(module._fsdp_root.units, destination, prefix)


def _load_hook(
    module: nn.Module,
    source: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *reports: Any,
) -> None:
    assert isinstance(module, UnitModule)
    model.drop_compiled_prefix(source, prefix)
    _load_shards(module, source, prefix, local_metadata, *reports)
    if module._fsdp_inner() is not module:
        model.plain_names_before_load(source, prefix, module_tree.WRAPPED)


def _load_shards(
    module: UnitModule,
    source: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    messages: list[str],
) -> None:
    module._fsdp_unit.write_back()
    module._fsdp_loading = (prefix, messages)
    module._fsdp_unit.reshard("forward")
    module._fsdp_unit.drop_secondary()
    inner = module._fsdp_inner()
    keys = model.load_unit(module._fsdp_unit, inner, source, prefix)
    managed = list(build.managed_modules(inner, module._fsdp_ignored, remove_duplicate=False))
    model.materialize(module._fsdp_unit, inner, managed, source, keys)
    if local_metadata.get("assign_to_params_buffers", False):
        model.assign_in_place(managed, source, keys, module._fsdp_buffer_dtypes)


def _loaded_hook(module: nn.Module, report: Any) -> None:
    """Clean up key names after a load, through the wrapper or through its module."""
    own = module if isinstance(module, UnitModule) else module_tree.wrapper_of(module)
    if own is None or own._fsdp_loading is None:  # loaded without the unit
        return
    (prefix, messages), own._fsdp_loading = own._fsdp_loading, None
    keys = (report.missing_keys, report.unexpected_keys)
    model.plain_names_after_load(prefix, keys, messages)


# State dicts of the wrapped module itself, as from ``model.module.state_dict()`` or transformers'
# ``save_pretrained``. Without these hooks they would contain this rank's shards in place of the
# parameters. The hooks do nothing when the wrapper calls the module.


def _called_on(inner: nn.Module, prefix: str) -> UnitModule | None:
    """Return the wrapper if the module's own method was called, not its wrapper's."""
    wrapper: UnitModule | None = module_tree.wrapper_of(inner)
    return None if module_tree.is_inside_wrapper(prefix) else wrapper


def _inner_save_hook(
    module: nn.Module, destination: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    wrapper = _called_on(module, prefix)
    if wrapper is not None:
        _save_hook(wrapper, destination, prefix, metadata)


def _inner_load_hook(
    module: nn.Module,
    source: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *reports: Any,
) -> None:
    wrapper = _called_on(module, prefix)
    if wrapper is not None:
        _load_shards(wrapper, source, prefix, local_metadata, *reports)


# -- deep copy -------------------------------------------------------------------------------------
# A copy shares process groups with the original. Everything else is new.


_COPIES = "fsdp_dynamo: copies to be finished"


def deep_copy(wrapper: nn.Module, unit: Unit, memo: dict[Any, Any], *, is_outermost: bool) -> Any:
    """Copy a unit's module and everything below it, for ``copy.deepcopy``.

    State that belongs to the process (registered name, compiled code) is left to
    ``finished_copies``.
    """
    is_alone = not any(id(group) in memo for group in unit.config.groups.all)
    if is_alone and not is_outermost:
        raise FSDPStateError(
            f"{unit_name(unit.fqn)}: expected a copy of the outermost unit's module, got a nested "
            "one by itself. Copy the whole model, or the module before it is wrapped."
        )
    groups = (*unit.config.groups.communicators, unit.settings.regathers_among)
    for group in groups:
        memo[id(group)] = group
    new = object.__new__(type(wrapper))
    memo[id(wrapper)] = new
    for name, value in wrapper.__dict__.items():
        new.__dict__[name] = copy.deepcopy(value, memo)
    memo[_COPIES].append(new)
    return new


@contextmanager
def finished_copies(memo: dict[Any, Any], finish: Callable[[Any], None]) -> Iterator[None]:
    """Finish all copies made inside once the last copy has all of its attributes.

    Modules of one unit refer to each other, so one is copied while another is incomplete.
    """
    if _COPIES in memo:
        yield
        return
    copies = memo[_COPIES] = []
    try:
        yield
    finally:
        del memo[_COPIES]
    for copied in copies:
        finish(copied)
