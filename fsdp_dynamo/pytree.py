"""Tensors in the inputs and outputs of a user's forward, in whatever contains them.

Containers are those that torch's pytree knows (named tuples and registered classes among them),
subclasses of dict, and dataclasses. Plain tuples, lists and dicts take a path of their own, as this
runs in every forward.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

_CONSTANTS = (type(None), bool, int, float, str)


def tensors_of(value: Any, within: tuple[Any, ...] = ()) -> Iterator[torch.Tensor]:
    """All tensors in a nested value.

    Args:
        value: what is searched.
        within: containers that are being searched, for objects that refer to what holds them.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
        return
    if kind is dict:
        items: Iterable[Any] = value.values()
    elif kind is tuple or kind is list:
        items = value
    elif kind in _CONSTANTS or any([value is one for one in within]):  # noqa: C419
        return
    else:
        items, within = _items(value), (*within, value)
    for item in items:
        yield from tensors_of(item, within)


def _items(value: Any) -> Iterable[Any]:
    if (opened := open_container(value)) is not None:
        return opened[0]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (tuple, list, set, frozenset)) else ()


def map_tensors(
    fn: Callable[[torch.Tensor], torch.Tensor], value: Any, within: tuple[Any, ...] = ()
) -> Any:
    """A copy of ``value`` with ``fn`` applied to each tensor.

    Tuples, lists and dicts are always copied, other containers where ``fn`` changes a tensor in
    them: code that is given them may change them. Other objects are passed through, and so is what
    refers to a container that holds it.

    Args:
        fn: gives the tensor in the place of one.
        value: what is copied.
        within: containers that are being copied.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    kind = type(value)
    if kind is dict:
        return {key: map_tensors(fn, item, within) for key, item in value.items()}
    if kind is list:
        return [map_tensors(fn, item, within) for item in value]
    if kind is tuple:
        return tuple([map_tensors(fn, item, within) for item in value])
    if any([value is one for one in within]):  # noqa: C419  # traced by Dynamo
        return value
    if (opened := open_container(value)) is None:
        return value
    items, rebuild = opened
    mapped = [map_tensors(fn, item, (*within, value)) for item in items]
    if kind is PackedSequence:
        mapped[1] = value.batch_sizes  # stay on the CPU
    before, after = [*tensors_of(items, (value,))], [*tensors_of(mapped, (value,))]
    is_same = all([a is b for a, b in zip(before, after)])  # noqa: B905, C419  # traced by Dynamo
    return value if is_same else rebuild(mapped)


def is_plain(value: Any) -> bool:
    """Whether all containers in ``value`` are tuples, lists and dicts, none of a subclass."""
    kind = type(value)
    if kind is tuple or kind is list:
        return all([is_plain(item) for item in value])  # noqa: C419  # traced by Dynamo
    if kind is dict:
        return all([is_plain(item) for item in value.values()])  # noqa: C419
    return isinstance(value, torch.Tensor) or open_container(value) is None


def open_container(value: Any) -> tuple[Sequence[Any], partial[Any]] | None:
    """Items of a container, and what makes its like of other items; ``None``: no container."""
    if type(value) in _CONSTANTS:
        return None
    if not tree_is_leaf(value):
        items, spec = tree_flatten(value, is_leaf=lambda item: item is not value)
        return items, partial(_unflatten, spec)
    if isinstance(value, dict):
        own = tuple(getattr(value, "__dict__", ()))
        items = [*value.values(), *(getattr(value, name) for name in own)]
        return items, partial(_new_dict, type(value), tuple(value), own)
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, nn.Module)):
        return None
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return [getattr(value, name) for name in names], partial(_new_dataclass, type(value), names)


def _unflatten(spec: Any, items: Sequence[Any]) -> Any:
    return tree_unflatten(items, spec)


def _new_dict(kind: Any, keys: Sequence[Any], names: Sequence[str], items: Sequence[Any]) -> Any:
    """A dict of a subclass, made without its ``__init__``; ``names`` are its attributes."""
    new: Any = kind.__new__(kind)
    put = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for key, item in zip(keys, items):  # noqa: B905  # traced by Dynamo
        put(new, key, item)
    for name, item in zip(names, items[len(keys) :]):  # noqa: B905
        object.__setattr__(new, name, item)
    return new


def _new_dataclass(kind: type, names: Sequence[str], items: Sequence[Any]) -> Any:
    """Without ``__init__``, which may take other arguments and set fields anew."""
    new: Any = object.__new__(kind)
    for name, item in zip(names, items):  # noqa: B905  # traced by Dynamo
        object.__setattr__(new, name, item)  # frozen or not
    return new
