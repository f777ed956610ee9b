"""What a unit's forward, run on fake tensors, changes of Python objects; it is put back."""

from __future__ import annotations

import logging
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_CONTAINERS: tuple[Any, ...] = (list, OrderedDict, dict, set, deque)
_TABLES = ("_parameters", "_buffers", "_modules")
_NO_STATE = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType, logging.Logger),
    *(torch.Tensor, nn.Module),
)
_CONSTANTS = (bool, int, float, str)
_OWN = ("torch", "fsdp_dynamo")
_DEPTH = 4


class ObjectStates:
    """The state of modules, and of what they refer to, at one moment.

    That is their attributes, lists, dicts, sets and objects of the user's in these, four levels
    deep. Parameters, buffers and what a module has of ours are left out.

    Args:
        modules: where to begin.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._random = random.getstate()
        self._numpys = _numpys_random_state()
        self._seen: set[int] = set()
        self._states: list[tuple[str, Any, Any]] = []
        for module in modules:
            self._note_attributes(type(module).__name__, module, 0)

    def put_back(self) -> str | None:
        """Undo all changes; returns the name of something that had changed, if anything had."""
        changed = None
        if random.getstate() != self._random:
            changed = "random's numbers"
            random.setstate(self._random)
        if _numpys_random_state() != self._numpys:
            changed = "numpy.random's numbers"
            sys.modules["numpy"].random.set_state(self._numpys)
        for name, there, before in self._states:
            if not _is_equal(there, before):
                changed = changed or name
                _fill(there, before)
        return changed

    def _note(self, name: str, value: Any, depth: int) -> None:
        if depth > _DEPTH or isinstance(value, _NO_STATE) or id(value) in self._seen:
            return
        if isinstance(value, _CONTAINERS):
            self._seen.add(id(value))
            self._states.append((name, value, _shallow(value)))
            for item in value.values() if isinstance(value, dict) else value:
                self._note(name, item, depth + 1)
        elif isinstance(value, tuple):
            for item in value:
                self._note(name, item, depth + 1)
        elif _is_of_the_user(value):
            self._note_attributes(name, value, depth + 1)

    def _note_attributes(self, name: str, owner: Any, depth: int) -> None:
        self._seen.add(id(owner))
        attributes = _Attributes(owner.__dict__)
        self._states.append((name, attributes, dict(attributes.own())))
        for key, value in attributes.own().items():
            self._note(f"{name}.{key}", value, depth)


def _is_of_the_user(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    return package not in _OWN and isinstance(getattr(value, "__dict__", None), dict)


class _Attributes:
    """The attributes of an object that are the user's."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace

    def own(self) -> dict[str, Any]:
        """Them, by name."""
        return {
            key: value
            for key, value in self.namespace.items()
            if key not in _TABLES and not key.startswith(("_fsdp_", "_flat_weight"))
        }


def _shallow(value: Any) -> Any:
    if isinstance(value, dict):
        return dict(value)
    return set(value) if isinstance(value, set) else list(value)


def _is_equal(there: Any, before: Any) -> bool:
    """Whether something holds the same objects as before, in one order."""
    now: Any = there.own() if isinstance(there, _Attributes) else there
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
    """The state of numpy's global generator, in objects that can be compared; ``None`` without."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return (name, tuple(keys.tolist()), *rest)


def _fill(there: Any, before: Any) -> None:
    if isinstance(there, _Attributes):
        for name in there.own():
            del there.namespace[name]
        there.namespace.update(before)
        return
    base = next(one for one in _CONTAINERS if isinstance(there, one))  # not the user's own methods
    base.clear(there)
    put: Any = base.extend if isinstance(there, list | deque) else base.update
    put(there, before)


def thawed(value: Any) -> Any:
    """A copy of nested arguments in which lists and dicts may be changed."""
    if isinstance(value, dict):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thawed(item) for item in value]
    return tuple([thawed(item) for item in value]) if type(value) is tuple else value


def holds_containers(values: Iterable[Any]) -> bool:
    """Whether there are lists or dicts among arguments, or in tuples among them."""
    return any(
        isinstance(value, list | dict) or (isinstance(value, tuple) and holds_containers(value))
        for value in values
    )


def are_as_given(value: Any, given: Any) -> bool:
    """Whether a copy that ``thawed`` has made holds what it was made of."""
    if isinstance(given, dict | list | tuple) and not isinstance(value, dict | list | tuple):
        return False
    if isinstance(given, dict):
        return list(value) == list(given) and all(are_as_given(value[k], given[k]) for k in given)
    if isinstance(given, list | tuple):
        return len(value) == len(given) and all(map(are_as_given, value, given))
    return value is given
