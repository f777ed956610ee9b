"""Walking the inputs and outputs of a user's forward: containers, dataclasses, tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A copy of ``value`` with ``fn`` applied to each tensor in tuples, lists and dicts.

    Other objects are passed through as they are: code that is given them may change them.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if type(value) is dict:
        return {key: map_tensors(fn, item) for key, item in value.items()}
    if type(value) is list:
        return [map_tensors(fn, item) for item in value]
    if type(value) is tuple:
        return tuple([map_tensors(fn, item) for item in value])
    return value


def map_output(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``map_tensors`` for what a forward returns: in named tuples and dataclasses, too."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changed = {name: map_output(fn, getattr(value, name)) for name in names}
        return dataclasses.replace(value, **changed)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return type(value)(*[map_output(fn, item) for item in value])
    if type(value) is dict:
        return {key: map_output(fn, item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([map_output(fn, item) for item in value])
    return value
