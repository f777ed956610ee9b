"""Predicates and look-ups on FX graphs of collectives, and equality of their nodes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from graph_passes.markers import COLLECTIVE, mark_of

_C10D = "_c10d_functional::"
_WAIT = "_c10d_functional::wait_tensor"
COLLECTIVES = (_C10D, "fsdp_dynamo_collectives::")
"""Namespaces of collectives: torch's, and those with a gather plan as their last argument."""


def op_name(node: fx.Node) -> str:
    """Return the qualified name of the ATen or c10d operator that a node calls, else ``""``."""
    return _name_of(node.target) if node.op == "call_function" else ""


@lru_cache(maxsize=4096)
def _name_of(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target.name()).split(".")[0]
    if isinstance(target, torch._ops.OpOverloadPacket):  # in graphs that Dynamo hands over
        return str(target._qualified_op_name)
    return ""


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a marked collective."""
    return op_name(node) == _WAIT and is_marked(node.all_input_nodes[0])


def is_collective(node: fx.Node) -> bool:
    """Whether a node is a marked collective.

    Unmarked collectives belong to others (tensor parallelism). Like compute, they keep their order.
    """
    name = op_name(node)
    return name.startswith(COLLECTIVES) and name != _WAIT and is_marked(node)


def is_marked(node: fx.Node) -> bool:
    """Whether a node has the mark of a collective."""
    return COLLECTIVE in (node.meta.get("custom") or {})


def is_gather(node: fx.Node) -> bool:
    """Whether a node is a marked all-gather."""
    return is_collective(node) and mark_of(node).kind == "all_gather"  # type: ignore[union-attr]


def is_reduction(node: fx.Node) -> bool:
    """Whether a node is a marked reduce-scatter or all-reduce."""
    return is_collective(node) and not is_gather(node)


def is_region(node: fx.Node) -> bool:
    """Whether a node calls a region: a graph that is compiled once for all its calls."""
    return node.op == "call_function" and node.target is torch.ops.higher_order.invoke_subgraph


def body_of(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph of the region that a node calls, if it does."""
    module = node.graph.owning_module
    if not is_region(node) or module is None:
        return None
    body = module.get_submodule(node.all_input_nodes[0].target)  # type: ignore[arg-type]
    return body if isinstance(body, fx.GraphModule) else None


def is_checkpointed(node: fx.Node, value: Any) -> bool:
    """Whether an attribute is a checkpointed body in which no operator has a body of its own.

    ``node`` takes the attribute ``value`` in a Dynamo graph.
    """
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    if not isinstance(value, fx.GraphModule) or {user.target for user in node.users} != {
        checkpoint
    }:
        return False
    return all(inner.op not in ("get_attr", "call_module") for inner in value.graph.nodes)


def wait_of(node: fx.Node) -> fx.Node:
    """Return the only wait of a collective.

    Raises:
        ValueError: it has none, or several.
    """
    waits = [user for user in node.users if is_wait(user)]
    if len(waits) != 1:
        raise ValueError(f"collective {node.name}: expected one wait, got {len(waits)}")
    return waits[0]


def collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """Yield all marked collectives, in graph order."""
    return (node for node in graph.nodes if is_collective(node))


def order_index(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the position of every node."""
    return {node: i for i, node in enumerate(graph.nodes)}


def num_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensors; 0 without metadata. Symbolic sizes count as hinted."""
    tensors = [value for value in values_of(node) if isinstance(value, torch.Tensor)]
    return sum(hint(tensor.numel()) * tensor.element_size() for tensor in tensors)


def values_of(node: fx.Node) -> list[Any]:
    """Return the values of a node from its metadata; lists and dicts are flattened."""
    value = node.meta.get("val")
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def storage_of(value: Any) -> int:
    """Return an identity of the storage of a tensor; 0 for other values."""
    return int(value.untyped_storage()._cdata) if isinstance(value, torch.Tensor) else 0


def hint(number: int | torch.SymInt) -> int:
    """Return a symbolic number's example value, without a guard on it."""
    return int(number.node.hint or 0) if isinstance(number, torch.SymInt) else int(number)


def group_of(collective: fx.Node) -> str:
    """Return the registered name of a collective's process group."""
    return str([arg for arg in collective.args if isinstance(arg, str)][-1])


def world_size_of(collective: fx.Node) -> int | None:
    """Return the ranks of a gather's or scatter's group; all-reduces do not state it."""
    sizes = [arg for arg in collective.args if isinstance(arg, int)]
    return sizes[0] if sizes else None


def plan_of(collective: fx.Node) -> tuple[int, ...]:
    """Return the encoded gather plan of a gather or scatter; empty if it has none."""
    plan = collective.args[-1]
    return tuple(plan) if isinstance(plan, (list, tuple)) else ()  # type: ignore[arg-type]


def packed_bytes(collective: fx.Node) -> int:
    """Return the bytes of a collective's packed message, 0 if it has none.

    The message exists beside the unsharded buffer while the collective is in flight.
    """
    plan, size = plan_of(collective), world_size_of(collective)
    if not plan or size is None:
        return 0
    widths = plan[2 + 2 * plan[0] :: 2]  # after two numbers, and two for each direct slice
    return sum(widths) * size * int(collective.all_input_nodes[0].meta["val"].dtype.itemsize)


def payload_bytes(collective: fx.Node) -> int:
    """Return the bytes of the unsharded side of a collective."""
    return max(num_bytes(n) for n in (collective, *collective.all_input_nodes))


def payload_numel(collective: fx.Node) -> int:
    """Return the elements of the unsharded side of a collective."""
    itemsize: int = collective.all_input_nodes[0].meta["val"].dtype.itemsize
    return payload_bytes(collective) // itemsize


def mutates(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node writes into a tensor that is one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and source in written_by(schema, node.args, node.kwargs)


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to by its schema; lists are flattened."""
    given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.is_write]
    lists = (value if isinstance(value, (list, tuple)) else (value,) for value in written)
    return list(chain.from_iterable(lists))


def is_backward(graph: fx.Graph) -> bool:
    """Whether a partitioned graph is a backward graph: it has tangents among its inputs."""
    inputs = graph.find_nodes(op="placeholder", sort=False)
    return any("tangents" in node.name for node in reversed(inputs))  # they come last


_VIEWS = """
    view _unsafe_view reshape t transpose permute detach alias expand split split_with_sizes
    slice select unsqueeze squeeze as_strided unbind
"""
_NO_COMPUTE = frozenset(f"aten::{name}" for name in _VIEWS.split()) | {"fsdp_dynamo_grad::new_flat"}


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares its input's memory and holds the same values."""
    name = op_name(node)
    return name.startswith("aten::") and name in _NO_COMPUTE


def is_alias(node: fx.Node) -> bool:
    """Whether a node is a view, or one of the views that an operator such as ``split`` returns."""
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0])
    return is_view(node)


