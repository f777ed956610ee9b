"""The groups that are linked: a failure that is known in one of them reaches all of them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fsdp_dynamo.agreement.store import next_round, shared_store

Stores = dict[tuple[int, ...], Any]
"""Stores of groups, by their ranks."""

_Names = WeakKeyDictionary[dist.ProcessGroup, tuple[str, tuple[int, ...]]]
_names: WeakKeyDictionary[dist.ProcessGroup, _Names] = WeakKeyDictionary()
"""Names and ranks of the linked groups, by default group. Torch's names are local to a rank, so
groups of the same ranks are numbered."""

_stores: WeakKeyDictionary[dist.ProcessGroup, Stores] = WeakKeyDictionary()
"""Stores of the linked groups, by default group."""


def add_group(group: dist.ProcessGroup) -> tuple[Any, str] | None:
    """Link a group; returns its store and its name, the same on all of its ranks.

    ``None``: it is linked already, has one rank, or no shared store.
    """
    store = shared_store(group)
    default: Any = dist.group.WORLD
    names = _names.setdefault(default, WeakKeyDictionary())
    if store is None or group in names:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    linked_stores().setdefault(ranks, store)
    name = str(next_round("group", ranks))
    names[group] = name, ranks
    return store, name


def linked_stores() -> Stores:
    """Stores of all linked groups, by ranks; none if there is no default group."""
    default = dist.group.WORLD
    return {} if default is None else _stores.setdefault(default, {})


def stores_with(group: dist.ProcessGroup) -> Stores:
    """Stores of all linked groups and of another group, which has a shared store."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return {ranks: shared_store(group), **linked_stores()}


def linked_groups() -> list[tuple[dist.ProcessGroup, str, tuple[int, ...]]]:
    """Linked groups, with their names and ranks."""
    default: Any = dist.group.WORLD
    names = _names.get(default)
    return [] if names is None else [(group, *known) for group, known in list(names.items())]
