"""Names of modules and parameters in the plain model, and walks over a tree with wrappers in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


def join_fqn(*parts: str) -> str:
    """Join FQN parts, leaving empty ones out."""
    return ".".join(part for part in parts if part)


@dataclass(frozen=True)
class UnitPaths:
    """Where the modules of one unit are: their FQNs below the root.

    A unit of several modules calls its parameters ``0.weight``, ``1.weight``, by the position of
    the module, until a root gives the modules their names.
    """

    paths: tuple[str, ...]

    @property
    def name(self) -> str:
        """The unit's name: the FQN of its module, or ``norm+output`` of two."""
        return "+".join(self.paths)

    def fqn_of(self, relative: str) -> str:
        """The FQN of a parameter, of which the unit knows the part below itself."""
        if len(self.paths) == 1:
            return join_fqn(self.paths[0], relative)
        position, _, rest = relative.partition(".")
        return join_fqn(self.paths[int(position)], rest)


WRAPPED = "_fsdp_wrapped_module"
"""Name of the child of a wrapper that is the user's module."""

WRAPPER = "_fsdp_wrapper"
"""Attribute of a wrapped module: a weak reference to its wrapper."""

UNIT = "_fsdp_own_unit"
"""Attribute of a module that is a unit: its ``core.unit.Unit``."""

COMPILED = "_orig_mod"
"""Name of the model in what ``torch.compile(model)`` returns."""

CHECKPOINTED = "_checkpoint_wrapped_module"
"""Name of the module inside torch's checkpoint wrapper."""

WRAPPER_NAMES = frozenset({WRAPPED, CHECKPOINTED, COMPILED})


def is_unit(module: object) -> bool:
    """Whether a module is a unit: a wrapper, or a module of ``fully_shard``.

    Only the module's own ``__dict__`` counts: wrappers of other libraries forward attributes of
    what they wrap.
    """
    return isinstance(module, nn.Module) and UNIT in module.__dict__


def is_inside_wrapper(prefix: str) -> bool:
    """Whether a module with this prefix is held directly by an FSDP wrapper."""
    names = reversed(prefix.rstrip(".").split("."))
    return WRAPPED in itertools.takewhile(WRAPPER_NAMES.__contains__, names)


def plain_fqn(name: str) -> str:
    """Remove the names that wrappers put into an FQN."""
    return ".".join(part for part in name.split(".") if part not in WRAPPER_NAMES)


def raw_named_modules(
    module: nn.Module,
    enters: Callable[[nn.Module], bool] = lambda _: True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Any]]:
    """``named_modules`` with the wrappers' own names kept.

    Args:
        module: where to begin.
        enters: whether to walk into a child.
        remove_duplicate: as in ``named_modules``.
    """
    stack: list[tuple[str, nn.Module]] = [("", module)]
    seen: set[nn.Module] = set()
    while stack:
        name, current = stack.pop()
        if remove_duplicate and current in seen:
            continue
        seen.add(current)
        yield name, current
        children = [(n, c) for n, c in current._modules.items() if c is not None and enters(c)]
        stack.extend((join_fqn(name, n), c) for n, c in reversed(children))


def unit_modules(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """All units in a tree by plain FQN, outermost first; ``module`` may be one itself."""
    return ((plain_fqn(name), m) for name, m in raw_named_modules(module) if is_unit(m))


def wrapper_of(module: nn.Module) -> Any:
    """The wrapper right around a module, or ``None``; a copy of the module alone has none."""
    reference = module.__dict__.get(WRAPPER)
    wrapper = None if reference is None else reference()
    return wrapper if wrapper is not None and wrapper._modules[WRAPPED] is module else None


def without_wrapper_names(text: str) -> str:
    """Remove the names that wrappers put into the FQNs of a text."""
    for name in WRAPPER_NAMES:
        text = text.replace(f"{name}.", "")
    return text
