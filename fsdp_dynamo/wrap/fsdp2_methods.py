"""FSDP2's methods, for modules of ``fully_shard``.

The setters change ``core.accumulation.UnitSettings``, which the schedule and the reductions read.
Tracing a whole graph raises for settings that graph mode cannot follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp

from fsdp_dynamo import module_tree
from fsdp_dynamo.comm import registered_memory
from fsdp_dynamo.comm.registered_memory import RegisteredMemory
from fsdp_dynamo.comm.streams import side_streams
from fsdp_dynamo.core.unit import Unit, refuse_formats
from fsdp_dynamo.eager.schedule import Root
from fsdp_dynamo.errors import (
    FSDPStateError,
    FSDPTypeError,
    FSDPValueError,
    UnsupportedError,
    unit_name,
)
from fsdp_dynamo.wrap.build import set_composable_state
from fsdp_dynamo.wrap.user_methods import UserMethods

_MakeMemory = Callable[[Sequence[dist.ProcessGroup], torch.device], RegisteredMemory | None]


class UnshardHandle(fsdp.UnshardHandle):
    """Handle of an unshard in progress, returned by ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded, and put them into the modules."""
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
    """Methods of ``torch.distributed.fsdp.FSDPModule``, by the same names.

    ``recurse`` applies a setting to the units below, too. Settings marked "eager and hooks mode"
    raise when graph mode traces the module.
    """

    def _fsdp_set(self, recurse: bool, **changes: Any) -> None:
        """Change settings of this unit and, with ``recurse``, of the units below."""
        found = module_tree.unit_modules(self) if recurse else [("", self)]
        for _, module in found:
            settings = module._fsdp_unit.settings
            for name, value in changes.items():
                setattr(settings, name, value)
            module._fsdp_graph_settings = settings.in_graphs()

    # -- unsharding by hand ----------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters ahead of its next forward (eager and hooks mode).

        The modules then hold whole, plain, read-only parameters until the strategy or ``reshard()``
        frees them. If an optimizer changes parameters first, the forward gathers them again.

        Args:
            async_op: return a handle at once instead of waiting.

        Raises:
            FSDPStateError: a parameter was removed, frozen or reshaped after the module became a
                unit, or ``summon_full_params`` is open.
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
        """Reshard parameters after every forward, or never; also the root's, and in evaluation.

        Parameters are resharded over all ranks, even if ``fully_shard`` was given a smaller number.

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
        """Reshard parameters after the backward, or keep them (eager and hooks mode).

        The next forward gathers kept parameters only if they have changed.
        """
        self._fsdp_set(recurse, reshards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether this unit's backward reads its parameters; an embedding's does not.

        Graph mode ignores the setting: its backward gathers what it reads.
        """
        self._fsdp_set(False, unshards_in_backward=unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Keep the unsharded storage of sharded parameters allocated (eager and hooks mode)."""
        self._fsdp_set(recurse, keeps_storage=keep)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather other units when this unit's forward begins (eager and hooks mode).

        Args:
            modules: units in the order in which they are gathered; empty restores the default, the
                order of the previous forward.

        Raises:
            FSDPTypeError: a module is not a unit.
        """
        self._fsdp_set(False, forward_prefetch=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Gather other units when this unit's backward begins (eager and hooks mode).

        Args:
            modules: units in the order in which they are gathered; empty restores the default,
                ``backward_prefetch``.

        Raises:
            FSDPTypeError: a module is not a unit.
        """
        self._fsdp_set(False, backward_prefetch=_units_of(modules))

    # -- reductions ------------------------------------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Reduce the gradients of the next steps, or sum them unsharded as ``no_sync()`` does.

        In graph mode the setting takes effect with the next forward.

        Raises:
            FSDPStateError: within a forward or a backward.
        """
        found = module_tree.unit_modules(self) if recurse else [("", self)]
        units = [module._fsdp_unit for _, module in found]
        self._fsdp_root.set_sync_gradients(requires_gradient_sync, units)
        self._fsdp_set(recurse, all_reduces=True)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce gradients over replicas, or postpone that reduction (eager and hooks mode).

        Postponed gradients wait as shards, and are not in ``.grad``.
        """
        self._fsdp_set(recurse, all_reduces=requires_all_reduce)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Make backwards wait for the reductions they start, or leave the wait to a later backward.

        Until then ``.grad`` lacks these gradients. In graph mode every backward waits.
        """
        self._fsdp_root.accumulation.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Leave the wait for reductions to ``finalize_backward()``, or to the end of each backward.

        Raises:
            FSDPStateError: not on the outermost module.
        """
        self._fsdp_require_outermost("set_manual_backward_finalization()")
        self._fsdp_root.ends_backward_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients that backwards without gradient sync left, reshard, and wait.

        Every rank must call it. Units whose gradient sync is off keep their gradients unreduced.

        Args:
            async_op: return a handle at once instead of waiting.

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
        """Divide the sum of this unit's gradients by ``factor`` instead of the number of ranks.

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
        """Reduce only by sums, and divide the result (eager and hooks mode)."""
        self._fsdp_set(False, sums_only=enable)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters of which no rank has a gradient one of zeros, or leave ``.grad`` alone.

        With zeros, the host need not wait at the end of a backward to learn whether any rank has
        one. Ranks may use different parameters in either case.
        """
        self._fsdp_set(recurse, zeros_unused=reduce_scatter_unused_params)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Reduce at most so many gradients of units at a time (eager and hooks mode; default 2).

        Each keeps an unsharded gradient. With 1, as by default in FSDP2, the backward of a unit
        waits for the reduction of the unit before.

        Raises:
            FSDPTypeError: not an int.
            FSDPValueError: less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise FSDPTypeError(
                "set_reduce_scatter_max_input_buffers(): expected an int, got "
                f"{max_input_buffers!r}. Pass a number of gradients."
            )
        if max_input_buffers < 1:
            raise FSDPValueError(
                "set_reduce_scatter_max_input_buffers(): expected 1 or more, got "
                f"{max_input_buffers}. Pass a number of gradients."
            )
        self._fsdp_set(recurse, max_reduces=max_input_buffers)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object], *, stream: Any = None
    ) -> None:
        """Call a function with this unit's reduced gradients (eager and hooks mode).

        Args:
            hook: called with this rank's shard of the mean ``(padded_numel / N,)``, which it may
                change in place before it is added to ``.grad``.
            stream: must be ``None``; the hook runs on the current stream.

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
        """Gather this unit's parameters with the user's collective (eager and hooks mode).

        Args:
            comm: FSDP2's ``AllGather``. Its ``allocate`` makes the output of each call, all ranks'
                shards in rank order; the input is this rank's place in it. The unit waits for work
                on the current stream, and for a handle that ``comm`` returns, and copies the output
                to the parameters.

        Raises:
            FSDPTypeError: ``comm`` has no ``allocate``.
            UnsupportedError: the unit's all-gather has a wire format.
        """
        _require_allocate(comm, "set_custom_all_gather()")
        refuse_formats([self._fsdp_unit], "all_gather", "set_custom_all_gather()")
        self._fsdp_set(False, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Callable[..., Any]) -> None:
        """Reduce this unit's gradients with the user's collective (eager and hooks mode).

        Args:
            comm: FSDP2's ``ReduceScatter``. Its ``allocate`` makes the input of each call, all
                ranks' parts in rank order, then the output. The unit waits as for
                ``set_custom_all_gather()``, and copies the output to its gradients.

        Raises:
            FSDPTypeError: ``comm`` has no ``allocate``.
            UnsupportedError: the unit's reduce-scatter has a wire format.
        """
        _require_allocate(comm, "set_custom_reduce_scatter()")
        refuse_formats([self._fsdp_unit], "reduce_scatter", "set_custom_reduce_scatter()")
        self._fsdp_set(False, reduce_scatter=comm)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Allocate what this unit's collectives read and write with NCCL's allocator, registered.

        Eager and hooks mode. Each gather sends a copy of the shard. The setting has no effect where
        the group's backend has no allocator for the device, as gloo. Every rank must call it. Not
        run on a GPU yet.

        Args:
            enable: ``False`` restores torch's default allocator.

        Raises:
            FSDPStateError: the unit is in its forward or backward, has a collective of the user's,
                or ``set_symm_mem_for_comm()`` was called.
        """
        name = "set_allocate_memory_from_process_group_for_comm()"
        self._fsdp_use_memory(name, registered_memory.memory_of if enable else None)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this unit's parameters in symmetric memory, and reduce its gradients there.

        Eager and hooks mode. NCCL's reduce-scatter for symmetric memory only computes sums (NCCL
        2.29): gradients stay in other memory without ``set_force_sum_reduction_for_comms(True)``.
        Each gather sends a copy of the shard. Every rank must call the method, and ``zero_grad()``
        at the same points of the program, because ranks have to allocate symmetric memory in the
        same order. Not run on a GPU yet.

        Args:
            backend: must be ``"NCCL"``.

        Raises:
            FSDPStateError: the unit is in its forward or backward, has a collective of the user's,
                or ``set_allocate_memory_from_process_group_for_comm(True)`` was called.
            UnsupportedError: another backend, or parameters that NCCL does not serve.
        """
        name, unit = "set_symm_mem_for_comm()", self._fsdp_unit
        for flat in unit.flats[:1]:
            is_served = registered_memory.has_symmetric_memory(flat.group, flat.device)
            if backend != "NCCL" or not is_served:
                served_by = dist.get_backend(flat.group)
                raise UnsupportedError(
                    f"{name}, {unit_name(unit.fqn)}: expected backend='NCCL', and parameters on a "
                    f"CUDA device in a process group of backend nccl, got {backend!r}, and "
                    f"parameters on {flat.device} in a group of backend {served_by}. Leave the "
                    "call out where NCCL is not used."
                )
        self._fsdp_use_memory(name, registered_memory.symmetric_memory, is_symmetric=True)

    def _fsdp_use_memory(
        self, name: str, make: _MakeMemory | None, *, is_symmetric: bool = False
    ) -> None:
        """Use the memory that ``make`` returns, or torch's; ``name`` is the user's call."""
        unit, got = self._fsdp_unit, ""
        settings = unit.settings
        if settings.all_gather is not None or settings.reduce_scatter is not None:
            got = "a collective of your own, whose allocate() makes its tensors"
        elif settings.memory is not None and settings.memory.is_symmetric is not is_symmetric:
            got = "memory of another kind, which an earlier call has set"
        if got:
            raise FSDPStateError(
                f"{name}, {unit_name(unit.fqn)}: expected collectives that allocate with torch's "
                f"default allocator, got {got}. Leave one of the two calls out."
            )
        communicators = [group for group in unit.config.groups.communicators if group.size() > 1]
        memory = None
        if make is not None and communicators and unit.flats:
            memory = make(communicators, unit.flats[0].device)
        if memory != settings.memory:
            unit.require_idle(name)
            unit.free_buffers()
            self._fsdp_set(False, memory=memory)

    def set_post_optim_event(self, event: Any) -> None:
        """Make the current stream, and so the next all-gathers, wait for an optimizer step.

        Args:
            event: a ``torch.Event``; ``None`` on CPU.
        """
        devices = {flat.device for unit in self._fsdp_root.units for flat in unit.flats}
        for streams in map(side_streams, devices):
            if streams is not None and event is not None:
                streams.current().wait_event(event)

    # -- after errors ----------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop what a forward or backward that raised left behind; the next forward does so, too.

        Raises:
            FSDPStateError: not on the outermost module.
        """
        self._fsdp_require_outermost("reset_iter_state()")
        self._fsdp_root.reset()


