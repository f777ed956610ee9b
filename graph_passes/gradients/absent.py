"""Absent gradients: what a graph puts into a flat gradient for parameters that no loss touched.

Before::

    mm -> view --+
    zeros -------+-> cat -> reduce_scatter

After::

    mm -> view --+
    full(-0.0) --+-> cat -> reduce_scatter

Autograd fills in zeros. Reduced, they could not be told from a gradient that is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from graph_passes.gradients.flat_gradient import CASTS, chain_of_writes
from graph_passes.gradients.producers import is_zero
from graph_passes.graph_pass import graph_pass
from graph_passes.graph_utils import is_collective, is_wait, op_name
from graph_passes.markers import NO_VALUE, cuts_views

_CONSTANTS = frozenset({"aten::zeros", "aten::full"})

Ranges = Sequence[tuple[int, int]]
"""Begin and end of ranges of elements, in order."""


@graph_pass(is_bitwise=True)
def absent_gradients(graph: fx.Graph) -> None:
    """Write down which parameters have no gradient, in what is reduced."""
    for cat in graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        if not cuts_views(cat):
            continue
        for index, piece in enumerate(cat.args[0]):
            if op_name(piece) in _CONSTANTS and is_zero(piece):
                _replace(cat, index, piece)


def _replace(cat: fx.Node, index: int, piece: fx.Node) -> None:
    value = piece.meta["val"]
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    with cat.graph.inserting_before(cat):
        size = [value.numel()]
        absent = cat.graph.call_function(torch.ops.aten.full.default, (size, NO_VALUE), options)
    absent.meta.update(piece.meta)
    pieces: list[Any] = list(cat.args[0])  # type: ignore[arg-type]
    pieces[index] = absent
    cat.args = (pieces, *cat.args[1:])
    if not piece.users:
        cat.graph.erase_node(piece)


def absent_in(flat_gradient: object) -> Ranges:
    """Elements of a flat gradient that this rank does not compute.

    Args:
        flat_gradient: what a reduction reads: a concatenation or a chain of writes, perhaps cast or
            reduced before. Of a sum (a unit that is called several times), what all terms lack; an
            input of the graph, the sum of earlier steps, is no term: its values tell.
    """
    if not isinstance(flat_gradient, fx.Node):
        return ()
    node, name = flat_gradient, op_name(flat_gradient)
    if name in CASTS or is_wait(node) or is_collective(node):
        return absent_in(node.args[0])
    if name == "aten::add":
        terms = [absent_in(term) for term in node.all_input_nodes if not _is_input(term)]
        return reduce(_common, terms) if terms else ()
    if name == "aten::cat":
        return _absent_pieces(node)
    chain = chain_of_writes(node)
    if not chain:
        return ()
    gaps: Any = chain[-1].args[2]
    return tuple(zip(gaps[::2], gaps[1::2], strict=True))


def _is_input(node: fx.Node) -> bool:
    while op_name(node) in CASTS:
        node = node.all_input_nodes[0]
    return node.op == "placeholder"


def _common(one: Ranges, other: Ranges) -> Ranges:
    pairs = [(max(a, b), min(end, other_end)) for a, end in one for b, other_end in other]
    return tuple((begin, end) for begin, end in pairs if begin < end)


def _absent_pieces(cat: fx.Node) -> Ranges:
    pieces: list[fx.Node] = list(cat.args[0])  # type: ignore[arg-type]
    ends = list(accumulate(int(piece.meta["val"].numel()) for piece in pieces))
    begins = [0, *ends[:-1]]
    spans = zip(pieces, begins, ends, strict=True)
    return tuple((begin, end) for piece, begin, end in spans if _is_absent(piece))


def _is_absent(piece: fx.Node) -> bool:
    return op_name(piece) == "aten::full" and is_zero(piece)
