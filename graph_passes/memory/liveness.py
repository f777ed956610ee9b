"""Liveness: the bytes that a graph keeps alive while each of its nodes runs.

Storages are counted, not tensors. A storage is alive from the node that allocates it to the last
node that uses it or a view of it, both included::

    position      0    1      2       3      4       5     6    7
    node          ag   wait   split   mm_1   ag_2    mm_2  rs   wait
    unsharded     ======================     |       |     |    |       wait, split: same storage
    unsharded 2                              ========      |    |
    mm_1                              ===============      |    |
    mm_2 (flat gradient)                             ===============    held by rs until its wait
    receive buffer (gloo)                                  =========    ``in_flight_bytes``
    sharded gradient                                       =========... an output: to the end

- Collectives allocate their output at the issue, and keep their input alive until the wait.
- Outputs stay until the end of the graph.
- Inputs have a role. **Standing** inputs (shards, the user's inputs) are counted by their owner.
  **Freed** inputs (tensors saved for a backward) belong to the graph and die after their last use.
  **Held** inputs (tangents) are alive to the end, since autograd holds them.
- What an operator allocates inside (workspace) is not known and not counted.

Positions are those of the graph as it is. A scheduler that tries places for a collective need not
look for aliases again: see ``moved``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import fx

from graph_passes.cost_model import wire_bytes
from graph_passes.graph_utils import (
    is_backward,
    is_collective,
    is_reduction,
    is_wait,
    num_bytes,
    op_name,
    packed_bytes,
)
from graph_passes.markers import mark_of

Category = Literal[
    "unsharded_params", "unsharded_grads", "sharded_grads", "in_flight", "activations", "other"
]
CATEGORIES: tuple[Category, ...] = Category.__args__  # type: ignore[attr-defined]

InputRole = Literal["standing", "freed", "held"]


@dataclass(frozen=True)
class Lifetime:
    """A storage and how long it lives.

    Attributes:
        nodes: the node that allocates it (or the input), then every alias.
        num_bytes: its size.
        begin: first position at which it is alive.
        end: last position at which it is alive.
        category: what it holds; ``in_flight`` is what a collective holds besides input and output.
    """

    nodes: tuple[fx.Node, ...]
    num_bytes: int
    begin: int
    end: int
    category: Category


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of one graph over its positions.

    Attributes:
        live_bytes: bytes alive while each node runs, in graph order.
        peak_bytes: the maximum (0 for an empty graph).
        peak_position: first position of the maximum.
        peak_by_category: bytes of each category there.
    """

    live_bytes: tuple[int, ...]
    peak_bytes: int
    peak_position: int
    peak_by_category: dict[Category, int]


def message_bytes(node: fx.Node) -> int:
    """Return ``in_flight_bytes`` of a backend without buffers of its own: the packed message."""
    return packed_bytes(node)


def receive_buffer_bytes(node: fx.Node) -> int:
    """Return ``in_flight_bytes`` where a reduce-scatter is an exchange and a local sum (gloo).

    Besides the packed message, the other ranks' parts count, except one that is in the output.
    """
    scatters = op_name(node).endswith("::reduce_scatter_tensor")
    received = max(0, wire_bytes(node) - num_bytes(node)) if scatters else 0
    return received + packed_bytes(node)


def default_role(node: fx.Node) -> InputRole:
    """Return the role of a placeholder by AOTAutograd's names; forward inputs are standing."""
    if "tangents" in node.name:
        return "held"
    if "primals" in node.name or not is_backward(node.graph):
        return "standing"
    return "freed"


