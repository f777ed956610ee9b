"""Modules that are units: their interface, their names in traced code, and a search for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.module_tree import unit_modules, wrapper_of
from fsdp_dynamo.pytree import tensors_of


class UnitModuleProtocol(Protocol):
    """A wrapper, or a module of ``fully_shard``, as hooks and graph mode see it.

    Attributes:
        _fsdp_buffer_dtypes: original dtypes of the buffers that ``MixedPrecision`` has cast, by
            FQN.
        _fsdp_has_nested: whether there are units below it.
        _fsdp_gathered: unsharded buffers in a trace, where a unit has several modules.
        _fsdp_compiled_bodies: body compiled in hooks mode, by backend number.
        _fsdp_compiled_before: body that the user compiled before it became a unit.
        _fsdp_hook_tables: tables of users' hooks inside, once hooks mode has searched for them.
        _fsdp_last_key: backend number of its last forward in eager or hooks mode.
        _fsdp_output_spec: structure of its output in the last trace of hooks mode.
    """

    _fsdp_buffer_dtypes: dict[str, torch.dtype]
    _fsdp_has_nested: bool
    _fsdp_gathered: dict[str, list[torch.Tensor]] | None
    _fsdp_compiled_bodies: dict[int, Callable[..., Any]]
    _fsdp_compiled_before: Callable[..., Any] | None
    _fsdp_hook_tables: list[Mapping[int, Callable[..., Any]]] | None
    _fsdp_last_key: int
    _fsdp_output_spec: Any

    @property
    def _fsdp_input_dtype(self) -> torch.dtype | None:
        """Dtype to which floating-point inputs are cast; ``None``: no cast."""

    @property
    def _fsdp_root(self) -> Any:
        """Schedule of its root (``eager.schedule.Root``)."""

    @property
    def _fsdp_unit(self) -> Unit:
        """Its unit; recovers from a backward that raised."""

    def _fsdp_inner(self) -> nn.Module:
        """Return the module below the unit's hooks: the wrapped module of a wrapper."""

    def _fsdp_body(self) -> Callable[..., Any]:
        """Return the callable between the unit's hooks: the user's module."""

    def _fsdp_is_outermost(self) -> bool:
        """Return whether its unit is the root."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the unit's hooks and its body."""


_registered: WeakValueDictionary[str, UnitModuleProtocol] = WeakValueDictionary()
_numbers = itertools.count()


def register(module: UnitModuleProtocol) -> str:
    """Return a name for a unit module in traced code, unique in the process.

    A string, because Dynamo treats strings as constants. It would make a number dynamic and guard
    on an object.
    """
    name = f"unit{next(_numbers)}"
    _registered[name] = module
    return name


def registered(name: str) -> UnitModuleProtocol:
    """Return the unit module of that name."""
    return _registered[name]


def alike(name: str) -> list[str]:
    """Names of registered unit modules with the same class and the same root as ``name``."""
    one = _registered[name]
    kind, root = type(one._fsdp_inner()), one._fsdp_root
    return [
        other
        for other, module in _registered.items()
        if type(module._fsdp_inner()) is kind and module._fsdp_root is root
    ]


def units_in(module: nn.Module) -> list[Unit]:
    """Return the units of a module and below it; for a wrapped module, its wrapper's unit too."""
    return list(dict.fromkeys(one._fsdp_unit for one in _with_wrapper(module)))


def roots_in(module: nn.Module) -> list[Any]:
    """Return the roots of these units."""
    return list(dict.fromkeys(one._fsdp_root for one in _with_wrapper(module)))


def _with_wrapper(module: nn.Module) -> list[UnitModuleProtocol]:
    wrapper = wrapper_of(module)
    return [*([] if wrapper is None else [wrapper]), *(m for _, m in unit_modules(module))]


# -- preserve state --------------------------------------------------------------------------------


@contextmanager
def preserve_state(module: nn.Module, units: Sequence[Unit], values: Any = ()) -> Iterator[None]:
    """Start without gradients; restore gradients, buffers and random states at the end.

    Meanwhile no post-accumulate hooks run: they could step an optimizer. ``values`` are inputs,
    whose gradients are restored too.
    """
    leaves = [t for t in tensors_of(values) if t.is_leaf and t.requires_grad]
    holders = dict.fromkeys([*module.parameters(), *leaves])
    flats = [flat for unit in units for flat in unit.flats]
    sums = [(flat, flat.grad_sum.take()) for flat in flats]  # of steps under no_sync()
    grads = [(holder, holder.grad) for holder in holders]
    buffers = [(m, name, b) for m in module.modules() for name, b in m._buffers.items()]
    values_of_buffers = [None if b is None else b.detach().clone() for _, _, b in buffers]
    devices = [d for d in {unit.device for unit in units} if d is not None and d.type != "cpu"]
    try:
        with torch.random.fork_rng(devices):
            clear_gradients(holders, units)
            for flat in flats:
                flat.runs_hooks = False  # they may run an optimizer
            yield
    finally:
        clear_gradients(holders, units)
        for flat in flats:
            flat.runs_hooks = True
        for holder, grad in grads:
            holder.grad = grad
        for flat, total in sums:
            if total is not None:
                flat.grad_sum.put(total)
        with torch.no_grad():
            for (owner, name, buffer), before in zip(buffers, values_of_buffers, strict=True):
                owner._buffers[name] = buffer
                if buffer is not None and before is not None:
                    buffer.copy_(before)


def clear_gradients(
    holders: Sequence[torch.Tensor] | dict[Any, None], units: Sequence[Unit]
) -> None:
    """Drop gradients of tensors, and pending gradients of units."""
    for holder in holders:
        holder.grad = None
    for unit in units:
        for flat in unit.flats:
            flat.grad_sum.take()
            flat.grad_sum.accumulation.refresh()
