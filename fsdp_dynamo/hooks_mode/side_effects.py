"""Undo what a forward on fake tensors changed in Python objects; find the user's hooks."""

from __future__ import annotations

import argparse
import functools
import logging
import random
import sys
import threading
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from fsdp_dynamo.eager.views_while_traced import contents_of, function_of, is_the_users, names_in

_CONTAINERS: tuple[Any, ...] = (list, OrderedDict, dict, set, deque)
TABLES = ("_parameters", "_buffers", "_modules")
_NO_STATE = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType, logging.Logger),
    *(torch.Tensor, nn.Module),
)
_CONSTANTS = (bool, int, float, str)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_DEPTH = 4
_OPAQUE = (Iterator, random.Random, threading.local, ContextVar)
"""Classes whose state cannot be restored."""


class ObjectStates:
    """State of modules, and of the objects that they refer to, at one moment.

    It covers the modules' attributes; globals, class attributes and closure values that their
    forwards, and functions called there, mention; and, four levels deep, containers and the user's
    objects in all of these. Parameters, buffers and our own attributes are left out.

    Attributes:
        opaque: name of an object whose state cannot be restored (an iterator, say), or ``None``.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._random = random.getstate()
        self._numpys = _numpys_random_state()
        self._seen: set[int] = set()
        self._functions: set[tuple[types.FunctionType, type | None]] = set()
        self._spaces: set[tuple[int, frozenset[str]]] = set()
        self.opaque: str | None = None
        self._states: list[tuple[str, Any, Any]] = []
        for module in modules:
            self._record_attributes(type(module).__name__, module, 0)
            self._record_class(type(module), frozenset({"forward"}))

    def put_back(self) -> str | None:
        """Undo all changes; return the name of an object that had changed, if any."""
        changed = None
        if random.getstate() != self._random:
            changed = "the state of Python's random"
            random.setstate(self._random)
        if _numpys_random_state() != self._numpys:
            changed = changed or "the state of numpy.random"
            sys.modules["numpy"].random.set_state(self._numpys)
        for name, there, before in self._states:
            if not _is_equal(there, before):
                changed = changed or name
                _fill(there, before)
        return changed

    def _record(self, name: str, value: Any, depth: int) -> None:
        if (function := function_of(value)) is not None:
            self._record_function(function, None)
        if depth > _DEPTH or isinstance(value, _NO_STATE) or id(value) in self._seen:
            return
        if isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            self._states.append((name, value, held := _shallow(value)))
            for item in held.values() if isinstance(held, dict) else held:
                self._record(name, item, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self._record(name, item, depth + 1)
        elif isinstance(value, _OPAQUE) or type(value).__module__.startswith("numpy.random"):
            self.opaque = name
        elif _is_of_the_user(value):
            self._record_attributes(name, value, depth + 1)
            self._record_class(type(value), frozenset(vars(type(value))))

    def _record_attributes(self, name: str, owner: Any, depth: int) -> None:
        self._seen.add(id(owner))
        self._record_names(name, _Attributes(owner, None), depth)

    def _record_names(self, name: str, attributes: _Attributes, depth: int) -> None:
        own = attributes.own()
        self._states.append((name, attributes, own))
        for key, value in own.items():
            self._record(f"{name}.{key}", value, depth)

    def _record_class(self, kind: type, names: frozenset[str]) -> None:
        """Record these names of a class and its bases, and what their methods mention."""
        for base in kind.__mro__:
            if is_the_users(base):
                self._record_space(base.__name__, base, names, names, kind)

    def _record_space(
        self, label: str, owner: Any, names: frozenset[str], inner: frozenset[str], kind: Any
    ) -> None:
        """Record values of a namespace, and what functions in it mention.

        Args:
            label: name of the namespace.
            owner: class, module, closure cell, or the globals of a function.
            names: names to record.
            inner: names to record in modules and classes found there.
            kind: class of ``self`` in the functions found there, if any.
        """
        space, key = _Attributes(owner, names), (id(owner), names)
        if key in self._spaces:
            return
        self._spaces.add(key)
        self._record_names(label, space, 0)
        for value in space.own().values():
            function = function_of(value)
            if isinstance(value, types.ModuleType):
                if is_the_users(value):
                    self._record_space(value.__name__, value, inner, inner, None)
            elif function is not None:
                self._record_function(function, kind)
            elif isinstance(value, type):
                self._record_class(value, inner)

    def _record_function(self, function: types.FunctionType, kind: type | None) -> None:
        if (function, kind) in self._functions or not is_the_users(function):
            return
        self._functions.add((function, kind))
        label, names = function.__module__, frozenset(names_in(function.__code__))
        self._record_attributes(function.__qualname__, function, 0)
        self._record_space(label, function.__globals__, names, names, None)
        for cell in function.__closure__ or ():
            self._record_space(label, cell, frozenset({"cell_contents"}), names, None)
        if kind is not None:
            self._record_class(kind, names)


def _is_of_the_user(value: Any) -> bool:
    kind = type(value)
    has_attributes = hasattr(value, "__dict__") or hasattr(kind, "__slots__")
    return has_attributes and (isinstance(value, _NAMESPACES) or is_the_users(kind))


class _Attributes:
    """The user's values in a namespace.

    Args:
        owner: object, class, module, closure cell, or the globals of a function.
        names: names to look at; ``None``: all of an object's except torch's and ours.
    """

    def __init__(self, owner: Any, names: frozenset[str] | None) -> None:
        self._owner = owner
        self._names = names

    def own(self) -> dict[str, Any]:
        values = self._namespace()
        if self._names is not None:
            return {name: values[name] for name in self._names if name in values}
        return {
            key: value
            for key, value in values.items()
            if key not in TABLES and not key.startswith(("_fsdp_", "_flat_weight"))
        }

    def put_back(self, before: dict[str, Any]) -> None:
        """Restore the values, and for an object's attributes also their order."""
        owner, now = self._owner, self.own()
        if isinstance(owner, type) or not (isinstance(owner, dict) or hasattr(owner, "__dict__")):
            for name in now.keys() - before.keys():
                delattr(owner, name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    setattr(owner, name, value)
            return
        values = self._namespace()
        for name in now.keys() - before.keys() if self._names is not None else now:
            del values[name]
        values.update(before)

    def _namespace(self) -> Any:
        owner = self._owner
        if isinstance(owner, types.CellType):
            return dict(zip(("cell_contents",), contents_of(owner), strict=False))
        if isinstance(owner, dict):
            return owner
        if hasattr(owner, "__dict__"):
            return owner.__dict__
        slots = [name for kind in type(owner).__mro__ for name in _slots_of(kind)]
        return {name: getattr(owner, name) for name in slots if hasattr(owner, name)}


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _base_of(container: Any) -> Any:
    """Return the built-in class of a container; a subclass may override its methods."""
    return next(base for base in _CONTAINERS if isinstance(container, base))


def _shallow(container: Any) -> Any:
    base = _base_of(container)
    if isinstance(container, dict):
        return dict(base.items(container))
    items = base.__iter__(container)
    return set(items) if base is set else list(items)


def _is_equal(there: Any, before: Any) -> bool:
    """Whether a namespace or container holds the same objects as before, in the same order."""
    now: Any = there.own() if isinstance(there, _Attributes) else _shallow(there)
    if isinstance(now, set):
        return bool(now == before)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        values = zip(now.values(), before.values(), strict=True)
        return list(now) == list(before) and all(_is_same(*pair) for pair in values)
    return all(_is_same(*pair) for pair in zip(now, before, strict=True))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) in _CONSTANTS and one == other)


