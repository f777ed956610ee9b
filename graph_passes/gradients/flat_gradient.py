"""Flat gradients in a graph: the writes into each, and the bytes that are copied."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import fx

from graph_passes.gradients.operators import NAMESPACE
from graph_passes.graph_utils import collectives, num_bytes, op_name
from graph_passes.markers import mark_of

CASTS = frozenset({"aten::_to_copy", "prims::convert_element_type"})
_FUSED = frozenset({"aten::sum"})


class Range(NamedTuple):
    """Elements of a flat gradient that one node writes, or adds to."""

    begin: int
    end: int
    adds: bool


def write_name(node: fx.Node) -> str:
    """Name of the operator of ``gradients.operators`` that a node calls; ``""`` for other nodes."""
    namespace, _, name = op_name(node).partition("::")
    return name if namespace == NAMESPACE else ""


def reductions(graph: fx.Graph) -> Iterator[fx.Node]:
    """The marked collectives that reduce gradients, in graph order."""
    return filter(_reduces, collectives(graph))


def _reduces(collective: fx.Node) -> bool:
    mark = mark_of(collective)
    return mark is not None and mark.kind != "all_gather"


def concatenation_of(reduction: fx.Node) -> fx.Node | None:
    """The concatenation of flattened gradients that a reduction reads, if nothing else does."""
    source = reduction.args[0]
    cat: Any = source
    if isinstance(source, fx.Node) and op_name(source) in CASTS and len(source.users) == 1:
        cat = source.args[0]
    if not isinstance(cat, fx.Node) or op_name(cat) != "aten::cat" or len(cat.users) != 1:
        return None
    pieces: list[fx.Node] = cat.args[0]  # type: ignore[assignment]
    values = [piece.meta.get("val") for piece in pieces]
    one_row = all(v is not None and v.dim() == 1 and isinstance(v.numel(), int) for v in values)
    return cat if one_row else None


def chain_of(reduction: fx.Node) -> list[fx.Node]:
    """The writes of a reduction's flat gradient, the last one first, ``new_flat`` at the end."""
    return chain_of_writes(reduction.args[0])


def chain_of_writes(node: object) -> list[fx.Node]:
    """The writes of a flat gradient, given by the last one; empty for other nodes."""
    chain: list[fx.Node] = []
    while isinstance(node, fx.Node) and write_name(node):
        chain.append(node)
        node = None if write_name(node) == "new_flat" else node.args[0]
    return chain


def copied_bytes(graph: fx.Graph, fuses: bool = False) -> int:
    """Bytes copied between the producers of gradients and the reductions.

    Counts what concatenations read, and what ``write`` copies without a cast.

    Args:
        graph: before the collectives are lowered.
        fuses: whether the compiler fuses a ``write`` with the sum that makes its source.
    """
    total = 0
    for reduction in reductions(graph):
        cat = concatenation_of(reduction)
        copied = [] if cat is None else [cat]
        for write in chain_of(reduction):
            copied += _copied(write, fuses)
        total += sum(num_bytes(node) for node in copied)
    return total


def _copied(write: fx.Node, fuses: bool) -> list[fx.Node]:
    """The gradients that a write copies as they are."""
    if write_name(write) not in ("write", "write_many"):
        return []
    dtype = write.meta["val"].dtype
    kept = [source for source in _sources(write) if source.meta["val"].dtype == dtype]
    return [source for source in kept if not (fuses and op_name(_base(source)) in _FUSED)]


def _base(node: fx.Node) -> fx.Node:
    """The tensor that a gradient is a reshaped view of."""
    while op_name(node) in ("aten::view", "aten::reshape") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _sources(write: fx.Node) -> list[fx.Node]:
    sources: Any = write.args[2] if write_name(write) == "write_many" else [write.args[3]]
    return list(sources)


def ranges_of(write: fx.Node) -> list[Range]:
    """Elements that a node of a chain writes."""
    name = write_name(write)
    args: Any = write.args
    if name == "new_flat":
        return [Range(b, e, adds=False) for b, e in zip(args[2][::2], args[2][1::2], strict=True)]
    if name == "write_many":
        starts = list(args[1])
        numels = [source.meta["val"].numel() for source in args[2]]
    elif name == "mm_into":
        starts = [args[1]]
        numels = [math.prod(args[3].meta["val"].shape[:-1]) * args[4].meta["val"].shape[-1]]
    elif name in ("sum_into", "embedding_into"):
        starts, numels = [args[1]], [math.prod(args[2])]
    else:
        starts, numels = [args[1]], [args[3].meta["val"].numel()]
    adds = name == "add_into" or (name == "mm_into" and bool(args[5]))
    return [Range(b, b + numel, adds) for b, numel in zip(starts, numels, strict=True)]


def misplaced_writes(found: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, str, str]]:
    """Writes of elements that are left out, written twice, or added to before they are written.

    Args:
        found: the marked collectives of a graph.

    Yields:
        The node, what was expected of it, and what came.
    """
    for reduction in filter(_reduces, found):
        chain = chain_of(reduction)
        if not chain:
            continue
        if write_name(chain[-1]) != "new_flat":
            yield chain[-1], "a chain of writes that begins with new_flat", str(chain[-1].args[0])
            continue
        for node in chain:
            if len(node.users) != 1:
                yield node, "the next write as its only user", str(list(node.users))
        yield from _misplaced(chain[::-1])


def _misplaced(chain: list[fx.Node]) -> Iterator[tuple[fx.Node, str, str]]:
    """Misplaced writes of one chain, its first node first."""
    written: set[tuple[int, int]] = set()
    for node in chain:
        for begin, end, adds in ranges_of(node):
            if adds and (begin, end) not in written:
                yield node, f"a write of elements {begin} to {end} before adding", "none"
            written.add((begin, end))
    position = 0
    plain = [(r.begin, r.end, node) for node in chain for r in ranges_of(node) if not r.adds]
    for begin, end, node in sorted(plain, key=lambda item: item[:2]):
        if begin != position:
            yield node, f"a write from element {position} on", f"one from element {begin} on"
        position = end
    numel = chain[0].args[1]
    if position != numel:
        yield chain[0], f"writes up to element {numel}", f"writes up to {position}"
