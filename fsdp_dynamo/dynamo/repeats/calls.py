"""What a call is made with, and keys that differ where calls cannot be equal."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._subclasses import FakeTensor
from torch.fx import traceback

from fsdp_dynamo.dynamo.repeats.changes import NotRepeatedError

LEAVES = (TensorVariable, SymNodeVariable)
"""What has a node in the graph."""
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Kind(NamedTuple):
    """What is known of a call beforehand.

    Attributes:
        equal: calls in which this differs are not equal.
        texts: constants in the nodes that differ from call to call, in one order.
        marks: entries of ``node.meta["custom"]`` that differ from call to call.
        own_marks: those of inputs of the graph that are the module's own.
    """

    equal: Hashable
    texts: tuple[str, ...]
    marks: dict[str, str]
    own_marks: dict[str, str]


@dataclass
class Call:
    """A call, as Dynamo meets it.

    Attributes:
        tx: Dynamo's translator.
        kind: what is known beforehand.
        source: where Dynamo has found the module.
        leaves: tensors and symbolic numbers in the arguments.
        containers: lists and dicts in the arguments.
        key: differs where calls cannot be equal.
        path: the modules around the call, as nodes have them in ``nn_module_stack``.
        found: what was looked up, by source.
    """

    tx: Any
    kind: Kind
    source: Any
    leaves: list[Any]
    containers: list[Any]
    key: Hashable
    path: dict[str, Any]
    found: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, tx: Any, kind: Kind, module: Any, own: Any, others: list[Any]) -> Call:
        """A call of ``fn(name, module, own, settings, *others)``.

        Args:
            tx: Dynamo's translator.
            kind: of its name and settings.
            module: the variable of the module.
            own: that of inputs which are the module's own.
            others: those of arguments in which equal calls are equal.

        Raises:
            NotRepeatedError: such a call is always traced.
        """
        if tx.output.current_tracer.parent is not None:
            raise NotRepeatedError("it is traced in the body of an operator")
        if tx.symbolic_torch_function_state.in_torch_function_mode():
            raise NotRepeatedError("a torch function mode is active")
        module = module.realize()
        if module.source is None:
            raise NotRepeatedError("its module is made in the trace")
        mine, shared = Reader(compares_sources=False), Reader(compares_sources=True)
        with traceback.annotate(kind.own_marks):
            given = [mine.key_of(own)]
        given += [shared.key_of(one) for one in others]
        key = (type(module.value), kind.equal, tuple(given), _ambient())
        leaves, containers = mine.leaves + shared.leaves, mine.containers + shared.containers
        return cls(tx, kind, module.source, leaves, containers, key, dict(tx.nn_module_stack))

    @property
    def nodes(self) -> list[fx.Node]:
        """Nodes of ``leaves``."""
        return [leaf.as_proxy().node for leaf in self.leaves]

    def value_at(self, source: Any) -> Any:
        """What is there now, where Dynamo would find it."""
        root = self.tx.output.root_tx
        return source.get_value({"G": root.f_globals, "L": root.f_locals}, {}, self.found)


def found_in(result: Any) -> Reader:
    """What is in the result of a call.

    Raises:
        NotRepeatedError: it holds what can't be made again.
    """
    reader = Reader(compares_sources=False)
    reader.key_of(result)
    return reader


@dataclass
class Reader:
    """Reads arguments and results.

    Attributes:
        compares_sources: whether those of tensors and objects are in keys.
        leaves: tensors and symbolic numbers read.
        containers: lists and dicts read.
    """

    compares_sources: bool
    leaves: list[Any] = field(default_factory=list)
    containers: list[Any] = field(default_factory=list)

    def key_of(self, variable: Any) -> Hashable:
        """Equal for what may stand for each other."""
        variable = variable.realize()
        source = variable.source if self.compares_sources else None
        if type(variable) in LEAVES:
            return source, *self._leaf_key(variable)
        if type(variable) in (TupleVariable, ListVariable):
            if type(variable) is ListVariable:
                self.containers.append(variable)
            return type(variable), tuple([self.key_of(item) for item in variable.items])
        if type(variable) is ConstDictVariable:
            self.containers.append(variable)
            names = [_constant_key(key.vt) for key in variable.items]
            values = [self.key_of(value) for value in variable.items.values()]
            return ConstDictVariable, tuple(names), tuple(values)
        if variable.is_python_constant():
            return _constant_key(variable)
        if source is not None:  # the same object
            return type(variable), source
        raise NotRepeatedError(f"it takes or returns a {type(variable).__name__}")

    def _leaf_key(self, variable: Any) -> tuple[Hashable, ...]:
        node = variable.as_proxy().node
        nodes = [leaf.as_proxy().node for leaf in self.leaves]
        self.leaves.append(variable)
        first = nodes.index(node) if node in nodes else None
        return first, _value_key(node.meta.get("example_value"))


def _constant_key(variable: Any) -> Hashable:
    try:
        value = variable.as_python_constant()
        hash(value)
    except (NotImplementedError, TypeError):
        raise NotRepeatedError(f"it takes or returns a {type(variable).__name__}") from None
    return type(value), repr(value) if isinstance(value, float) else value


def _value_key(value: Any) -> Hashable:
    if isinstance(value, _SYMBOLS):
        return type(value), str(value.node.expr)
    if type(value) is not FakeTensor or value.layout is not torch.strided:
        raise NotRepeatedError(f"it takes or returns a {type(value).__name__}")
    sizes = [s if isinstance(s, int) else str(s.node.expr) for s in (*value.shape, *value.stride())]
    return value.dtype, value.device, tuple(sizes), tuple(_flags(value))


def _flags(value: torch.Tensor) -> Iterator[bool]:
    yield value.requires_grad
    yield value.is_leaf
    yield value.is_conj()
    yield value.is_neg()
    yield value.is_inference()


def _ambient() -> Hashable:
    """What operators depend on beside their arguments."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_cache_enabled(),
        tuple([(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]),
        repr(traceback.get_current_meta().get("custom")),
    )