def _numpys_random_state() -> Any:
    """State of numpy's global generator in comparable form; ``None`` if numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, tuple(keys.tolist()), *rest)


def _fill(there: Any, before: Any) -> None:
    if isinstance(there, _Attributes):
        there.put_back(before)
        return
    base = _base_of(there)
    base.clear(there)
    put: Any = base.extend if isinstance(there, list | deque) else base.update
    put(there, before)


def thawed(value: Any) -> Any:
    """Copy nested tuples, lists and dicts, so that changes do not reach the caller's."""
    if isinstance(value, dict):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thawed(item) for item in value]
    return tuple([thawed(item) for item in value]) if type(value) is tuple else value


def holds_containers(values: Iterable[Any]) -> bool:
    """Whether there are lists or dicts among arguments, or inside tuples among them."""
    return any(
        isinstance(value, list | dict) or (isinstance(value, tuple) and holds_containers(value))
        for value in values
    )


def are_as_given(value: Any, given: Any) -> bool:
    """Whether a copy made by ``thawed`` still has the same objects as ``given``."""
    if isinstance(given, dict | list | tuple) and not isinstance(value, dict | list | tuple):
        return False
    if isinstance(given, dict):
        return list(value) == list(given) and all(are_as_given(value[k], given[k]) for k in given)
    if isinstance(given, list | tuple):
        return len(value) == len(given) and all(map(are_as_given, value, given))
    return value is given


# -- users hooks -----------------------------------------------------------------------------------
# Users' hooks on layers inside units (``register_forward_hook`` and its relatives).
#
# Dynamo would trace such hooks into code that equal units share, without guards on them. So a unit
# with hooks inside is not compiled: it runs eagerly between compiled units, and every hook is
# called once, with real tensors. It cannot be a leaf either, because a leaf runs on fake tensors
# first; the graph ends at the unit, unless the graph was traced before the hooks were registered.


HookTables = list[Mapping[int, Callable[..., Any]]]

_LIBRARIES = ("torch", "transformers", "fsdp_dynamo")
"""Packages whose own hooks (tensor parallelism, recorded outputs) are the same in equal units."""


def hook_tables(module: nn.Module) -> HookTables:
    """Return the tables of hooks of a tree's modules; hooks registered later appear in them."""
    tables: HookTables = []
    for one in module.modules():
        tables += (
            one._forward_pre_hooks,
            one._forward_hooks,
            one._backward_pre_hooks,
            one._backward_hooks,
        )
    return tables


def has_hooks(tables: HookTables) -> bool:
    """Whether tables hold hooks of the user; most often all are empty."""
    return any(tables) and not all(_is_of_a_library(h) for table in tables for h in table.values())


def _is_of_a_library(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] in _LIBRARIES
