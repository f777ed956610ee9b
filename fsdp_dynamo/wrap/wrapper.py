"""FullyShardedDataParallel: the module wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_dynamo import module_tree
from fsdp_dynamo.api import (
    Arguments,  # noqa: F401  # named in the docstring
    BackwardPrefetch,
    CollectivePrecision,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    UnitArguments,  # noqa: F401  # named in the docstring
    collect_arguments,
)
from fsdp_dynamo.dynamo.private_api import compiled_as_one_graph
from fsdp_dynamo.state_dict import methods
from fsdp_dynamo.wrap import build
from fsdp_dynamo.wrap.arguments import check_module
from fsdp_dynamo.wrap.attributes import WrapperAttributes
from fsdp_dynamo.wrap.construct import Constructed, construct
from fsdp_dynamo.wrap.user_methods import summon_full_params


class FullyShardedDataParallel(WrapperAttributes):
    """Wrapper that shards a module's parameters, gradients and optimizer state over ranks.

    ``model = FullyShardedDataParallel(model, auto_wrap_policy=...)`` replaces the chosen
    submodules by wrappers in place and returns the outermost one. Each wrapper is one unit.
    It runs eagerly, under ``torch.compile(model)`` (hooks mode) and under
    ``torch.compile(model, fullgraph=True, backend="fsdp_dynamo")`` (graph mode).

    Args:
        module: the module to wrap. DTensors replace its parameters (``Shard(0)``; ``Replicate()``
            with ``NO_SHARD``), so make optimizers afterwards.
        use_orig_params: ``False`` is accepted in eager mode and refused under compile.

    For the other arguments see ``Arguments`` and see ``UnitArguments``. A policy may change some of
    them for a single unit.

    Raises:
        FSDPError: one of its subclasses, before anything is changed. The message says what was
            expected, what was found, where, and what to do.

    Source: FSDP (arXiv:2304.11277) and ZeRO (arXiv:1910.02054); names and arguments are those of
    ``torch.distributed.fsdp.FullyShardedDataParallel``.
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
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Iterable[nn.Parameter | nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        reduction_group: dist.ProcessGroup | None = None,
        collective_precision: CollectivePrecision | None = None,
    ) -> None:
        check_module(module)
        given = collect_arguments(locals())
        compiled = None
        if isinstance(module, torch._dynamo.OptimizedModule):
            compiled, module = module, module._orig_mod
            check_module(module)
        made = construct(module, given)
        _wrap_children(module, made, use_orig_params)
        self._setup(module, made, use_orig_params)
        self._fsdp_become_root()
        if compiled is not None:
            self._fsdp_compiled_before = compiled_as_one_graph(
                compiled, self._fsdp_body(), self._fsdp_unit.shapes
            )
            if self._fsdp_compiled_before is None:
                self._compiled_call_impl = compiled.dynamo_ctx(self._call_impl)

    def _setup(self, module: nn.Module, made: Constructed, use_orig_params: bool) -> None:
        nn.Module.__init__(self)
        self.training = module.training
        self._modules[module_tree.WRAPPED] = module
        self._fsdp_setup(made.units[module], made.ignored, use_orig_params)
        build.tag_for_dynamo([self], True)  # its forward is traced up to the refusal

    _fsdp_entry = "forward"

    forward = WrapperAttributes._fsdp_run

    def _fsdp_inner(self) -> nn.Module:
        return self._modules["_fsdp_wrapped_module"]  # type: ignore[return-value]

    def _fsdp_body(self) -> Callable[..., Any]:
        return self._modules["_fsdp_wrapped_module"]  # type: ignore[return-value]

    @property
    def module(self) -> nn.Module:
        """Wrapped module; for a checkpoint wrapper, the module inside it."""
        inner = self._modules[module_tree.WRAPPED]
        assert inner is not None
        return inner._modules.get(module_tree.CHECKPOINTED) or inner

    def __getattr__(self, name: str) -> Any:
        """Look attributes up on the wrapped module if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == module_tree.WRAPPED or module_tree.WRAPPED not in self.__dict__.get(
                "_modules", {}
            ):
                raise
            return getattr(self._modules[module_tree.WRAPPED], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes on the wrapped module if only the wrapped module has them."""
        inner = self.__dict__.get("_modules", {}).get(module_tree.WRAPPED)
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if isinstance(getattr(type(self), name, None), property):
            object.__setattr__(self, name, value)  # nn.Module's would register a parameter
        elif inner is None or is_own or not hasattr(inner, name):
            super().__setattr__(name, value)
        else:
            setattr(inner, name, value)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Name that ``torch.distributed.checkpoint.state_dict`` leaves out of keys."""
        return {"": module_tree.WRAPPED}

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    # FSDP1's static methods, which accept any module.

    summon_full_params = staticmethod(summon_full_params)
    state_dict_type = staticmethod(methods.state_dict_type)
    set_state_dict_type = staticmethod(methods.set_state_dict_type)
    get_state_dict_type = staticmethod(methods.get_state_dict_type)
    optim_state_dict = staticmethod(methods.optim_state_dict)
    optim_state_dict_to_load = staticmethod(methods.optim_state_dict_to_load)
    full_optim_state_dict = staticmethod(methods.full_optim_state_dict)
    sharded_optim_state_dict = staticmethod(methods.sharded_optim_state_dict)
    shard_full_optim_state_dict = staticmethod(methods.shard_full_optim_state_dict)
    flatten_sharded_optim_state_dict = staticmethod(methods.flatten_sharded_optim_state_dict)
    scatter_full_optim_state_dict = staticmethod(methods.scatter_full_optim_state_dict)
    rekey_optim_state_dict = staticmethod(methods.rekey_optim_state_dict)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All wrappers in ``module``.

        Args:
            module: any module.
            root_only: only the outermost wrappers.
        """
        units = [m for _, m in module_tree.unit_modules(module)]
        found = [m for m in units if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m._fsdp_is_outermost()] if root_only else found


def _wrap_children(root: nn.Module, made: Constructed, use_orig_params: bool) -> None:
    """Replace every unit's module below ``root`` by its wrapper, innermost first."""
    wrappers: dict[nn.Module, FullyShardedDataParallel] = {}

    def visit(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):
            if child is None or module_tree.is_unit(child):
                continue
            if child not in wrappers:
                visit(child)
                if child in made.units:
                    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
                    wrapper._setup(child, made, use_orig_params)
                    wrappers[child] = wrapper
            if child in wrappers:
                module._modules[name] = wrappers[child]

    visit(root)
