"""Storages behind the values of a graph's nodes. Storages, not tensors, take memory.

An operator's schema says whether its result is new or a view of an argument::

    view(Tensor(a) self) -> Tensor(a)      the storage of self
    add_(Tensor(a!) self, ...) -> Tensor(a!)   the storage of self
    mm(Tensor self, Tensor mat2) -> Tensor     a new one

Where the schema only says that it may be a view (``reshape``), and for what has no schema, the
fake tensors in ``meta["val"]`` decide: a view's has the storage of what it views.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx

_SILENT_VIEWS = frozenset({"aten::_unsafe_view", "_c10d_functional::wait_tensor"})
"""Results share the first argument's storage, though the schema does not say so."""

_PERHAPS_VIEWS = frozenset(f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten"))


@dataclass(eq=False)
class Storage:
    """A stretch of memory.

    Attributes:
        maker: the node that allocates it, or the first input that brings it.
        num_bytes: its size.
        nodes: the maker and every node with a value in it, in graph order.
    """

    maker: fx.Node
    num_bytes: int
    nodes: list[fx.Node] = field(default_factory=list)


Places = dict[fx.Node, tuple["Storage | None", ...]]
"""For every node the storage of each of its results; ``None`` for what is no tensor."""


def find_storages(graph: fx.Graph) -> tuple[list[Storage], Places]:
    """All storages of a graph in the order in which they appear.

    Args:
        graph: nodes carry fake (or meta) tensors in ``meta["val"]``; those without are taken to
            have no storage.

    Returns:
        The storages, and where each node's results are.
    """
    storages: list[Storage] = []
    places: Places = {}
    brought: dict[int, Storage] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        results = _results(node)
        found: list[Storage | None] = []
        for position, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                found.append(None)
                continue
            storage = _aliased(node, position, value, places)
            if storage is None and node.op in ("placeholder", "get_attr"):
                storage = brought.get(_identity(value))
            if storage is None:
                is_input = node.op in ("placeholder", "get_attr")
                storage = Storage(node, storage_bytes(value) if is_input else tensor_bytes(value))
                storages.append(storage)
                if is_input:
                    brought[_identity(value)] = storage
            if node not in storage.nodes[-1:]:
                storage.nodes.append(node)
            found.append(storage)
        places[node] = tuple(found)
    return storages, places


def _results(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _aliased(node: fx.Node, position: int, value: torch.Tensor, places: Places) -> Storage | None:
    """The storage that a result shares with an argument of its node, if it does."""
    target = node.target
    if node.op != "call_function":
        return None
    if target is operator.getitem:
        source, which = node.args
        held = places.get(source, ())  # type: ignore[arg-type]
        if isinstance(which, int) and which < len(held):
            return held[which]
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return _same_identity(value, node.all_input_nodes, places)
    name = target.name().split(".")[0]
    if name in _SILENT_VIEWS:
        return _first(places, node.args[0])
    sources = list(_schema_sources(node, target, position))
    if name in _PERHAPS_VIEWS:
        return _same_identity(value, sources, places)
    return _first(places, sources[0]) if sources else None


def _schema_sources(
    node: fx.Node, target: torch._ops.OpOverload, position: int
) -> Iterator[fx.Node]:
    """Arguments whose storage a result takes over, by the operator's schema."""
    for place, name in _aliased_arguments(target, position):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        if isinstance(given, fx.Node):
            yield given


@lru_cache(maxsize=4096)
def _aliased_arguments(target: torch._ops.OpOverload, position: int) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that may share their storage with a result."""
    returns = target._schema.returns
    result = returns[min(position, len(returns) - 1)] if returns else None
    if result is None or result.alias_info is None:
        return ()
    wanted = result.alias_info.before_set
    aliased = []
    for place, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        # A list of views (split) has a set of its own: its source is marked with a star.
        if info is not None and (info.before_set & wanted if wanted else "*" in info.after_set):
            aliased.append((place, str(argument.name)))
    return tuple(aliased)


def _first(places: Places, source: Any) -> Storage | None:
    held = places.get(source, ())
    return held[0] if held else None


def _same_identity(value: torch.Tensor, sources: list[fx.Node], places: Places) -> Storage | None:
    """The storage of the source whose fake tensor shares this one's storage."""
    wanted = _identity(value)
    for source in sources:
        for held, other in zip(places.get(source, ()), _results(source), strict=False):
            if held is not None and isinstance(other, torch.Tensor) and _identity(other) == wanted:
                return held
    return None


def _identity(value: torch.Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return id(value)


def tensor_bytes(value: torch.Tensor) -> int:
    """Bytes that a fresh tensor of this shape and strides takes."""
    extent = 1
    for size, stride in zip(value.size(), value.stride(), strict=True):
        if as_int(size) == 0:
            return 0
        extent += (as_int(size) - 1) * as_int(stride)
    return extent * value.element_size()


def storage_bytes(value: torch.Tensor) -> int:
    """Bytes of the storage that a tensor lives in."""
    try:
        return as_int(value.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return tensor_bytes(value)


def as_int(size: Any) -> int:
    """A size as a number; of a symbolic one the value it was traced with, 0 where it had none."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
