"""Groups by their names, and state that belongs to a group and is dropped with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

State = TypeVar("State")

_states: WeakKeyDictionary[dist.ProcessGroup, dict[Callable[[], Any], Any]] = WeakKeyDictionary()


def group_named(name: str) -> dist.ProcessGroup:
    """Return the group with a registered name, which graphs hold in its place."""
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined,arg-type]
    return group


def state_of(group: dist.ProcessGroup | None, kind: Callable[[], State]) -> State:
    """Return the group's only object of a class, made at its first use.

    The object must not refer to the group, which would never be freed.

    Args:
        group: the default group for state of the whole job; without one, the object is new.
        kind: the class. Two purposes need two classes.
    """
    if group is None:
        return kind()
    states = _states.get(group)
    if states is None:
        states = _states[group] = {}
    state: State | None = states.get(kind)
    if state is None:
        state = states[kind] = kind()
    return state


def states_of(kind: Callable[[], State]) -> list[State]:
    """Return the objects of a class of all groups that have one."""
    return [states[kind] for states in list(_states.values()) if kind in states]