_REFUSED: dict[str, tuple[object, str]] = {
    "set_separate_reduce_scatter_group": (
        None,
        "the group is fixed when the unit is made: pass fully_shard(reduction_group=)",
    ),
}
"""FSDP2's methods that units do not need: the only accepted value (``None``: no value), and why."""


def _refusing(name: str, accepted: object, reason: str) -> Callable[..., None]:
    """Return a method that raises for all values but ``accepted``; ``recurse`` has no effect."""

    def method(self: FSDP2Methods, *args: Any, **kwargs: Any) -> None:
        given = [*args, *(value for key, value in kwargs.items() if key != "recurse")]
        if accepted is not None and given == [accepted]:
            return
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected a setting that units have, got "
            f"{name}({', '.join(map(repr, given))}). Leave it out: {reason}."
        )

    method.__name__, method.__qualname__ = name, f"FSDP2Methods.{name}"
    takes = "Nothing is" if accepted is None else f"Only {accepted} is"
    method.__doc__ = f"{takes} accepted: {reason}.\n\nRaises:\n    UnsupportedError: otherwise.\n"
    return method


for _name, (_accepted, _reason) in _REFUSED.items():
    setattr(FSDP2Methods, _name, _refusing(_name, _accepted, _reason))


def _require_allocate(comm: object, where: str) -> None:
    if not hasattr(comm, "allocate"):
        raise FSDPTypeError(
            f"{where}: expected a collective of FSDP2's interface, which has a method allocate(), "
            f"got {comm!r}. Define allocate(size, *, dtype, device)."
        )


