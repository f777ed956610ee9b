"""Conditions under which a unit's body becomes a region."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graph_passes.graph_utils import written_by


def why_not(body: fx.GraphModule, inputs: list[fx.Node], outputs: list[fx.Node]) -> str | None:
    """The reason why a body cannot be a region; ``None`` if it can.

    Args:
        body: the body as a graph of its own.
        inputs: what it is called with.
        outputs: what it gives back.
    """
    known = [node.meta.get("example_value") for node in (*inputs, *outputs)]
    values = [value for value in known if isinstance(value, torch.Tensor)]
    if len(values) < len(known):
        return "an input or an output is not a tensor"
    if any(hasattr(value, "__tensor_flatten__") for value in values):
        return "an input or an output is a tensor subclass"
    if any(not isinstance(size, int) for value in values for size in value.shape):
        return "a shape is dynamic"
    if any(_is_symbolic(node) for node in body.graph.nodes):
        return "a number in it is dynamic"
    storages = [_storage(value) for value in values]
    if len(set(storages)) < len(storages):
        return "an input or an output is a view of another"
    if _writes_to_an_input(body, values[: len(inputs)]):
        return "it writes to an input"
    return None


def carrying_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that gradients come to when they come to all outputs of a graph.

    Args:
        graph: a graph as Dynamo hands it to a backend.
    """
    carrying: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or node in carrying:
            carrying.update(source for source in node.all_input_nodes if _requires_grad(source))
    return carrying


def passes_gradients(
    nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], carrying: set[fx.Node]
) -> bool:
    """Whether a gradient comes to each input and output that requires one. To those of a region
    torch gives zeros where none comes.

    Args:
        nodes: the run.
        inputs: nodes outside that it uses.
        outputs: those of its nodes that are used outside.
        carrying: the nodes of the whole graph that a gradient comes to.
    """
    if not torch.is_grad_enabled():
        return True
    users = carrying.intersection(nodes)
    reached = [node in carrying for node in outputs if _requires_grad(node)]
    reached += [not users.isdisjoint(node.users) for node in inputs if _requires_grad(node)]
    return all(reached)


def _requires_grad(node: fx.Node) -> bool:
    leaves = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in leaves)


def last_changes(graph: fx.Graph) -> dict[int, int]:
    """Positions of the last nodes that change tensors, by the tensors' storages.

    What an operation in place returns is the tensor that it was given; an assignment to an item
    returns nothing. Both raise the tensor's version.

    Args:
        graph: a graph as Dynamo hands it to a backend.
    """
    changes: dict[int, int] = {}
    for position, node in enumerate(graph.nodes):
        result = node.meta.get("example_value")
        for source in node.all_input_nodes if node.op != "output" else ():
            value = source.meta.get("example_value")
            if not isinstance(value, torch.Tensor) or not value._version:
                continue
            if result is value or result is None:
                changes[_storage(value)] = position
    return changes


def changed_after(inputs: list[fx.Node], position: int, changes: dict[int, int]) -> bool:
    """Whether an input of a region is changed when the region has run: its backward reads it."""
    if not changes:
        return False
    values = (node.meta.get("example_value") for node in inputs)
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return any(changes.get(_storage(value), -1) > position for value in tensors)


def _is_symbolic(node: fx.Node) -> bool:
    """Whether a node gives numbers that are not known, as those that change between calls."""
    leaves = tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) for value in leaves)


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _writes_to_an_input(body: fx.GraphModule, values: list[torch.Tensor]) -> bool:
    """Whether an operator of a run on fake tensors says that it writes to an input's memory."""
    mode = detect_fake_mode(values)
    if mode is None:
        raise ValueError("regions: expected a graph whose inputs carry fake example values")
    with mode, torch.no_grad(), _Writes() as writes:
        copies = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values
        ]
        with enable_python_dispatcher():  # batch norm with the operator that names its writes
            body(*copies)
    return any(_storage(copy) in writes.storages for copy in copies)


class _Writes(TorchDispatchMode):
    """Notes the storages that operators write to, as their schemas say.

    Versions do not tell: batch norm writes its running statistics without raising them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = written_by(func._schema, args, kwargs)
        self.storages |= {_storage(value) for value in written if value is not None}
        return func(*args, **kwargs)
