"""Public methods of a unit's module, besides its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

import torch
from torch import nn

from fsdp_dynamo import module_tree
from fsdp_dynamo.core.flat_parameter import FlatParameter
from fsdp_dynamo.core.grad_clip import clip_grad_norm
from fsdp_dynamo.core.summon import SummonOptions, WholeUpdate, unshard_originals, update_whole
from fsdp_dynamo.core.unit import Unit, refuse_formats
from fsdp_dynamo.dynamo.untraced import untraced
from fsdp_dynamo.eager import hooks
from fsdp_dynamo.eager.schedule import Root
from fsdp_dynamo.errors import (
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    UnsupportedError,
    unit_name,
)


class UserMethods(nn.Module):
    """Methods for users that work on units; base class of ``UnitModule``."""

    _fsdp_own_root: Root
    _fsdp_own_unit: Unit
    _fsdp_runs_method: bool
    _fsdp_graph_settings: str
    _fsdp_input_dtype: torch.dtype | None  # floating-point inputs are cast to it

    # A backward that raised leaves views of freed storage in the modules, and autograd has no hook
    # that could clean up. So these properties recover first. Traced code reads the attributes
    # ``_fsdp_own_*`` instead, since Dynamo must not trace the recovery.

    @property
    def _fsdp_root(self) -> Root:
        """Schedule of all units, after recovery from a backward that raised."""
        self._fsdp_own_root.recover()
        return self._fsdp_own_root

    @property
    def _fsdp_unit(self) -> Unit:
        """Unit of this module, after recovery from a backward that raised."""
        self._fsdp_own_root.recover()
        return self._fsdp_own_unit

    def _fsdp_inner(self) -> nn.Module:
        """The user's module."""
        raise NotImplementedError

    def _fsdp_is_outermost(self) -> bool:
        return self._fsdp_root.units[0] is self._fsdp_unit

    def _fsdp_require_outermost(self, what: str) -> None:
        """Raise unless this is the outermost unit, as calls that concern all units require."""
        if not self._fsdp_is_outermost():
            raise FSDPStateError(
                f"{unit_name(self._fsdp_unit.fqn)}: expected the outermost unit of the model for "
                f"{what}, got a nested unit. Call it on the whole model."
            )

    # -- training ------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without communication inside this context.

        Costs the memory of one unsharded gradient per unit. Outside the context, gradients
        accumulate as shards and every backward reduces once.

        Raises:
            FSDPStateError: entered within a step, or not on the outermost unit.
        """
        self._fsdp_require_outermost("no_sync()")
        with self._fsdp_root.no_sync():
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next steps reduce gradients; ``False`` is a ``no_sync()`` without context.

        The name is that of ``DistributedDataParallel``.

        Raises:
            FSDPStateError: set within a step, or not on the outermost unit.
        """
        return all(unit.settings.reduces for unit in self._fsdp_root.units)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._fsdp_require_outermost("require_backward_grad_sync")
        self._fsdp_root.set_sync_gradients(bool(wanted), self._fsdp_root.units)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip all gradients by their global norm; every rank must call it.

        Args:
            max_norm: largest norm allowed.
            norm_type: p of the p-norm; ``inf`` is the largest absolute value.

        Returns:
            The norm before clipping, equal on all ranks: a scalar in the dtype that the gradients
                promote to. It is computed in float32 at least. Without gradients, warns.

        Raises:
            FSDPStateError: not on the outermost unit.
            UnsupportedError: a unit is sharded over fewer ranks than the root, and the remaining
                ranks hold different values.
        """
        self._fsdp_require_outermost("clip_grad_norm_()")
        for unit in self._fsdp_root.units:
            unit.write_back()
        self._fsdp_root.reduce_sums()
        managed = {id(o.param) for unit in self._fsdp_root.units for o in unit.originals()}
        others = [p for p in self.parameters() if id(p) not in managed]
        flats = [flat for unit in self._fsdp_root.units for flat in unit.flats]
        groups = self._fsdp_unit.config.groups.all
        return clip_grad_norm(flats, others, groups, float(max_norm), norm_type)

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuse ``torch.distributed.algorithms.join.Join``, which calls this method.

        Args:
            kwargs: arguments of ``Join``.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected as many batches on all ranks, got "
            "torch.distributed.algorithms.join.Join. A rank without batches would have to gather "
            "and reduce like the others: end the epoch on all ranks when the first one's data end, "
            "or repeat batches with a loss of 0."
        )

    def register_comm_hook(self, state: object, hook: Callable[..., object]) -> None:
        """Reduce gradients with a hook of the user's (eager and hooks mode).

        The hook sees each gradient once (after ``no_sync()``, the sum of all steps that were not
        reduced) and returns when it is reduced, so its communication does not overlap.

        Args:
            state: first argument of the hook.
            hook: ``hook(state, grad, output)`` averages ``grad`` ``(padded_numel,)``, which holds
                all ranks' parts in rank order, and writes this rank's part to ``output``
                ``(padded_numel / N,)``. With ``NO_SHARD``, ``hook(state, grad)`` averages ``grad``
                in place. ``torch.distributed.algorithms._comm_hooks.default_hooks`` has some.

        Raises:
            FSDPStateError: not on the outermost unit, or the model has a hook already.
            FSDPTypeError: ``hook`` is not callable.
            UnsupportedError: hybrid strategies and HIERARCHICAL_SHARD.
        """
        where = "register_comm_hook()"
        if not callable(hook):
            raise FSDPTypeError(f"{where}: expected a callable, got {hook!r}. Pass a function.")
        self._fsdp_require_outermost(where)
        for kind in ("reduce_scatter", "all_reduce"):
            refuse_formats(self._fsdp_root.units, kind, where)
        flats = [flat for unit in self._fsdp_root.units for flat in unit.flats]
        if any(flat.comm_hook for flat in flats):
            raise FSDPStateError(
                f"{where}: expected one call for the whole model, got the second one. Call it once."
            )
        strategy = self._fsdp_unit.config.sharding_strategy
        if strategy.is_hybrid or strategy.is_hierarchical:
            raise UnsupportedError(
                f"{where}: expected a strategy without replicas or a hierarchy, got "
                f"{strategy.name}. Use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD with a hook."
            )
        for flat in flats:
            flat.set_comm_hook(partial(hook, state))

    def register_forward_method(self, name: str) -> None:
        """Unshard this unit while a method of the module runs, as its forward does.

        For methods that call the module's own ``forward``, such as ``generate()``. Nested units are
        unsharded when they are called. The method runs eagerly; each step of a generator is such a
        run. (FSDP2's ``register_fsdp_forward_method``.)

        Raises:
            FSDPValueError: the module has no method of this name.
        """
        inner = self._fsdp_inner()
        if not callable(getattr(inner, name, None)):
            raise FSDPValueError(
                "register_forward_method(): expected the name of a method of "
                f"{type(inner).__name__}, got {name!r}. Register what the module has."
            )
        method = getattr(inner, name)
        run = self._fsdp_iterate if isgeneratorfunction(method) else self._fsdp_run_method
        self.__dict__[name] = partial(run, method)

    @untraced("a unit's hooks run eagerly")
    def _fsdp_run_method(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        root, unit = self._fsdp_root, self._fsdp_unit
        self._fsdp_runs_method = True
        try:
            with root.execution_order.paused():
                module, dtype = self._fsdp_inner(), self._fsdp_input_dtype
                return hooks.run_unit(root, unit, module, method, args, kwargs, dtype)
        finally:
            self._fsdp_runs_method = False

    def _fsdp_iterate(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run a generator method; the unit is unsharded during each of its steps."""
        device, dtype = self._fsdp_unit.device, self._fsdp_input_dtype
        args, kwargs = hooks.prepare_inputs(device, dtype, args, kwargs)
        steps, end = method(*args, **kwargs), object()
        while (value := self._fsdp_run_method(lambda: next(steps, end))) is not end:
            yield value

    # -- original parameters ---------------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply a function to all modules, with their parameters unsharded.

        For initialization. All ranks must make the same changes.
        """
        with summon_full_params(self):
            return super().apply(fn)

    # -- shards ----------------------------------------------------------------------------------

    def update_whole(
        self, parts: Mapping[str, torch.Tensor], update: WholeUpdate
    ) -> dict[str, torch.Tensor]:
        """Update whole tensors, each on one rank, whose shards are spread over all ranks.

        For optimizers on matrices: one rank gathers each matrix and updates it, then every rank
        gets its shard of the result. All ranks must pass the same names.

        Args:
            parts: DTensors by plain FQN, placed as the parameter: its gradient, a momentum or
                itself.
            update: called as ``update(fqn, whole)`` on one rank, on all where the parameter is not
                sharded; ``whole`` and the tensor it returns have the parameter's shape.

        Returns:
            The results of ``update`` by FQN, as DTensors placed as those of ``parts``.

        Raises:
            FSDPValueError: unknown name, other placement, or result of another shape.
            UnsupportedError: tensor parallelism splits one of the parameters too.
        """
        return update_whole(self._fsdp_root.units, parts, update)

    def flat_parameter_of(self, fqn: str) -> FlatParameter:
        """Return the flat parameter that holds the parameter with this plain FQN.

        Its attribute ``sharded``, this rank's ``(padded_numel / N,)``, is always available.

        Raises:
            FSDPValueError: no unit holds a parameter of that name.
        """
        for unit in self._fsdp_root.units:
            for flat in unit.flats:
                sites = [site for original in flat.originals for _, _, site in original.sites]
                if fqn in [unit.paths.fqn_of(site) for site in sites]:
                    flat.module_parameters.write_back()
                    return flat
        raise FSDPValueError(
            f"flat_parameter_of: expected the FQN of a parameter that a unit manages, got '{fqn}'. "
            "See named_parameters() for the names."
        )


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Put whole parameters into the modules inside this context; between steps only.

    Plain parameters with whole values and shapes replace the DTensors. Every rank must enter and
    leave the context. Nested contexts leave units alone that are summoned already. Inside, the
    model only runs under ``torch.no_grad()``, and ``state_dict()`` returns whole tensors without
    communication, so rank 0 alone may call it.

    Args:
        module: a unit's module, or a module that contains such modules.
        recurse: all units in ``module``; otherwise only its own.
        writeback: keep changes; all ranks must make the same ones, unless ``rank0_only``.
        rank0_only: whole values on rank 0 only; with ``writeback``, all ranks get rank 0's changes.
        offload_to_cpu: put whole values into host memory.
        with_grads: show whole gradients too; otherwise ``.grad`` is ``None`` inside.

    Raises:
        FSDPStateError: a unit is in its forward or backward.
        UnsupportedError: tensor parallelism splits a parameter too.
    """
    found = module_tree.unit_modules(module)
    chosen: list[UserMethods] = [m for _, m in found if recurse or m is module]
    for one in chosen:
        one._fsdp_root.reduce_sums()
    options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
    units = dict.fromkeys(one._fsdp_unit for one in chosen)
    with unshard_originals(units, options):
        yield


__all__ = ["summon_full_params"]
