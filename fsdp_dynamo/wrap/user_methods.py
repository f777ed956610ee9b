"""Public methods of a unit module besides its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from inspect import isgeneratorfunction
from typing import Any

import torch
from torch import nn

from fsdp_dynamo import module_tree
from fsdp_dynamo.comm.comm_hooks import CommHook, HookState
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
    """Methods that work on units; ``UnitModule`` adds the rest."""

    _fsdp_own_root: Root
    _fsdp_own_unit: Unit
    _fsdp_runs_method: bool
    _fsdp_graph_settings: str

    # After a backward that raised, views of freed storage are left in the modules: autograd has no
    # hook for it. These properties recover before they return; traced code reads the attributes.

    @property
    def _fsdp_root(self) -> Root:
        """The schedule of all units, recovered from a backward that raised."""
        self._fsdp_own_root.recover()
        return self._fsdp_own_root

    @property
    def _fsdp_unit(self) -> Unit:
        """The module's unit, recovered from a backward that raised."""
        self._fsdp_own_root.recover()
        return self._fsdp_own_unit

    def _fsdp_inner(self) -> nn.Module:
        """The user's module."""
        raise NotImplementedError

    def _fsdp_is_outermost(self) -> bool:
        return self._fsdp_root.units[0] is self._fsdp_unit

    def _fsdp_require_outermost(self, what: str) -> None:
        """Refuse on a part of the model what concerns all units."""
        if not self._fsdp_is_outermost():
            raise FSDPStateError(
                f"{unit_name(self._fsdp_unit.fqn)}: expected the outermost unit of the model for "
                f"{what}, got a nested unit. Call it on the whole model."
            )

    # -- training ------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients without communication while open.

        Costs the memory of one unsharded gradient per unit; without it, gradients accumulate in
        sharded form at the cost of one reduction per backward.

        Raises:
            FSDPStateError: entered within a step, or not on the outermost unit.
        """
        self._fsdp_require_outermost("no_sync()")
        with self._fsdp_root.no_sync():
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next steps reduce gradients. DDP's name; setting it is as ``no_sync()``.

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
            max_norm: the bound.
            norm_type: p of the p-norm; ``inf``: the largest absolute value.

        Returns:
            The norm before clipping: a scalar in the dtype that gradients of all units are promoted
            to (computed in float32 at least), equal on all ranks. A warning where there are none.

        Raises:
            FSDPStateError: not on the outermost unit.
            UnsupportedError: a unit is on fewer ranks than the root, and the others hold different
                values of it.
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
        """Refuse ``torch.distributed.algorithms.join.Join``, which calls it.

        Args:
            kwargs: those of ``Join``.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected as many batches on all ranks, got "
            "torch.distributed.algorithms.join.Join. A rank without batches would have to gather "
            "and reduce like the others: end the epoch on all ranks when the first one's data end, "
            "or repeat batches with a loss of 0."
        )

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce gradients with a hook of the user's in eager and on the hooks mode.

        Args:
            state: the hook's first argument; ``None``: a ``comm_hooks.HookState``.
            hook: see ``fsdp_dynamo.comm.comm_hooks``, which has hooks in low precision.

        Raises:
            FSDPStateError: on a wrapper that is not the outermost one, or the second time.
            FSDPTypeError: not callable.
            UnsupportedError: with a hybrid strategy, or HIERARCHICAL_SHARD.
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
        strategy = self._fsdp_unit.config.strategy
        if strategy.is_hybrid or strategy.is_hierarchical:
            raise UnsupportedError(
                f"{where}: expected a strategy without replicas or a hierarchy, got "
                f"{self._fsdp_unit.config.strategy.name}. Use FULL_SHARD, SHARD_GRAD_OP or "
                "NO_SHARD with a hook."
            )
        for flat in flats:
            flat.set_comm_hook(partial(hook, HookState(flat.groups) if state is None else state))

    def register_forward_method(self, name: str) -> None:
        """Let a method of the module run with this unit's parameters unsharded, like its forward.

        For methods that call the module's own ``forward``, such as ``generate()``. Nested units
        are unsharded when they are called. The method runs eagerly; of a generator, each step.
        (Upstream's ``register_fsdp_forward_method``.)

        Raises:
            FSDPValueError: the module has no such method.
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
        """Run a generator method; the unit is unsharded in each of its steps."""
        device, dtype = self._fsdp_unit.device, self._fsdp_input_dtype
        args, kwargs = hooks.prepare_inputs(device, dtype, args, kwargs)
        steps, end = method(*args, **kwargs), object()
        while (value := self._fsdp_run_method(lambda: next(steps, end))) is not end:
            yield value

    @property
    def _fsdp_input_dtype(self) -> torch.dtype | None:
        """The dtype that floating-point inputs are cast to now; ``None``: not cast."""
        raise NotImplementedError

    # -- original parameters ---------------------------------------------------------------------

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """As in ``nn.Module``, on whole parameters: for initialisation. Ranks must do the same."""
        with summon_full_params(self):
            return super().apply(fn)

    # -- shards ----------------------------------------------------------------------------------

    def update_whole(
        self, parts: Mapping[str, torch.Tensor], update: WholeUpdate
    ) -> dict[str, torch.Tensor]:
        """Update whole tensors, each on one rank, of which every rank holds its part.

        For optimizers on matrices: each matrix is gathered on one rank, updated there, and
        every rank gets its part of the result. All ranks must call it with the same names.

        Args:
            parts: by plain FQN, DTensors placed as the parameter: its gradient, a momentum, itself.
            update: called as ``update(fqn, whole)``, ``whole`` in the parameter's shape, on one
                rank (on all where the parameter is not sharded); returns a tensor of that shape.

        Returns:
            What ``update`` returned, by FQN, as DTensors like those of ``parts``.

        Raises:
            FSDPValueError: an unknown name, a tensor placed or a result shaped otherwise.
            UnsupportedError: tensor parallelism has split one of these parameters too.
        """
        return update_whole(self._fsdp_root.units, parts, update)

    def flat_parameter_of(self, fqn: str) -> FlatParameter:
        """The flat parameter that holds the parameter with this plain FQN.

        Of its tensors ``sharded``, this rank's ``(padded_numel / N,)``, is always there.

        Raises:
            FSDPValueError: if no unit holds a parameter of that name.
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
    """Original parameters with their whole values and shapes while open; between steps only.

    Modules hold whole, plain parameters in the place of DTensors. Every rank must open and leave
    the context. Units that are summoned already (nested calls) stay as they are until the outer
    context ends. Meanwhile the model runs under ``torch.no_grad()`` only. ``state_dict()`` inside
    gives whole tensors without communication, so rank 0 alone may call it.

    Args:
        module: a wrapper, or a module with wrappers below.
        recurse: all units in ``module``; else only its own, if it is a wrapper.
        writeback: keep changes. Ranks must make the same ones, unless ``rank0_only``.
        rank0_only: whole values on rank 0 only, parts on the others; with ``writeback`` rank
            0's changes go to all.
        offload_to_cpu: whole values in host memory.
        with_grads: gradients too, under the same rules; where they are left out, ``.grad`` is
            ``None`` inside.

    Raises:
        FSDPStateError: a unit is in its forward or backward.
        UnsupportedError: tensor parallelism has split a parameter too.
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
