"""Modules that are units, and the units of a tree of modules."""

from __future__ import annotations

from torch import nn

from fsdp_dynamo.core.unit import Unit
from fsdp_dynamo.module_tree import unit_modules, wrapper_of


def units_in(module: nn.Module) -> list[Unit]:
    """The units of a module and of those below it; of a wrapped module, its wrapper's too."""
    wrapper = wrapper_of(module)
    outer = [] if wrapper is None else [wrapper]
    return [m._fsdp_unit for m in (*outer, *(m for _, m in unit_modules(module)))]
