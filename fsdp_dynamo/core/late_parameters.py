"""Parameters added to a unit's modules after wrapping, which nothing would synchronise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

from torch import nn

from fsdp_dynamo.core.original_parameter import owner_of
from fsdp_dynamo.errors import FSDPStateError
from fsdp_dynamo.module_tree import UnitPaths, join_fqn

Walk = Callable[[], Iterable[tuple[str, nn.Module]]]


class LateParameterCheck:
    """Check that no trainable parameter was added to a unit's modules.

    A full walk takes as long as the hooks of a forward, so before each forward only the sizes and
    the children of the known modules are compared with those at the last walk.

    Args:
        modules: walks over the unit's modules with their FQNs, without nested units and ignored
            modules.
        ignored: parameters that the user synchronises.
    """

    def __init__(self, modules: Walk, ignored: set[nn.Parameter]) -> None:
        self._modules = modules
        self._ignored = ignored
        self._remember()

    def check(self, paths: UnitPaths) -> None:
        """Raise if modules have changed and one now has a trainable parameter of no unit.

        Raises:
            FSDPStateError: names the parameter.
        """
        if self._is_as_remembered():
            return
        for fqn, module in self._modules():
            for name, param in module._parameters.items():
                if self._is_late(param) and param.requires_grad:
                    raise _late_error(paths.fqn_of(join_fqn(fqn, name)))
        self._remember()

    def _is_late(self, param: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
        is_parameter = isinstance(param, nn.Parameter)
        return is_parameter and owner_of(param) is None and param not in self._ignored

    def _is_as_remembered(self) -> bool:
        if sum(map(len, self._entries)) != self._num_entries:
            return False
        for holder, name in self._absent:
            if holder.get(name) is not None:
                return False
        for param in self._frozen:
            if param.requires_grad:
                return False
        for held, children in self._children:  # noqa: SIM110  # a generator costs more than all of it
            if [*held.values()] != children:
                return False
        return True

    def _remember(self) -> None:
        found = [module for _, module in self._modules()]
        self._entries: list[dict[str, Any]] = [module._parameters for module in found]
        self._entries += [module._modules for module in found]
        self._num_entries = sum(map(len, self._entries))
        self._absent = [
            (module._parameters, name)
            for module in found
            for name, param in module._parameters.items()
            if param is None
        ]
        parameters = [param for module in found for param in module._parameters.values()]
        self._frozen = [param for param in parameters if self._is_late(param)]
        self._children = [
            (module._modules, [*module._modules.values()]) for module in found if module._modules
        ]


def _late_error(fqn: str) -> FSDPStateError:
    return FSDPStateError(
        expected="all trainable parameters in place when the model is wrapped",
        got="one that came later: each rank would train it by itself",
        where=f"parameter '{fqn}'",
        fix="Add it before wrapping, or wrap its module as a unit of its own "
        "(m.extra = FSDP(extra)); what you synchronise yourself goes into ignored_states.",
    )
