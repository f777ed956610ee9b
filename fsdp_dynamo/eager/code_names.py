"""Names that the user's code uses, to learn without running it what it may do."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_OWN = ("torch", "fsdp_dynamo")


def names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes that code uses, with functions made in it."""
    inner = [names_in(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)


def function_of(value: Any) -> FunctionType | None:
    """Python function behind a global or an attribute; ``None`` if there is none."""
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
    """Forwards of the user's classes, and functions that these name, in these classes' packages."""
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
    """Value of a closure's cell, in a list that is empty where the cell is."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


__all__ = ["contents_of", "function_of", "functions_of", "is_the_users", "names_in"]
