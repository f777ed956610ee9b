"""In which order a module uses its parameters, by a symbolic trace: nothing is computed.

For wrap policies: what is used together belongs into one unit, and what is never used into none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fsdp_dynamo.errors import FSDPValueError, first_line


@dataclass(frozen=True)
class ExecutionTrace:
    """Modules and parameters that a forward uses, in the order of first use.

    Attributes:
        modules: by FQN; containers before what they call.
        parameters: by FQN; tied ones under the name of their first use.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]

    def uses(self, module: nn.Module) -> bool:
        """Whether the forward calls this module; what a policy may ask."""
        return any(module is called for called in self.modules.values())


def trace_execution(
    module: nn.Module, concrete_args: Mapping[str, Any] | None = None
) -> ExecutionTrace:
    """Follow a module's forward with symbols in place of tensors.

    Args:
        module: a module that ``torch.fx`` can trace. It is not changed.
        concrete_args: inputs that are values, not symbols: flags that the forward branches on,
            by name.

    Raises:
        FSDPValueError: the forward depends on the values of its inputs.
    """
    tracer = _Recorder()
    try:
        tracer.trace(module, dict(concrete_args) if concrete_args else None)
    except (fx.proxy.TraceError, TypeError) as error:
        raise FSDPValueError(
            f"trace_execution({type(module).__name__}): expected a forward that does not depend on "
            f"its inputs' values, got {first_line(error)}. Pass flags as concrete_args, or "
            "trace the submodules one by one."
        ) from error
    return ExecutionTrace(tracer.modules, tracer.parameters)


class _Recorder(fx.Tracer):
    """Notes modules and parameters when they are first used; each is looked at once."""

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[str, nn.Module] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._seen: set[nn.Module | nn.Parameter] = set()

    def call_module(
        self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        if m not in self._seen:
            self._seen.add(m)
            self.modules[path] = m
            if self.is_leaf_module(m, path):
                for name, param in m.named_parameters():
                    self._use(f"{path}.{name}", param)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """Called by ``torch.fx`` for each attribute of a module that is not a module."""
        proxy = super().getattr(attr, attr_val, parameter_proxy_cache)
        if isinstance(attr_val, nn.Parameter):
            self._use(proxy.node.target, attr_val)
        return proxy

    def _use(self, fqn: str, param: nn.Parameter) -> None:
        if param not in self._seen:
            self._seen.add(param)
            self.parameters[fqn] = param


__all__ = ["ExecutionTrace", "trace_execution"]