def storages(
    graph: fx.Graph,
    in_flight_bytes: Callable[[fx.Node], int] = message_bytes,
    role_of: Callable[[fx.Node], InputRole] = default_role,
) -> list[Lifetime]:
    """Return every storage that a graph allocates or owns, with its lifetime.

    Args:
        graph: partitioned graph before its collectives are lowered, with fake tensors as metadata.
        in_flight_bytes: bytes that a collective holds besides its input and output.
        role_of: role of an input.
    """
    index = {node: position for position, node in enumerate(graph.nodes)}
    last = len(index) - 1
    lifetimes = []
    flat_grads = _flat_grads(graph)
    for storage in find_storages(graph)[0]:
        inputs = [n for n in storage.nodes if n.op in ("placeholder", "get_attr")]
        roles = {role_of(n) if n.op == "placeholder" else "standing" for n in inputs}
        if "standing" in roles:
            continue
        begin = 0 if inputs else index[storage.maker]
        end = last if "held" in roles else _last_use(storage.nodes, index)
        category = _category(storage, flat_grads)
        lifetimes.append(Lifetime(tuple(storage.nodes), storage.num_bytes, begin, end, category))
    for node in graph.nodes:
        extra = in_flight_bytes(node) if is_collective(node) else 0
        if extra:
            end = _last_use([node], index, waits_only=True)
            lifetimes.append(Lifetime((node,), extra, index[node], end, "in_flight"))
    return [lifetime for lifetime in lifetimes if lifetime.num_bytes]


def _last_use(nodes: Sequence[fx.Node], index: dict[fx.Node, int], waits_only: bool = False) -> int:
    """Return the last position that reads one of the nodes; a collective reads until its wait."""
    end = max(index[node] for node in nodes)
    for node in nodes:
        for user in node.users:
            if waits_only and not is_wait(user):
                continue
            end = max(end, index[user])
            if is_collective(user):
                end = max([end, *(index[wait] for wait in user.users if is_wait(wait))])
    return end


def _flat_grads(graph: fx.Graph) -> set[fx.Node]:
    """Return the tensors that reductions send, and the tensors that are concatenated to them."""
    found: set[fx.Node] = set()
    for node in filter(is_reduction, graph.nodes):
        waiting = [node.all_input_nodes[0]]
        while waiting:
            source = waiting.pop()
            found.add(source)
            if op_name(source) in ("aten::cat", "aten::_to_copy", "prims::convert_element_type"):
                waiting.extend(source.all_input_nodes)
    return found


def _category(storage: Storage, flat_grads: set[fx.Node]) -> Category:
    """Return the category of a storage, by the marks of its nodes."""
    for node in storage.nodes:
        if is_collective(node) or is_wait(node) or node.op == "placeholder":
            mark = mark_of(node)
            if mark is not None:
                return "unsharded_params" if mark.kind == "all_gather" else "sharded_grads"
    if any(node in flat_grads for node in storage.nodes):
        return "unsharded_grads"
    if storage.maker.op == "placeholder" and "tangents" in storage.maker.name:
        return "other"
    users = {user for node in storage.nodes for user in node.users}
    if users and all(is_collective(user) for user in users):
        return "in_flight"  # the cast of a shard
    return "activations"


def profile_of(lifetimes: Sequence[Lifetime], num_positions: int) -> MemoryProfile:
    """Return the profile of storages over ``num_positions`` positions."""
    changes = [0] * (num_positions + 1)
    for lifetime in lifetimes:
        changes[lifetime.begin] += lifetime.num_bytes
        changes[lifetime.end + 1] -= lifetime.num_bytes
    live = tuple(accumulate(changes))[:-1]
    peak = max(live, default=0)
    position = live.index(peak) if live else 0
    at_peak: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for lifetime in lifetimes:
        if lifetime.begin <= position <= lifetime.end:
            at_peak[lifetime.category] += lifetime.num_bytes
    return MemoryProfile(live, peak, position, at_peak)


def live_bytes(
    graph: fx.Graph,
    in_flight_bytes: Callable[[fx.Node], int] = message_bytes,
    role_of: Callable[[fx.Node], InputRole] = default_role,
) -> list[int]:
    """Return the bytes alive while each node runs, in graph order; see ``storages``."""
    return list(memory_profile(graph, in_flight_bytes, role_of).live_bytes)


def memory_profile(
    graph: fx.Graph,
    in_flight_bytes: Callable[[fx.Node], int] = message_bytes,
    role_of: Callable[[fx.Node], InputRole] = default_role,
) -> MemoryProfile:
    """Return the profile of a graph; see ``storages`` for the arguments."""
    return profile_of(storages(graph, in_flight_bytes, role_of), len(graph.nodes))