def is_compute(node: fx.Node) -> bool:
    """Whether a node computes: it is no collective, view or buffer."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
        return True  # a region, FlexAttention, a Triton kernel
    name = op_name(node)
    if name.startswith(COLLECTIVES):
        return not is_collective(node) and not is_wait(node)
    return bool(name) and name not in _NO_COMPUTE


# -- source digest ---------------------------------------------------------------------------------
# Hash of a package's sources, a part of cache keys.


@cache  # by the first call: later edits of the files do not change the code that runs
def source_digest(folder: Path) -> str:
    """Return a hash of all Python files below a folder, paths included."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


# -- node equality ---------------------------------------------------------------------------------
# Equality of nodes and values: whether one graph can replace another.


def value_key(value: Any, is_placed: bool = True) -> Any:
    """Return a hashable key, equal for values that are the same to a compiled graph.

    Tensors are compared by shape, stride, offset, dtype, device and ``requires_grad``; objects that
    are neither tensors nor plain constants by identity.

    Args:
        value: value of a node.
        is_placed: whether a tensor's offset in its storage matters. It differs between ranks whose
            batches are parts of one tensor.
    """
    if isinstance(value, torch.Tensor):
        return (
            type(value),
            tuple(map(str, value.shape)),
            tuple(map(str, value.stride())),
            str(value.storage_offset()) if is_placed else "",
            value.dtype,
            value.device,
            value.requires_grad,
        )
    if isinstance(value, float):
        return (float, repr(value))  # nan equals itself, 0.0 is not -0.0
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), str(value))
    if value is None or isinstance(
        value, (bool, int, complex, str, bytes, torch.dtype, torch.device, torch.layout)
    ):
        return (type(value), value)
    return (type(value), id(value))


class Numbered:
    """Nodes of a part of a graph, compared by their position in it.

    Args:
        nodes: inputs and nodes of the part, in order.
        stands_for: maps another node to the node of the part that it stands for.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], stands_for: Callable[[fx.Node], fx.Node] = lambda n: n
    ) -> None:
        self._number = {node: position for position, node in enumerate(nodes)}
        self._stands_for = stands_for

    def key_of(self, node: fx.Node) -> Any:
        """Return a key that is equal for nodes that do the same with the same arguments."""
        return node.op, value_key(node.target), self.plain(node.args), self.plain(node.kwargs)

    def plain(self, value: Any) -> Any:
        """Return the key of an argument."""
        if isinstance(value, fx.Node):
            number = self._number.get(value)
            return ("node", self._number[self._stands_for(value)] if number is None else number)
        if isinstance(value, (list, tuple)):
            return (type(value), *map(self.plain, value))
        if isinstance(value, dict):
            return (dict, *((key, self.plain(value[key])) for key in value))
        if isinstance(value, slice):
            return (slice, *map(self.plain, (value.start, value.stop, value.step)))
        return value_key(value)


def body_key(body: fx.GraphModule) -> Any:
    """Return a key that is equal for bodies of operators that do the same, under any names."""
    nodes = list(body.graph.nodes)
    numbered = Numbered(nodes)
    does = [
        (node.op, numbered.plain(node.args))
        if node.op in ("placeholder", "output")
        else attribute_key(body, node)
        if node.op == "get_attr"
        else numbered.key_of(node)
        for node in nodes
    ]
    meta = sorted((name, value_key(value)) for name, value in body.meta.items())
    return ("graph", *does, *meta)


def attribute_key(owner: fx.GraphModule, node: fx.Node) -> Any:
    """Return the key of an attribute of a graph.

    Bodies of operators are equal if they do the same; anything else equals only itself.

    Args:
        owner: module of the graph.
        node: node that takes the attribute.
    """
    value = operator.attrgetter(str(node.target))(owner)
    return body_key(value) if isinstance(value, fx.GraphModule) else ("attribute", id(value))


__all__ = [
    "Numbered",
    "attribute_key",
    "body_key",
    "body_of",
    "collectives",
    "group_of",
    "hint",
    "is_alias",
    "is_backward",
    "is_collective",
    "is_compute",
    "is_gather",
    "is_marked",
    "is_reduction",
    "is_region",
    "is_view",
    "is_wait",
    "mutates",
    "num_bytes",
    "op_name",
    "order_index",
    "packed_bytes",
    "payload_bytes",
    "payload_numel",
    "plan_of",
    "source_digest",
    "storage_of",
    "value_key",
    "values_of",
    "wait_of",
    "world_size_of",
]