def _units_of(modules: Sequence[Any]) -> tuple[Unit, ...]:
    """Units of the given modules."""
    for module in modules:
        if not module_tree.is_unit(module):
            raise FSDPTypeError(
                "modules to prefetch: expected modules of fully_shard, got "
                f"{type(module).__name__}. Call fully_shard on them first."
            )
    return tuple([module._fsdp_unit for module in modules])


# -- fsdp2 identity --------------------------------------------------------------------------------
# A module of ``fully_shard`` is an instance of torch's FSDPModule; all methods are overridden.
#
# Code that asks for torch's private state gets an error. The exception is
# ``torch.distributed.pipelining``, which ends backwards through that state.


_FULLY_SHARD = fsdp.fully_shard
"""torch's function, saved in case a script replaces it by ours."""


class TorchFSDPModule(FSDP2Methods, fsdp.FSDPModule):
    """torch's ``FSDPModule`` with our methods."""

    def _get_fsdp_state(self) -> NoReturn:
        raise UnsupportedError(
            f"{unit_name(self._fsdp_unit.fqn)}: expected FSDPModule's public methods, got a use of "
            "torch's private state. Use fsdp_dynamo.register_fsdp_forward_method in place of "
            "torch's; share_comm_ctx, deferred reductions of pipelines and torch's FSDP2 memory "
            "tracker are not supported."
        )


class PipelineState:
    """Stand-in for FSDP2's state, for stages of torch's pipelines up to torch 2.14.

    After the last microbatch a stage calls ``set_requires_gradient_sync(True)``, walks
    ``all_states``, which is empty here, and calls the callback below.
    """

    def __init__(self, module: FSDP2Methods) -> None:
        self._module = module
        self._state_ctx = self
        self.all_states: tuple[Any, ...] = ()

    def _root_post_backward_final_callback(self) -> None:
        self._module.finalize_backward()


def let_pipelines_end_backwards(module: FSDP2Methods) -> None:
    """Give a module the state that ``torch.distributed.pipelining`` looks for."""
    set_composable_state(module, _FULLY_SHARD, PipelineState(module))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Call ``register_forward_method`` on a unit; other modules are left alone.

    Args:
        module: any module.
        method_name: name of the method that runs with unsharded parameters.

    Raises:
        FSDPValueError: the unit has no such method.
    """
    if isinstance(module, FSDP2Methods):
        module.register_forward_method(method_name)


__all__ = ["FSDP2Methods", "GradientReductionHandle", "UnshardHandle"]