def moved(lifetime: Lifetime, index: dict[fx.Node, int]) -> Lifetime:
    """Return the lifetime of a storage in another order of the nodes, without alias analysis.

    Args:
        lifetime: of a storage that a node of the graph allocates (inputs begin where they did).
        index: new position of every node.
    """
    maker = lifetime.nodes[0]
    if lifetime.category == "in_flight" and is_collective(maker):
        end = _last_use([maker], index, waits_only=True)
    else:
        end = _last_use(lifetime.nodes, index)
    begin = 0 if maker.op == "placeholder" else index[maker]
    return replace(lifetime, begin=begin, end=max(end, begin))


# -- inductor liveness -----------------------------------------------------------------------------
# Lifetimes of storages in the code that Inductor generates for a graph.
#
# Two things cost more than in the graph (fusion, which costs less, is not modelled)::
#
#     position             0     1     2     3      4     5     6
#     node                 mm_1  sum   mm_2  cat    rs    mm_3  ...
#     cat in the graph                       ==========...
#     cat as generated           ================...   pieces of fused kernels are written into it
#     mm_1 in the graph    ===================
#     mm_1 as generated    ==============================  kept to become the buffer of mm_3
#
# - The flat gradient is allocated with the first piece that a fused kernel writes into it. Matrix
#   products have buffers of their own, which are copied at the end.
# - A buffer that dies is kept until the next buffer of the same size replaces it, within the same
#   stretch of compute between two collectives: code is generated for each stretch by itself.


def as_generated(lifetimes: Sequence[Lifetime], graph: fx.Graph) -> list[Lifetime]:
    """Return the lifetimes in the code that Inductor generates for a graph.

    ``lifetimes`` are ``storages`` of the unchanged graph, in their order.
    """
    is_boundary = (is_collective(node) or is_wait(node) for node in graph.nodes)
    stretch_at = list(accumulate(is_boundary))
    return _with_reuse([_early(one, lifetimes) for one in lifetimes], stretch_at)


def _early(flat: Lifetime, lifetimes: Sequence[Lifetime]) -> Lifetime:
    """Begin the lifetime of a flat gradient with its first piece; return others as they are."""
    maker = flat.nodes[0]
    if flat.category != "unsharded_grads" or op_name(maker) != "aten::cat":
        return flat
    pieces = set(maker.all_input_nodes)
    begins = [
        piece.begin
        for piece in lifetimes
        if pieces.intersection(piece.nodes) and "mm" not in op_name(piece.nodes[0])
    ]
    return replace(flat, begin=min([flat.begin, *begins]))


def _with_reuse(lifetimes: list[Lifetime], stretch_at: Sequence[int]) -> list[Lifetime]:
    """Keep every dead buffer until a later one of its size begins, the latest dead first."""
    result = list(lifetimes)
    dead: dict[tuple[int, int], list[int]] = {}
    for which in sorted(range(len(result)), key=lambda i: result[i].begin):
        one = result[which]
        if one.nodes[0].op != "call_function" or is_collective(one.nodes[0]):
            continue
        same_size = dead.setdefault((stretch_at[one.begin], one.num_bytes), [])
        free = [other for other in same_size if result[other].end < one.begin]
        if free:
            taken = max(free, key=lambda i: result[i].end)
            same_size.remove(taken)
            result[taken] = replace(result[taken], end=one.begin - 1)
        same_size.append(which)
    return result


# -- alias analysis --------------------------------------------------------------------------------
# Storages behind the values of a graph's nodes.
#
# An operator's schema says whether its result is new or a view of an argument::
#
#     view(Tensor(a) self) -> Tensor(a)      the storage of self
#     add_(Tensor(a!) self, ...) -> Tensor(a!)   the storage of self
#     mm(Tensor self, Tensor mat2) -> Tensor     a new one
#
# If the schema only says that it may be a view (``reshape``), or there is no schema, the fake
# tensors in ``meta["val"]`` decide: a view shares its storage.


_SILENT_VIEWS = frozenset({"aten::_unsafe_view", "_c10d_functional::wait_tensor"})
"""Operators whose results share the first argument's storage, though the schema hides it."""

_PERHAPS_VIEWS = frozenset(f"aten::{name}" for name in ("reshape", "contiguous", "to", "flatten"))


@dataclass(eq=False)
class Storage:
    """A block of memory.

    Attributes:
        maker: node that allocates it, or its first input.
        num_bytes: its size.
        nodes: the maker and every node with a value in it, in graph order.
    """

    maker: fx.Node
    num_bytes: int
    nodes: list[fx.Node] = field(default_factory=list)


