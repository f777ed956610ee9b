"""FSDP2's setters and other methods of its module, for modules of ``fully_shard``.

They change ``core.unit_settings.UnitSettings``, which the schedule and the reductions read. Those
that a whole graph cannot follow are an error when one is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import fsdp

from fsdp_dynamo import module_tree
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.core.unit import Unit, refuse_formats
from fsdp_dynamo.eager.schedule import Root
from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError, UnsupportedError, unit_name
from fsdp_dynamo.wrap.build import set_composable_state
from fsdp_dynamo.wrap.user_methods import UserMethods


class UnshardHandle(fsdp.UnshardHandle):
    """Handle of an unshard in progress, returned by ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded, and show them whole."""
        self._unit.wait_unshard()
        self._unit.show_gathered()


class GradientReductionHandle:
    """Handle of reductions in progress, returned by ``finalize_backward(async_op=True)``."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def wait(self) -> None:
        """Wait until reduced gradients are in ``.grad``."""
        self._root.wait_ended()


class FSDP2Methods(UserMethods):
    """Methods of ``torch.distributed.fsdp.FSDPModule``, by the same names."""

    def _fsdp_set(self, recurse: bool, **changes: Any) -> None:
        """Change settings of this unit, or of those below, too."""
        found = module_tree.unit_modules(self) if recurse else [("", self)]
        for _, module in found:
            settings = module._fsdp_unit.settings
            for name, value in changes.items():
                setattr(settings, name, value)
            module._fsdp_graph_settings = settings.in_graphs()

    # -- unsharding by hand ----------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters ahead of its next forward (eager and hooks mode).

        They stay unsharded until the strategy reshards them, or ``reshard()``. If an optimizer
        changes parameters before a forward, that gathers them again. Until then modules hold whole,
        plain parameters, to be read, in the place of DTensors.

        Args:
            async_op: return at once, with something to wait for.

        Raises:
            FSDPStateError: a parameter was removed, frozen or given another shape after the module
                became a unit, or ``summon_full_params`` is open.
        """
        unit = self._fsdp_unit
        unit.check_originals()
        unit.unshard_ahead()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters; its next forward or backward gathers them again.

        Raises:
            FSDPStateError: the unit is in its forward or backward.
        """
        self._fsdp_unit.require_idle("reshard()")
        self._fsdp_unit.reshard("forward")

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether parameters are resharded after a forward, the root's and an evaluation's too.

        Among all ranks, also where ``fully_shard`` was given a smaller number.

        Args:
            reshard_after_forward: reshard them.
            recurse: set it for the units below as well.

        Raises:
            FSDPTypeError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise FSDPTypeError(
                f"set_reshard_after_forward(): expected a bool, got {reshard_after_forward!r}. "
                "Pass True or False."
            )
        self._fsdp_set(recurse, reshards_after_forward=reshard_after_forward, regathers_among=None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters are resharded after a backward (eager and hooks mode).

        Otherwise the next forward gathers them only if they have changed.

        Args:
            reshard_after_backward: reshard them.
            recurse: set it for the units below as well.
        """
        self._fsdp_set(recurse, reshards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit's backward needs its parameters; that of an embedding does not.

        In graph mode a backward gathers what it reads, whatever is set.

        Args:
            unshard_in_backward: unshard them.
        """
        self._fsdp_set(False, unshards_in_backward=unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the unsharded storage allocated while parameters are sharded (eager, hooks mode).

        Args:
            keep: do not free it.
            recurse: set it for the units below as well.
        """
        self._fsdp_set(recurse, keeps_storage=keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather other units when this one's forward begins (eager and hooks mode).

        Args:
            modules: in the order in which they are gathered; none: as the forward before ran.

        Raises:
            FSDPTypeError: one of them is no unit.
        """
        self._fsdp_set(False, forward_prefetch=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather other units when this one's backward begins (eager and hooks mode).

        Args:
            modules: in the order in which they are gathered; none: as ``backward_prefetch`` says.

        Raises:
            FSDPTypeError: one of them is no unit.
        """
        self._fsdp_set(False, backward_prefetch=_units_of(modules))

    # -- reductions ------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether the next steps reduce gradients, or sum them unsharded as in ``no_sync()``.

        In graph mode it holds for forwards that are still to come.

        Args:
            requires_gradient_sync: reduce them, over replicas too.
            recurse: set it for the units below as well.

        Raises:
            FSDPStateError: within a forward or a backward.
        """
        found = module_tree.unit_modules(self) if recurse else [("", self)]
        units = [module._fsdp_unit for _, module in found]
        self._fsdp_root.set_sync_gradients(requires_gradient_sync, units)
        self._fsdp_set(recurse, all_reduces=True)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over replicas, or wait for that (eager and hooks mode).

        They wait in sharded form, and are no part of ``.grad`` meanwhile.

        Args:
            requires_all_reduce: reduce them over replicas.
            recurse: set it for the units below as well.
        """
        self._fsdp_set(recurse, all_reduces=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether backwards wait for the reductions that they have started.

        Otherwise a later one does, and ``.grad`` lacks them until then. The reductions of a graph
        (graph mode) end in their backward in any case.

        Args:
            is_last_backward: wait for all of them.
        """
        self._fsdp_root.accumulation.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave it to ``finalize_backward()`` to wait for reductions.

        Args:
            enabled: do not wait at the end of backwards.

        Raises:
            FSDPStateError: not on the outermost module.
        """
        self._fsdp_require_outermost("set_manual_backward_finalization()")
        self._fsdp_root.ends_backward_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what backwards without gradient sync have left, reshard, and wait.

        Every rank must call it. Units whose gradients are not to be reduced keep them.

        Args:
            async_op: return at once, with something to wait for.

        Raises:
            FSDPStateError: not on the outermost module.
        """
        self._fsdp_require_outermost("finalize_backward()")
        self._fsdp_root.finalize_backward()
        handle = GradientReductionHandle(self._fsdp_root)
        if async_op:
            return handle
        handle.wait()
        return None

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients over ranks by a number other than theirs.

        Args:
            factor: what to divide by.

        Raises:
            FSDPValueError: not a positive number.
        """
        if not factor > 0:
            raise FSDPValueError(
                f"set_gradient_divide_factor(): expected a positive number, got {factor!r}. Pass "
                "what the sum over ranks is to be divided by."
            )
        groups = self._fsdp_unit.config.groups.reductions
        num_ranks = math.prod(group.size() for group in groups)
        self._fsdp_set(False, grad_scale=num_ranks / factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Older name of ``set_gradient_divide_factor``."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Divide gradients before they are reduced, by sums alone (eager and hooks mode).

        Args:
            enable: use no other reduction.
        """
        self._fsdp_set(False, sums_only=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: Any = None
    ) -> None:
        """Call a function with this unit's reduced gradients (eager and hooks mode).

        Args:
            hook: called with this rank's part of the mean ``(padded_numel / N,)``, which it may
                change in place, before it is added to ``.grad``.
            stream: must be ``None``: it runs on the current stream.

        Raises:
            UnsupportedError: a stream was given.
        """
        if stream is not None:
            raise UnsupportedError(
                f"set_all_reduce_hook(): expected stream=None, got {stream!r}. The hook runs on "
                "the current stream, which has waited for the reduction; switch streams in the "
                "hook."
            )
        self._fsdp_set(False, all_reduce_hook=hook)

    def set_custom_all_gather(self, comm: Callable[..., Any]) -> None:
        """Gather this unit's parameters by the user's collective (eager and hooks mode).

        Args:
            comm: ``torch.distributed.fsdp``'s ``AllGather``. Its ``allocate`` is not called: the
                input is the shard, the output what all ranks sent, one behind the other. What it
                enqueues on the current stream is waited for, and so is a handle that it returns.
        """
        refuse_formats([self._fsdp_unit], "all_gather", "set_custom_all_gather()")
        self._fsdp_set(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """Reduce this unit's gradients by the user's collective (eager and hooks mode).

        Args:
            comm: ``torch.distributed.fsdp``'s ``ReduceScatter``. Its ``allocate`` is not called:
                the input has each rank's part behind that of the rank before. What it enqueues and
                returns is waited for as that of ``set_custom_all_gather()``.
        """
        refuse_formats([self._fsdp_unit], "reduce_scatter", "set_custom_reduce_scatter()")
        self._fsdp_set(False, reduce_scatter=comm)

    def set_post_optim_event(self, event: Any) -> None:
        """Let the work that follows, all-gathers first of all, wait for an optimizer's step.

        Args:
            event: a ``torch.Event``; the current stream of the parameters' device waits for it at
                once. CPUs give ``None``, which is nothing to wait for.
        """
        devices = {flat.device for unit in self._fsdp_root.units for flat in unit.flats}
        for streams in map(side_streams, devices):
            if streams is not None and event is not None:
                streams.current().wait_event(event)

    # -- after errors ----------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop what a forward or backward that raised has left: the next forward does so, too.

        Raises:
            FSDPStateError: not on the outermost module.
        """
        self._fsdp_require_outermost("reset_iter_state()")
        self._fsdp_root.reset()


_NO_BUFFERS = "collectives read and write flat parameters themselves, there are no buffers"
_REFUSED: dict[str, tuple[object, str]] = {
    "set_reduce_scatter_unused_params": (
        True,
        "a unit's gradients are one tensor, which has a place for each parameter",
    ),
    "set_allocate_memory_from_process_group_for_comm": (False, _NO_BUFFERS),
    "set_symm_mem_for_comm": (None, _NO_BUFFERS),
    "set_reduce_scatter_max_input_buffers": (
        None,
        "at most two reductions of a model are in flight",
    ),
    "set_separate_reduce_scatter_group": (
        None,
        "the group is fixed when the unit is made: pass fully_shard(reduction_group=)",
    ),
}
"""Methods of FSDP2 that units have no use for: the only value that they take, and the reason."""


def _refusing(name: str, accepted: object, reason: str) -> Callable[..., None]:
    def method(self: FSDP2Methods, *args: Any, recurse: bool = True, **kwargs: Any) -> None:
        given = [*args, *kwargs.values()]
        if accepted is not None and given == [accepted]:
            return
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected a setting that units have, got "
            f"{name}({', '.join(map(repr, given))}). Leave it out: {reason}."
        )

    method.__name__, method.__qualname__ = name, f"FSDP2Methods.{name}"
    takes = "Nothing is" if accepted is None else f"Only {accepted} is"
    method.__doc__ = f"{takes} accepted: {reason}.{_REFUSING_DOC}"
    return method


_REFUSING_DOC = """

Args:
    args: what FSDP2's method takes.
    recurse: without effect.
    kwargs: what FSDP2's method takes.

Raises:
    UnsupportedError: any other value.
"""


for _name, (_accepted, _reason) in _REFUSED.items():
    setattr(FSDP2Methods, _name, _refusing(_name, _accepted, _reason))


def _units_of(modules: Sequence[Any]) -> tuple[Unit, ...]:
    """The units of modules."""
    for module in modules:
        if not module_tree.is_unit(module):
            raise FSDPTypeError(
                "modules to prefetch: expected modules of fully_shard, got "
                f"{type(module).__name__}. Call fully_shard on them first."
            )
    return tuple([module._fsdp_unit for module in modules])


# -- fsdp2 identity --------------------------------------------------------------------------------
# What makes a module of ``fully_shard`` an ``FSDPModule`` of torch's to other people's code.
#
# It inherits from torch's class, whose methods are all overridden. Code that goes on to torch's
# private state gets an error, but for the end of a backward in ``torch.distributed.pipelining``.


_FULLY_SHARD = fsdp.fully_shard
"""Torch's own, also where a script has put ours in its place."""


class TorchFSDPModule(FSDP2Methods, fsdp.FSDPModule):
    """Torch's class with our methods."""

    def _get_fsdp_state(self) -> NoReturn:
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected a use of FSDPModule's public methods, got "
            "one of torch's private state. In place of register_fsdp_forward_method of torch use "
            "that of fsdp_dynamo; share_comm_ctx, deferred reductions of pipelines and torch's "
            "FSDP2 memory tracker have nothing to work on."
        )


class PipelineState:
    """Stand-in for FSDP2's state, which stages of pipelines look for up to torch 2.14.

    They set ``set_requires_gradient_sync(True)`` after the last microbatch, then go through the
    states of all units, of which there are none here, and call the last method.
    """

    def __init__(self, module: FSDP2Methods) -> None:
        self._module = module
        self._state_ctx = self
        self.all_states: tuple[Any, ...] = ()

    def _root_post_backward_final_callback(self) -> None:
        self._module.finalize_backward()


def let_pipelines_end_backwards(module: FSDP2Methods) -> None:
    """Give a module the state that ``torch.distributed.pipelining`` asks for."""
    set_composable_state(module, _FULLY_SHARD, PipelineState(module))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a unit run with its parameters unsharded; other modules are left alone.

    Args:
        module: any module.
        method_name: see ``register_forward_method`` of units.

    Raises:
        FSDPValueError: the module has no such method.
    """
    if isinstance(module, FSDP2Methods):
        module.register_forward_method(method_name)


__all__ = ["FSDP2Methods", "GradientReductionHandle", "UnshardHandle"]
