"""Tensors in the inputs and outputs of a user's forward, in whatever contains them.

Containers are those that torch's pytree knows (named tuples and registered classes among them) and
dataclasses. Plain tuples, lists and dicts take a path of their own, as this runs in every forward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

_CONSTANTS = (type(None), bool, int, float, str)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a nested value."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in _items(value):
            yield from tensors_of(item)


def _items(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is tuple or kind is list:
        return value  # type: ignore[no-any-return]
    if kind is dict:
        return value.values()  # type: ignore[no-any-return]
    if kind in _CONSTANTS:
        return ()
    if (opened := open_container(value)) is not None:
        return opened[0]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (tuple, list, set, frozenset)) else ()


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of ``value`` with ``fn`` applied to each tensor.

    Tuples, lists and dicts are always copied, other containers where ``fn`` changes a tensor in
    them: code that is given them may change them. Other objects are passed through.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    kind = type(value)
    if kind is dict:
        return {key: map_tensors(fn, item) for key, item in value.items()}
    if kind is list:
        return [map_tensors(fn, item) for item in value]
    if kind is tuple:
        return tuple([map_tensors(fn, item) for item in value])
    if (opened := open_container(value)) is None:
        return value
    items, rebuild = opened
    mapped = [map_tensors(fn, item) for item in items]
    if kind is PackedSequence:
        mapped[1] = value.batch_sizes  # stay on the CPU
    before, after = [*tensors_of(items)], [*tensors_of(mapped)]
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
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, nn.Module)):
        return None
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    names += [name for name in getattr(value, "__dict__", ()) if name not in names]
    return [getattr(value, name) for name in names], partial(_new_dataclass, type(value), names)


def _unflatten(spec: Any, items: Sequence[Any]) -> Any:
    return tree_unflatten(items, spec)


def _new_dataclass(kind: type, names: Sequence[str], items: Sequence[Any]) -> Any:
    """Without ``__init__``, which may take other arguments and set fields anew."""
    new: Any = object.__new__(kind)
    for name, item in zip(names, items):  # noqa: B905  # traced by Dynamo
        object.__setattr__(new, name, item)  # frozen or not
    return new
