"""Parameters that come into a unit's modules after it was made, which nothing would synchronise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.errors import FSDPStateError

Walk = Callable[[], Iterable[tuple[str, nn.Module]]]


class Membership:
    """The modules of a unit as they were when it was made or looked at last.

    A look at all of them takes as long as a forward's hooks, so before each forward only the sizes
    and children of the modules known are compared.

    Args:
        modules: walks over the unit's modules with their FQNs; not into nested units and what is
            ignored.
        ignored: parameters that stay as they are.
    """

    def __init__(self, modules: Walk, ignored: set[nn.Parameter]) -> None:
        self._modules = modules
        self._ignored = ignored
        self._remember()

    def check(self, unit_fqn: str) -> None:
        """Raise for a trainable parameter that no unit holds, if anything has changed."""
        if (
            sum(map(len, self._sized)) == self._num_entries
            and all(holder.get(name) is None for holder, name in self._absent)
            and all(tuple(held.values()) == children for held, children in self._children)
        ):
            return
        for fqn, module in self._modules():
            for name, param in module._parameters.items():
                if (
                    isinstance(param, nn.Parameter)
                    and param.requires_grad
                    and owner_of(param) is None
                    and param not in self._ignored
                ):
                    raise _late_error(".".join(part for part in (unit_fqn, fqn, name) if part))
        self._remember()

    def _remember(self) -> None:
        found = [module for _, module in self._modules()]
        self._sized: list[dict[str, Any]] = [module._parameters for module in found]
        self._sized += [module._modules for module in found]
        self._num_entries = sum(map(len, self._sized))
        self._absent = [
            (module._parameters, name)
            for module in found
            for name, param in module._parameters.items()
            if param is None
        ]
        self._children = [
            (module._modules, tuple(module._modules.values()))
            for module in found
            if module._modules
        ]


def _late_error(fqn: str) -> FSDPStateError:
    return FSDPStateError(
        expected="all trainable parameters in place when the model is wrapped",
        got="one that came later: each rank would train it by itself",
        where=f"parameter '{fqn}'",
        fix="Add it before wrapping, or wrap its module as a unit of its own "
        "(m.extra = FSDP(extra)); what you synchronise yourself goes into ignored_states.",
    )
