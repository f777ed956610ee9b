"""Lifetimes of storages in the code that Inductor generates for a graph.

Two things cost more than the graph shows (fusion, which costs less, is not modelled)::

    position             0     1     2     3      4     5     6
    node                 mm_1  sum   mm_2  cat    rs    mm_3  ...
    cat in the graph                       ==========...
    cat as generated           ================...      pieces of fused kernels are written into it
    mm_1 in the graph    ===================
    mm_1 as generated    ==============================  kept to become the buffer of mm_3

- The flat gradient is allocated with the first piece that a fused kernel writes into it. Pieces
  made by matrix products are buffers of their own, copied in at the end.
- A buffer that dies is kept until the next buffer of the same size takes its place, in the same
  stretch of compute between two collectives: code is generated for each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from torch import fx

from graph_passes.graph_utils import is_collective, is_wait, op_name
from graph_passes.memory.liveness import Lifetime


def as_generated(lifetimes: Sequence[Lifetime], graph: fx.Graph) -> list[Lifetime]:
    """Lifetimes in the code that Inductor generates for a graph.

    Args:
        lifetimes: ``storages`` of the graph, in their order.
        graph: the same graph, unchanged since.
    """
    is_boundary = (is_collective(node) or is_wait(node) for node in graph.nodes)
    stretch_at = list(accumulate(is_boundary))
    return _with_reuse([_early(one, lifetimes) for one in lifetimes], stretch_at)


def _early(flat: Lifetime, lifetimes: Sequence[Lifetime]) -> Lifetime:
    """A flat gradient from its first piece on; any other storage as it is."""
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
    """Every dead buffer is kept until a later one of its size begins, the latest dead first."""
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
