"""Users' hooks on layers inside units (``register_forward_hook`` and its relatives).

Dynamo traces such hooks into the code of a unit, which equal units share, without guards on them.
So a unit with hooks inside is not compiled: it runs eagerly between its compiled neighbours, and
every hook is called once, with real tensors. It is no leaf of a graph either, whose output is
computed once with fake tensors: a graph ends at it, unless it was traced before it got the hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

HookTables = list[Mapping[int, Callable[..., Any]]]

_LIBRARIES = ("torch", "transformers", "fsdp_dynamo")
"""Packages whose own hooks are the same in equal units, so that these can share code with them:
torch's of tensor parallelism, and those of transformers that record outputs of layers."""


def hook_tables(module: nn.Module) -> HookTables:
    """Where the hooks of all modules of a tree are; these stay the same objects."""
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
    """Whether there are users' hooks in some tables; most often they are all empty."""
    return any(tables) and not all(_is_of_a_library(h) for table in tables for h in table.values())


def _is_of_a_library(hook: Any) -> bool:
    """Whether a hook was not written by the user."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] in _LIBRARIES
