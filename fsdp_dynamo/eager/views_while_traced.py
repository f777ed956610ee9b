"""Parameter views while Dynamo traces a unit's forward: no two share a storage.

Operators with bodies (``torch.cond``, ``scan``, ``nested_compile_region``) refuse inputs that share
a storage, and Dynamo makes an input of every tensor that a body reads. So Dynamo sees stand-ins:
same memory as the views, separate storage objects. They are removed when the trace ends. Compiled
code finds the views where it looks for inputs, and nothing is copied. Units whose code names no
such operator are traced with their views.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import get_ident
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.dynamo.private_api import outside_transforms
from fsdp_dynamo.dynamo.untraced import UNDER_LOCK, untraced
from fsdp_dynamo.errors import UnsupportedError, unit_name

_OPERATORS = {"cond", "while_loop", "scan", "associative_scan", "map", "nested_compile_region"}
_REGION = "__marked_compile_region_fn__"  # on functions that nested_compile_region decorates
_NO_CHANGE = nullcontext()


def views_while_traced(unit: Unit) -> AbstractContextManager[None]:
    """Return a context with stand-ins for the views, if the unit may call operators with bodies."""
    return ViewsWhileTraced(unit) if may_call_operators(unit) else _NO_CHANGE


def may_call_operators(unit: Unit) -> bool:
    """Whether functions of the unit's modules, or their callees, name an operator with bodies."""
    if unit.may_call_operators is None:
        unit.may_call_operators = _names_operators(unit)
    return unit.may_call_operators


def _names_operators(unit: Unit) -> bool:
    kinds = {type(module) for outermost in unit.modules for module in outermost.modules()}
    for function in functions_of(kinds):
        names = names_in(function.__code__)
        if hasattr(function, _REGION) or names & _OPERATORS:
            return True
        if any(_is_operator(function.__globals__.get(name)) for name in names):
            return True
    return False


def _is_operator(value: Any) -> bool:
    """Whether a global is such an operator, under any name."""
    is_torchs = str(getattr(value, "__module__", "")).partition(".")[0] == "torch"
    return is_torchs and getattr(value, "__name__", "") in _OPERATORS


class ViewsWhileTraced:
    """A context in which Dynamo sees stand-ins for a unit's views."""

    def __init__(self, unit: Unit) -> None:
        self._shown = [flat.module_parameters for flat in unit.flats]
        self._thread = get_ident()

    def __enter__(self) -> None:
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)

    def __exit__(self, *_: object) -> None:
        with suppress(ValueError):  # torch.compiler.reset() removes callbacks
            callback_handler.remove_start_callback(self._begin)
            callback_handler.remove_end_callback(self._end)
        self._hide()

    @untraced(UNDER_LOCK)
    def _begin(self, args: CallbackArgs) -> None:
        # Another thread may compile while this one computes and saves views for the backward. A
        # saved stand-in would not see the second gather.
        if args.callback_trigger is CallbackTrigger.DYNAMO and get_ident() == self._thread:
            for shown in self._shown:
                shown.show_stand_ins(_stand_in_for)

    @untraced(UNDER_LOCK)
    def _end(self, _: CallbackArgs) -> None:
        if get_ident() == self._thread:
            self._hide()

    def _hide(self) -> None:
        for shown in self._shown:
            shown.hide_stand_ins()


def _stand_in_for(view: torch.Tensor) -> torch.Tensor:
    if type(view) is not torch.Tensor:  # a DTensor of tensor parallelism
        return view
    with outside_transforms(), torch.inference_mode(False), torch.enable_grad():
        stand_in: torch.Tensor = _StandIn.apply(view)  # type: ignore[no-untyped-call]
    return stand_in


class _StandIn(torch.autograd.Function):
    """Makes a tensor that is like the view to Dynamo's guards: not a leaf, same storage offset."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        empty = torch.empty(0, dtype=view.dtype, device=view.device)
        storage = view.untyped_storage()[:]
        return empty.set_(storage, view.storage_offset(), view.shape, view.stride())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def shared_inputs(error: BaseException, fqn: str) -> UnsupportedError | None:
    """Return our error in place of torch's about inputs that share a storage, else ``None``."""
    if "Input-to-input aliasing" not in str(error):
        return None
    return UnsupportedError(
        f"{unit_name(fqn)}: expected inputs of an operator with bodies (torch.cond, scan) that "
        "share no storage, got tensors that do, as the unit's parameters, or views of them, read "
        "before the call. Call the operator in the forward of one of the unit's modules and read "
        "parameters in its body (self.weight, or a call of a module), or pass a clone() of each."
    )


# -- code names ------------------------------------------------------------------------------------
# Names that the user's code uses: what it may call, found without running it.


_OWN = ("torch", "fsdp_dynamo")


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes that code and its nested functions use."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def function_of(value: Any) -> FunctionType | None:
    """Return the Python function behind a global or an attribute, or ``None``."""
    if isinstance(value, property):
        value = value.fget
    if isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
        value = value.__wrapped__
    if isinstance(value, MethodType):
        value = value.__func__
    return value if isinstance(value, FunctionType) else None


def is_the_users(definition: Any) -> bool:
    """Whether a module, class or function is neither torch's, ours nor the standard library's."""
    package = _package_of(definition)
    return package not in _OWN and package not in sys.stdlib_module_names


def _package_of(definition: Any) -> str:
    name = definition.__name__ if isinstance(definition, ModuleType) else definition.__module__
    return str(name).partition(".")[0]


def functions_of(classes: Iterable[type]) -> list[FunctionType]:
    """Return forwards of the user's classes, and functions of the same packages that they name."""
    own = {base for kind in classes for base in kind.__mro__ if is_the_users(base)}
    packages = {_package_of(base) for base in own}
    waiting = [vars(base).get("forward") for base in own]
    found: dict[FunctionType, None] = {}
    while waiting:
        function = function_of(waiting.pop())
        if function is None or function in found or _package_of(function) not in packages:
            continue
        found[function] = None
        names = names_in(function.__code__)
        for space in (function.__globals__, *map(vars, own)):
            waiting += [space[name] for name in names & space.keys()]
        for cell in function.__closure__ or ():
            waiting += contents_of(cell)
    return [*found]


def contents_of(cell: CellType) -> list[Any]:
    """Return the value of a closure's cell in a list, which is empty if the cell is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []
