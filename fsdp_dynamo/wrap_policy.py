"""Policies that choose which submodules become units.

A policy is a ``WrapPolicy`` (or torch's counterpart), or a callable ``policy(module=, recurse=,
nonwrapped_numel=) -> bool`` as FSDP1 has them.

Source: the names are those of ``torch.distributed.fsdp.wrap``.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from fsdp_dynamo.errors import FSDPTypeError, FSDPValueError, first_line
from fsdp_dynamo.module_tree import CHECKPOINTED, COMPILED

Targets = dict[nn.Module, dict[str, Any]]
"""Modules to wrap, each with constructor arguments that differ from the root's."""

CallablePolicy = Callable[..., bool]
"""Called with ``module``, ``recurse`` and ``nonwrapped_numel``, by name.

With ``recurse=True``: whether to visit the module's children, and then ask about the module itself
(``nonwrapped_numel``: elements of all its parameters). With ``recurse=False``, innermost modules
first: whether to wrap it (``nonwrapped_numel``: elements in no unit below it).
"""


class WrapPolicy(ABC):
    """Base class of policies; subclass it for your own."""

    @abstractmethod
    def targets(self, root: nn.Module, ignored: set[nn.Module]) -> Targets:
        """Choose modules below ``root`` to wrap.

        Args:
            root: the module being wrapped, which need not be returned.
            ignored: modules that must not be wrapped.

        Returns:
            The modules, each with constructor arguments that differ from the root's.
        """


class ModuleWrapPolicy(WrapPolicy):
    """Wrap every module of the given classes, subclasses included.

    Args:
        module_classes: for example ``{Block}``; empty: the root is the only unit.

    Raises:
        FSDPTypeError: not a collection of module classes.
        FSDPValueError: while a model is wrapped, if it has no module of the classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = (module_classes,) if isinstance(module_classes, type) else tuple(module_classes)
        if isinstance(module_classes, type):
            raise FSDPTypeError(
                f"ModuleWrapPolicy: expected a set of classes of modules, got {module_classes!r}. "
                "Pass the classes of the model's layers: ModuleWrapPolicy({Block})."
            )
        for cls in classes:
            if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
                raise FSDPTypeError(
                    "ModuleWrapPolicy: expected classes derived from torch.nn.Module, got "
                    f"{cls!r}. Pass the classes, not instances or names."
                )
        self.module_classes = classes

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        """Answer as a ``CallablePolicy``."""
        return recurse or isinstance(module, self.module_classes)

    def __repr__(self) -> str:
        names = ", ".join(cls.__name__ for cls in self.module_classes)
        return f"{type(self).__name__}({{{names}}})"

    def targets(self, root: nn.Module, ignored: set[nn.Module]) -> Targets:
        """Modules of the classes.

        Raises:
            FSDPValueError: there is none.
        """
        if not self.module_classes:
            return {}
        found: Targets = {
            module: {}
            for module in root.modules()
            if isinstance(module, self.module_classes) and module not in ignored
        }
        names = ", ".join(cls.__name__ for cls in self.module_classes)
        return _checked(found, root, f"modules of class {names}")


class CustomPolicy(WrapPolicy):
    """Wrap the modules that a function chooses.

    Args:
        lambda_fn: called with each module. ``True`` or ``False``, or a dict to wrap it with
            arguments of its own: ``sharding_strategy``, ``mixed_precision``,
            ``collective_precision``, ``backward_prefetch``, ``forward_prefetch``. An empty dict
            means ``False``.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Mapping[str, Any]]) -> None:
        self.lambda_fn = lambda_fn

    def __call__(self, module: nn.Module, recurse: bool, *_: Any, **__: Any) -> bool:
        """Answer as a ``CallablePolicy``."""
        return recurse or self._answer(module) is not None

    def targets(self, root: nn.Module, ignored: set[nn.Module]) -> Targets:
        """Modules that the function chooses.

        Raises:
            FSDPValueError: the function returned something else, or chose none.
        """
        found: Targets = {}
        for module in root.modules():
            if module in ignored:
                continue
            overrides = self._answer(module)
            if overrides is not None:
                found[module] = overrides
        return _checked(found, root, "modules for which the policy function is true")

    def _answer(self, module: nn.Module) -> dict[str, Any] | None:
        """Constructor arguments of the module's own; ``None``: do not wrap it."""
        answer = self.lambda_fn(module)
        if isinstance(answer, (bool, Mapping)):
            if not answer:
                return None
            return {} if answer is True else dict(answer)
        raise FSDPValueError(
            f"CustomPolicy on {type(module).__name__}: expected True, False or a dict of "
            f"constructor arguments, got {answer!r}. Return one of these from the policy function."
        )


def _checked(found: Targets, root: nn.Module, expected: str) -> Targets:
    if not found:
        present = ", ".join(sorted({type(module).__name__ for module in root.modules()}))
        raise FSDPValueError(
            f"argument 'auto_wrap_policy': expected {expected} in the module tree, got a policy "
            f"that matches nothing in a tree of: {present}. Name classes that the model has, or "
            "pass no policy to make it one unit.",
            see="a-policy-that-matches-nothing",
        )
    return found


def always_wrap_policy(*_: Any, **__: Any) -> bool:
    """Wrap every module."""
    return True


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: Iterable[type[nn.Module]],
) -> bool:
    """Wrap modules of some classes (``ModuleWrapPolicy`` as a callable).

    Args:
        module: as for every ``CallablePolicy``, like ``recurse`` and ``nonwrapped_numel``.
        transformer_layer_cls: the classes; bind them with ``functools.partial``.
    """
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def lambda_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    lambda_fn: Callable[[nn.Module], bool],
) -> bool:
    """Wrap the modules that a function chooses (``CustomPolicy`` as a callable).

    Args:
        module: as for every ``CallablePolicy``, like ``recurse`` and ``nonwrapped_numel``.
        lambda_fn: called with each module; bind it with ``functools.partial``.
    """
    return recurse or lambda_fn(module)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type[nn.Module]] | None = None,
    exclude_wrap_modules: Iterable[type[nn.Module]] | None = None,
) -> bool:
    """Wrap modules whose parameters in no unit yet have at least ``min_num_params`` elements.

    Args:
        module: as for every ``CallablePolicy``, like ``recurse`` and ``nonwrapped_numel``.
        min_num_params: number of elements.
        force_leaf_modules: classes of modules that are neither entered nor wrapped; by default the
            function's attribute ``FORCE_LEAF_MODULES``: ``nn.MultiheadAttention``.
        exclude_wrap_modules: classes of modules that are never wrapped; by default
            ``EXCLUDE_WRAP_MODULES``: ``nn.ModuleList`` and ``nn.ModuleDict``.
    """
    policy: Any = size_based_auto_wrap_policy
    refused = policy.FORCE_LEAF_MODULES if recurse else policy.EXCLUDE_WRAP_MODULES
    given = force_leaf_modules if recurse else exclude_wrap_modules
    classes = tuple(refused if given is None else given)
    return nonwrapped_numel >= min_num_params and not isinstance(module, classes)


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    policies: Iterable[CallablePolicy],
) -> bool:
    """Wrap the modules that any of the policies chooses; bind these with ``functools.partial``."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


def run_policy(
    policy: object,
    root: nn.Module,
    ignored: set[nn.Module],
    ignored_params: Collection[nn.Parameter] = (),
) -> Targets:
    """Return the targets of any policy below ``root``, without ``root`` itself.

    A target inside a checkpoint wrapper or a compiled module is replaced by that outer module.

    Args:
        policy: argument ``auto_wrap_policy``.
        ignored: modules that must not be wrapped.
        ignored_params: parameters that a callable's ``nonwrapped_numel`` leaves out.
    """
    if isinstance(policy, type):
        raise _wrong_policy(policy, f"ModuleWrapPolicy({{{policy.__name__}}})")
    if isinstance(policy, WrapPolicy):
        found = policy.targets(root, ignored)
    elif hasattr(policy, "_run_policy"):  # upstream's policy classes
        found = _checked(dict(policy._run_policy(root, ignored, {})), root, "modules to wrap")
    elif callable(policy):
        found = {}
        _run_callable(policy, root, ignored, ignored_params, found, set())
        if not found:
            warnings.warn(
                "auto_wrap_policy chose no module: the whole model is one unit", stacklevel=2
            )
    else:
        raise _wrong_policy(policy, "for example ModuleWrapPolicy({Block})")
    lifted: Targets = {}
    shells = _shells(root)
    for module, overrides in found.items():
        while module in shells:
            module = shells[module]
        lifted.setdefault(module, overrides)
    lifted.pop(root, None)
    return lifted


def _wrong_policy(policy: object, wanted: str) -> FSDPTypeError:
    return FSDPTypeError(
        "argument 'auto_wrap_policy': expected a WrapPolicy or a callable (module, recurse, "
        f"nonwrapped_numel) -> bool, got {policy!r}. Pass {wanted}."
    )


def _shells(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map modules inside a checkpoint wrapper or a compiled module to that outer module.

    The unit must be the outer module: then a recomputation runs inside the unit (one unshard for
    the whole backward), and a compiled module keeps the attributes that it has bound.
    """
    shells: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        for name in (CHECKPOINTED, COMPILED):
            inner = module._modules.get(name)
            if inner is not None:
                shells[inner] = module
    return shells


def _run_callable(
    policy: CallablePolicy,
    module: nn.Module,
    ignored: set[nn.Module],
    ignored_params: Collection[nn.Parameter],
    found: Targets,
    seen: set[nn.Module],
    is_root: bool = True,
) -> int:
    """Collect targets bottom-up; return how many elements of ``module`` are in units now."""
    numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    wrapped_numel = 0
    for child in module.children():
        if child not in ignored and child not in seen:
            seen.add(child)
            wrapped_numel += _run_callable(
                policy, child, ignored, ignored_params, found, seen, is_root=False
            )
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped_numel):
        return wrapped_numel
    found[module] = {}
    return numel


# -- trace order -----------------------------------------------------------------------------------
# A symbolic trace shows in which order a module uses its parameters, without computing anything.
# A policy can use it: parameters used together belong in one unit, unused ones in none.


@dataclass(frozen=True)
class ExecutionTrace:
    """Modules and parameters that a forward uses, in the order of first use.

    Attributes:
        modules: by FQN; containers before the modules that they call.
        parameters: by FQN; tied parameters under the name of their first use.
    """

    modules: dict[str, nn.Module]
    parameters: dict[str, nn.Parameter]

    def uses(self, module: nn.Module) -> bool:
        """Whether the forward calls this module."""
        return any(module is called for called in self.modules.values())


def trace_execution(
    module: nn.Module, concrete_args: Mapping[str, Any] | None = None
) -> ExecutionTrace:
    """Trace a module's forward with symbols in place of tensors; the module is not changed.

    Args:
        module: a module that ``torch.fx`` can trace.
        concrete_args: inputs that are values instead of symbols, by name: flags that the forward
            branches on.

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
    """Tracer that records modules and parameters at their first use."""

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


__all__ = [
    "CallablePolicy",
    "CustomPolicy",
    "ExecutionTrace",
    "ModuleWrapPolicy",
    "Targets",
    "WrapPolicy",
    "always_wrap_policy",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "trace_execution",
    "transformer_auto_wrap_policy",
]