Places = dict[fx.Node, tuple["Storage | None", ...]]
"""Storage of each result of every node; ``None`` for what is no tensor."""


def find_storages(graph: fx.Graph) -> tuple[list[Storage], Places]:
    """Return all storages of a graph in order of appearance, and where each node's results are.

    Nodes carry fake (or meta) tensors in ``meta["val"]``; nodes without have no storage.
    """
    storages: list[Storage] = []
    places: Places = {}
    brought: dict[int, Storage] = {}
    for node in graph.nodes:
        if node.op == "output":
            continue
        results = _results(node)
        found: list[Storage | None] = []
        for position, value in enumerate(results):
            if not isinstance(value, torch.Tensor):
                found.append(None)
                continue
            storage = _aliased(node, position, value, places)
            if storage is None and node.op in ("placeholder", "get_attr"):
                storage = brought.get(_identity(value))
            if storage is None:
                is_input = node.op in ("placeholder", "get_attr")
                storage = Storage(node, storage_bytes(value) if is_input else tensor_bytes(value))
                storages.append(storage)
                if is_input:
                    brought[_identity(value)] = storage
            if node not in storage.nodes[-1:]:
                storage.nodes.append(node)
            found.append(storage)
        places[node] = tuple(found)
    return storages, places


def _results(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _aliased(node: fx.Node, position: int, value: torch.Tensor, places: Places) -> Storage | None:
    """Return the storage that a result shares with an argument of its node, if it does."""
    target = node.target
    if node.op != "call_function":
        return None
    if target is operator.getitem:
        source, which = node.args
        held = places.get(source, ())  # type: ignore[arg-type]
        if isinstance(which, int) and which < len(held):
            return held[which]
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return _same_identity(value, node.all_input_nodes, places)
    name = target.name().split(".")[0]
    if name in _SILENT_VIEWS:
        return _first(places, node.args[0])
    sources = list(_schema_sources(node, target, position))
    if name in _PERHAPS_VIEWS:
        return _same_identity(value, sources, places)
    return _first(places, sources[0]) if sources else None


def _schema_sources(
    node: fx.Node, target: torch._ops.OpOverload, position: int
) -> Iterator[fx.Node]:
    """Yield the arguments whose storage a result shares by the operator's schema."""
    for place, name in _aliased_arguments(target, position):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        if isinstance(given, fx.Node):
            yield given


@lru_cache(maxsize=4096)
def _aliased_arguments(target: torch._ops.OpOverload, position: int) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that may share their storage with a result."""
    returns = target._schema.returns
    result = returns[min(position, len(returns) - 1)] if returns else None
    if result is None or result.alias_info is None:
        return ()
    wanted = result.alias_info.before_set
    aliased = []
    for place, argument in enumerate(target._schema.arguments):
        info = argument.alias_info
        # A list of views (split) has a set of its own: its source is marked with a star.
        if info is not None and (info.before_set & wanted if wanted else "*" in info.after_set):
            aliased.append((place, str(argument.name)))
    return tuple(aliased)


def _first(places: Places, source: Any) -> Storage | None:
    held = places.get(source, ())
    return held[0] if held else None


def _same_identity(value: torch.Tensor, sources: list[fx.Node], places: Places) -> Storage | None:
    """Return the storage of the source whose fake tensor shares this value's storage."""
    wanted = _identity(value)
    for source in sources:
        for held, other in zip(places.get(source, ()), _results(source), strict=False):
            if held is not None and isinstance(other, torch.Tensor) and _identity(other) == wanted:
                return held
    return None


def _identity(value: torch.Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a subclass without storage
        return id(value)


def tensor_bytes(value: torch.Tensor) -> int:
    """Return the bytes that a new tensor of this shape and strides takes."""
    extent = 1
    for size, stride in zip(value.size(), value.stride(), strict=True):
        if as_int(size) == 0:
            return 0
        extent += (as_int(size) - 1) * as_int(stride)
    return extent * value.element_size()


def storage_bytes(value: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage."""
    try:
        return as_int(value.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return tensor_bytes(value)


def as_int(size: Any) -> int:
    """Return a size as a number; of a symbolic size its hint, or 0."""
    return size if isinstance(size, int) else int(size.node.hint or 0)
