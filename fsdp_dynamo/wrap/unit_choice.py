"""Modules below the root that become units of their own: a policy's, and those in full precision.

Under mixed precision some classes of modules (``_module_classes_to_ignore``: batch norms) compute
in their own data type. Where a policy chooses units they are units of their own, as upstream's are;
elsewhere they stay in their unit, in a flat parameter of their own (``wrap/build.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fsdp_dynamo.config import MixedPrecision
from fsdp_dynamo.core.unit import UnitConfig
from fsdp_dynamo.eager.hooks import keep_module_precision
from fsdp_dynamo.errors import FSDPValueError
from fsdp_dynamo.module_tree import WRAPPED, WRAPPER_NAMES, is_unit, plain_fqn, raw_named_modules
from fsdp_dynamo.wrap.arguments import override
from fsdp_dynamo.wrap.build import Ignored, managed_modules
from fsdp_dynamo.wrap_policy import Targets, run_policy


@dataclass
class Chosen:
    """Units below the root.

    Attributes:
        configs: by module.
        kept: those that mixed precision leaves alone.
    """

    configs: dict[nn.Module, UnitConfig] = field(default_factory=dict)
    kept: set[nn.Module] = field(default_factory=set)


def choose_units(
    root: nn.Module, policy: object | None, ignored: Ignored, config: UnitConfig
) -> Chosen:
    """The units below ``root``; changes nothing.

    Args:
        root: the module being wrapped.
        policy: argument ``auto_wrap_policy``.
        ignored: what stays as it is.
        config: the root's.

    Raises:
        FSDPError: a subclass, for a policy that is none, that chooses nothing, or that chooses a
            module which is in a unit already.
    """
    if policy is None:
        return Chosen()
    found = run_policy(policy, root, ignored.modules, ignored.parameters)
    _refuse_wrapped(root, found)
    free = {module for _, module in managed_modules(root, ignored)}
    configs = {m: override(config, changes) for m, changes in found.items() if m in free}
    kept = list(_full_precision_modules(root, ignored, config.precision))
    if kept:
        names = ", ".join(sorted({type(module).__name__ for module in kept}))
        warnings.warn(
            f"mixed precision and auto_wrap_policy: modules of class {names} become units of their "
            "own in full precision",
            stacklevel=6,
        )
    for module in kept:
        configs[module] = replace(configs.get(module, config), precision=None)
    return Chosen(configs, set(kept))


def _refuse_wrapped(root: nn.Module, found: Targets) -> None:
    """Raise if a policy has chosen a unit, or a module in one."""
    for fqn, module in raw_named_modules(root):
        if module in found and (is_unit(module) or WRAPPED in fqn.split(".")):
            raise FSDPValueError(
                expected="a policy that chooses modules in no unit",
                got=f"a {type(module).__name__} that is wrapped already",
                where=f"argument 'auto_wrap_policy', module '{plain_fqn(fqn)}'",
                fix="Wrap by policy alone, or leave what you wrap by hand out of the policy.",
                see="wrapped-twice",
            )


def _full_precision_modules(
    root: nn.Module, ignored: Ignored, precision: MixedPrecision | None
) -> Iterator[nn.Module]:
    """Modules that mixed precision leaves alone.

    Those inside checkpoint wrappers and compiled modules are left out: they run as one.
    """
    if precision is None:
        return
    classes = tuple(precision._module_classes_to_ignore)

    def enters(module: nn.Module) -> bool:
        return module not in ignored.modules and not is_unit(module)

    for fqn, module in raw_named_modules(root, enters):
        is_inside = not WRAPPER_NAMES.isdisjoint(fqn.split("."))
        if isinstance(module, classes) and module is not root and not is_inside:
            yield module


def keep_full_precision(root: nn.Module, chosen: Chosen, config: UnitConfig) -> None:
    """Let units in full precision take and give what the units around them compute with."""
    missing = set(chosen.kept)

    def visit(module: nn.Module, around: MixedPrecision | None) -> None:
        for child in module.children():
            if child in missing and around is not None:
                missing.remove(child)
                keep_module_precision(child, _own_dtype(child))
            if not is_unit(child):
                inside = chosen.configs.get(child)
                visit(child, around if inside is None else inside.precision)

    visit(root, config.precision)


def _own_dtype(module: nn.Module) -> torch.dtype:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return dtypes[0] if dtypes else torch.float32
